"""Whether a received rollout group may enter the learner's buffer: pure checks, the first failure wins.

What needs the tokenizer or the environment (prompt, reward) is checked by the verifier process afterwards.
"""

from itertools import pairwise

import numpy as np

from protocol.messages import Completion, RolloutGroup
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from protocol.staleness import newest_version, oldest_version, staleness
from protocol.tasks import assigned_task

LOGPROB_FLOOR = -200.0
"""A sampled token cannot be less likely than this: the largest noise is 17 (see `protocol.noise`) and logits
are bounded."""


def check_group(
    group: RolloutGroup,
    spec: RunSpec,
    run_id: bytes,
    sender: bytes,
    *,
    policy: bytes,
    learner_version: int | None,
    vocabulary_size: int | None,
) -> None:
    """Raise `Refused` with the first rule that the group breaks.

    `policy` is the one the group must be of. `learner_version` is None when staleness has no meaning
    (an external policy's group).
    """
    if group.policy != policy:
        raise Refused(RefusalReason.UNKNOWN_POLICY, f"policy {group.policy.hex()[:12]} is not trained here")
    if group.sampling != spec.sampling:
        raise Refused(RefusalReason.WRONG_SAMPLING, "the sampling contract is not the run's")
    if spec.trust.require_seeded and not group.sampling.seeded:
        raise Refused(RefusalReason.WRONG_SAMPLING, "this run demands seeded sampling")
    if group.task.config_hash not in {task.config_hash for task in spec.tasks}:
        raise Refused(
            RefusalReason.UNKNOWN_TASK, f"task {group.task.config_hash.hex()[:12]} is not in the run"
        )
    if group.task != assigned_task(spec.tasks, run_id, sender, group.policy, group.version, group.counter):
        raise Refused(RefusalReason.WRONG_SEED, "the task is not the one assigned to this counter")
    _check_size(group, spec)
    for index, completion in enumerate(group.completions):
        _check_completion(completion, index, spec.sampling.max_new_tokens, vocabulary_size)
    if oldest_version(group) != group.version:
        raise Refused(RefusalReason.BAD_VERSIONS, "the group's version is not that of its oldest token")
    if learner_version is not None:
        check_versions(oldest_version(group), newest_version(group), learner_version, spec.max_staleness)


def check_versions(oldest: int, newest: int, learner_version: int, max_staleness: int) -> None:
    """Raise `Refused` for a group whose oldest and newest tokens are from versions that may not be trained
    on."""
    if newest > learner_version:
        raise Refused(
            RefusalReason.FUTURE_VERSION,
            f"version {newest} does not exist, the learner is at {learner_version}",
        )
    lag = staleness(learner_version, oldest)
    if lag > max_staleness:
        raise Refused(RefusalReason.TOO_STALE, f"{lag} versions behind, the bound is {max_staleness}")


def _check_size(group: RolloutGroup, spec: RunSpec) -> None:
    """Whole groups, and those of which enough completions were finished and the others are named."""
    size, count, lost = spec.sampling.group_size, len(group.completions), group.lost
    if count + len(lost) != size or len(group.rewards) != count:
        raise Refused(
            RefusalReason.RAGGED_GROUP,
            f"{count} completions, {len(lost)} lost and {len(group.rewards)} rewards, the run wants {size}",
        )
    if any(later <= earlier for earlier, later in pairwise(lost)) or any(place >= size for place in lost):
        raise Refused(
            RefusalReason.RAGGED_GROUP, "the places of lost completions do not ascend below the size"
        )
    if count < min(spec.trust.min_completions, size):
        raise Refused(
            RefusalReason.RAGGED_GROUP,
            f"{count} of {size} completions, the run wants at least {spec.trust.min_completions}",
        )


def _check_completion(
    completion: Completion, index: int, max_new_tokens: int, vocabulary_size: int | None
) -> None:
    if len(completion.tokens) % 4 or len(completion.tokens) != len(completion.logprobs):
        raise Refused(
            RefusalReason.RAGGED_GROUP, f"completion {index}: tokens and log-probs differ in length"
        )
    tokens, logprobs = completion.token_array(), completion.logprob_array()
    if len(tokens) > max_new_tokens:
        raise Refused(
            RefusalReason.BAD_TOKENS,
            f"completion {index}: {len(tokens)} tokens, the run allows {max_new_tokens}",
        )
    if completion.finish == "length" and len(tokens) != max_new_tokens:
        raise Refused(RefusalReason.BAD_TOKENS, f"completion {index}: ended by length before the limit")
    if vocabulary_size is not None and int(tokens.max()) >= vocabulary_size:
        raise Refused(RefusalReason.BAD_TOKENS, f"completion {index}: a token id outside the vocabulary")
    if not np.isfinite(logprobs).all():
        raise Refused(RefusalReason.BAD_LOGPROBS, f"completion {index}: a log-prob is not finite")
    if (logprobs > 0).any() or (logprobs < LOGPROB_FLOOR).any():
        raise Refused(
            RefusalReason.BAD_LOGPROBS, f"completion {index}: a log-prob is above 0 or below {LOGPROB_FLOOR}"
        )
    if sum(run.count for run in completion.version_runs) != len(tokens):
        raise Refused(
            RefusalReason.BAD_VERSIONS, f"completion {index}: version runs do not add up to the tokens"
        )
    versions = [run.version for run in completion.version_runs]
    if any(later <= earlier for earlier, later in pairwise(versions)):
        raise Refused(RefusalReason.BAD_VERSIONS, f"completion {index}: versions do not ascend")

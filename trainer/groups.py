"""A rollout group as the trainer wants it: token arrays, rewards, and where it came from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.messages import RolloutGroup
from protocol.staleness import oldest_version
from trainer.advantages import is_informative


class BadGroup(ValueError):
    """A group that does not fit together; nothing can be learned from it."""


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt, its completions [T_i] and their rewards, as the learner's own side scored them.

    `behavior_logprobs` is None for groups of other policies: how likely the tokens were under a foreign
    policy (often with another tokenizer) says nothing about this one, so they count as drawn from it when
    they are trained on.
    """

    id: bytes
    is_local: bool
    oldest_version: int
    prompt_ids: npt.NDArray[np.int64]
    completions: tuple[npt.NDArray[np.int64], ...]
    behavior_logprobs: tuple[npt.NDArray[np.float32], ...] | None
    rewards: tuple[float, ...]
    token_versions: tuple[npt.NDArray[np.int64], ...] | None = None
    """The version that generated each token; None: all of them `oldest_version`."""

    def versions_of(self, index: int) -> npt.NDArray[np.int64]:
        """The version of each token of one completion, [T]."""
        if self.token_versions is None:
            return np.full(len(self.completions[index]), self.oldest_version, dtype=np.int64)
        return self.token_versions[index]

    @property
    def is_informative(self) -> bool:
        return is_informative(self.rewards) and any(len(tokens) for tokens in self.completions)


def local_group(
    name: bytes, group: RolloutGroup, prompt_ids: list[int], rewards: list[float]
) -> TrainingGroup:
    """A group of the learner's own policy, with its behavior log-probs. Raises `BadGroup`."""
    completions = tuple(completion.token_array().astype(np.int64) for completion in group.completions)
    logprobs = tuple(completion.logprob_array() for completion in group.completions)
    if any(len(a) != len(b) for a, b in zip(completions, logprobs, strict=True)):
        raise BadGroup("tokens and log-probs differ in length")
    return _checked(
        TrainingGroup(
            id=name,
            is_local=True,
            oldest_version=oldest_version(group),
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            completions=completions,
            behavior_logprobs=logprobs,
            rewards=tuple(rewards),
            token_versions=tuple(
                np.repeat(
                    np.asarray([run.version for run in completion.version_runs], dtype=np.int64),
                    [run.count for run in completion.version_runs],
                )
                for completion in group.completions
            ),
        )
    )


def external_group(
    name: bytes,
    group: RolloutGroup,
    prompt_ids: list[int],
    completions: list[list[int]] | None,
    rewards: list[float],
) -> TrainingGroup:
    """Another policy's group. `completions` are its texts in this model's tokens; None: its own tokens will
    do."""
    tokens = (
        [np.asarray(ids, dtype=np.int64) for ids in completions]
        if completions is not None
        else [completion.token_array().astype(np.int64) for completion in group.completions]
    )
    return _checked(
        TrainingGroup(
            id=name,
            is_local=False,
            oldest_version=oldest_version(group),
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            completions=tuple(tokens),
            behavior_logprobs=None,
            rewards=tuple(rewards),
        )
    )


def _checked(group: TrainingGroup) -> TrainingGroup:
    if len(group.prompt_ids) == 0:
        raise BadGroup("the prompt is empty")
    if len(group.completions) != len(group.rewards) or not group.rewards:
        raise BadGroup(f"{len(group.completions)} completions but {len(group.rewards)} rewards")
    if not np.isfinite(group.rewards).all():
        raise BadGroup("a reward is not finite")
    return group

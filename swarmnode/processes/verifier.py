"""The verifier process: rebuilds prompt and truth of a received group and scores it. Imports no torch.

Started by a node with a channel. What a group claims is never trusted: its prompt must be the one that its
task has here, its rewards those that its completions earn here. Whatever a group contains, it costs one
refusal and no more.
"""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from protocol.messages import Completion, RolloutGroup, prompt_hash
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from swarmnode.environments import Environment, TaskConfigError, UnknownTask, build_environment
from swarmnode.environments.prompt import (
    ModelTokenizer,
    TokenizerError,
    decode_completion,
    encode_completion,
    load_tokenizer,
    render_prompt,
)
from swarmnode.processes.channel import Channel
from swarmnode.processes.child import Failure, run_child
from swarmnode.processes.inbox import Inbox

log = logging.getLogger(__name__)

CONFIGURE_TIMEOUT_S = 60.0
MAX_CHECK_CPU_S = 20.0
"""A check takes milliseconds. Processor time and not the clock's, so that a busy machine refuses nobody."""
MAX_DETAIL_CHARS = 300


class CheckTooLong(BaseException):
    """Not an `Exception`, so that no scorer's own `except Exception` keeps it from ending the check."""


@dataclass(frozen=True)
class Verdict:
    """What the learner may train on: prompt [P] and rewards [G] as computed here.

    `completions` are the tokens of an external group; None for a local one, which has its own.
    """

    prompt_ids: list[int]
    completions: list[list[int]] | None
    rewards: list[float]


class Verifier:
    """Checks groups of one run by one tokenizer."""

    def __init__(self, spec: RunSpec, environment: Environment, tokenizer: ModelTokenizer) -> None:
        self._spec = spec
        self._environment = environment
        self._tokenizer = tokenizer

    def check(self, body: bytes, source: str) -> Verdict:
        """Check an encoded group of the learner's policy (`local`) or another (`external`).

        Raises `Refused`.
        """
        group = RolloutGroup.decode(body)
        if len(group.rewards) != len(group.completions):
            raise Refused(
                RefusalReason.RAGGED_GROUP,
                f"{len(group.completions)} completions and {len(group.rewards)} rewards",
            )
        for index, completion in enumerate(group.completions):
            if len(completion.tokens) % 4:
                raise Refused(RefusalReason.RAGGED_GROUP, f"completion {index}: tokens are not whole numbers")
        try:
            prompt_ids = render_prompt(self._tokenizer, self._environment.question(group.task))
        except UnknownTask as error:
            raise Refused(RefusalReason.UNKNOWN_TASK, str(error)) from error
        same_prompt = prompt_hash(prompt_ids) == group.prompt_hash
        if source == "local":
            return self._check_local(group, prompt_ids, same_prompt)
        if source == "external":
            return self._check_external(group, prompt_ids, same_prompt)
        raise ValueError(f"unknown source {source!r}")

    def _check_local(self, group: RolloutGroup, prompt_ids: list[int], same_prompt: bool) -> Verdict:
        """A group of this learner's policy: same prompt, same end tokens, same rewards."""
        if not same_prompt:
            raise Refused(
                RefusalReason.PROMPT_MISMATCH,
                "the prompt's tokens are not those of this task: compare tokenizers",
            )
        tokens = [completion.token_array().tolist() for completion in group.completions]
        for index, (completion, ids) in enumerate(zip(group.completions, tokens, strict=True)):
            self._check_end(completion, ids, index)
        rewards = self._scores(group, tokens)
        tolerance = self._spec.trust.reward_tolerance
        for index, (claimed, own) in enumerate(zip(group.rewards, rewards, strict=True)):
            if abs(claimed - own) > tolerance:
                raise Refused(
                    RefusalReason.REWARD_MISMATCH,
                    f"completion {index} earns {own:g}, not {claimed:g}: compare environment versions",
                )
        return Verdict(prompt_ids, None, rewards)

    def _check_end(self, completion: Completion, ids: list[int], index: int) -> None:
        ends = [position for position, token in enumerate(ids) if token in self._tokenizer.eos_ids]
        expected = [len(ids) - 1] if completion.finish == "stop" else []
        if ends != expected:
            raise Refused(
                RefusalReason.BAD_TOKENS,
                f"completion {index} of {len(ids)} tokens finished by {completion.finish!r} "
                f"has end tokens at {ends[:8]}",
            )

    def _check_external(self, group: RolloutGroup, prompt_ids: list[int], same_prompt: bool) -> Verdict:
        """Another policy's group, maybe of another tokenizer.

        Its texts become tokens of this one, cut to the run's limit; what is left is what is scored.
        """
        tokens = [
            self._own_tokens(completion, index, same_prompt)[: self._spec.sampling.max_new_tokens]
            for index, completion in enumerate(group.completions)
        ]
        if not any(tokens):
            raise Refused(RefusalReason.BAD_TOKENS, "all completions are empty")
        return Verdict(prompt_ids, tokens, self._scores(group, tokens))

    def _own_tokens(self, completion: Completion, index: int, same_prompt: bool) -> list[int]:
        end = [self._tokenizer.eos_ids[0]] if completion.finish == "stop" else []
        if completion.text is not None:
            return encode_completion(self._tokenizer, completion.text) + end
        if not same_prompt:
            raise Refused(
                RefusalReason.MALFORMED,
                f"completion {index} has no text, and its tokens are of another tokenizer: share text",
            )
        # The prompt's tokens agree, so the tokenizer is ours; the text still decides, as for any other group.
        text = decode_completion(self._tokenizer, completion.token_array().tolist())
        return encode_completion(self._tokenizer, text) + end

    def _scores(self, group: RolloutGroup, tokens: list[list[int]]) -> list[float]:
        return [
            float(self._environment.score(group.task, decode_completion(self._tokenizer, ids)))
            for ids in tokens
        ]


@contextmanager
def limited_cpu_time(seconds: float) -> Iterator[None]:
    """Raise `CheckTooLong` in the body once it has used `seconds` of processor time. Main thread only."""

    def on_alarm(signal_number: int, frame: FrameType | None) -> None:
        raise CheckTooLong(f"took more than {seconds:g} s of processor time")

    previous = signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def answer(verifier: Verifier, message: dict[str, Any]) -> dict[str, Any]:
    """The node's answer to a check message, whatever the group contains."""
    refusal: str
    try:
        with limited_cpu_time(MAX_CHECK_CPU_S):
            verdict = verifier.check(message["body"], message["source"])
    except Refused as refused:
        refusal = str(refused)
    except (Exception, CheckTooLong) as error:
        # The group is a stranger's: what it can raise in a scorer or tokenizer is not known beforehand.
        log.exception("check of group %s from %s failed", message["id"].hex(), message["sender"].hex())
        refusal = f"{RefusalReason.VERIFIER_FAILED.value}: {type(error).__name__}: {error}"
    else:
        return {
            "type": "checked",
            "id": message["id"],
            "ok": True,
            "reason": None,
            "prompt_ids": verdict.prompt_ids,
            "completions": verdict.completions,
            "rewards": verdict.rewards,
        }
    log.info("group %s is refused: %s", message["id"].hex()[:16], refusal)
    return {
        "type": "checked",
        "id": message["id"],
        "ok": False,
        "reason": " ".join(refusal.split())[:MAX_DETAIL_CHARS],
        "prompt_ids": [],
        "completions": None,
        "rewards": [],
    }


def configure(message: dict[str, Any]) -> Verifier:
    """The verifier of a configure message. Raises `Failure`, `TaskConfigError`, `TokenizerError`."""
    if message["type"] != "configure":
        raise Failure(f"the first message was a {message['type']}, not a configuration")
    try:
        spec = RunSpec.decode(message["spec"])
    except Refused as error:
        raise Failure(f"the run's spec cannot be used: {error}") from error
    return Verifier(
        spec, build_environment(spec.tasks, spec.partial_credit), load_tokenizer(message["model_dir"])
    )


def serve(channel: Channel, inbox: Inbox) -> None:
    """Answer checks in order until the node asks for an end (`Stopped`)."""
    first = inbox.receive(CONFIGURE_TIMEOUT_S)
    if first is None:
        raise Failure(f"no configuration came within {CONFIGURE_TIMEOUT_S:.0f} s")
    verifier = configure(first)
    channel.send({"type": "ready"})
    while True:
        message = inbox.receive(None)
        if message is None:
            continue
        if message["type"] != "check":
            raise Failure(f"the node sent an unknown message {message['type']!r}: please report this")
        channel.send(answer(verifier, message))


def main() -> int:
    return run_child(serve, (TaskConfigError, TokenizerError))


if __name__ == "__main__":
    sys.exit(main())

"""The rollout process: generates the groups that the node asks for, with the weights it was last given.

Started by a node with a channel. Weights change between batches only, so every token of a group has the
same version. Task and sampling noise follow from (run, node, policy, version, counter); nothing here can
choose them.
"""

import gc
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol import limits
from protocol.messages import Completion, RolloutGroup, prompt_hash
from protocol.refusals import Refused
from protocol.run_spec import RunSpec
from protocol.tasks import TaskRef, assigned_task, group_seed
from swarmnode.engines.base import GroupRequest, LoadError, SampledCompletion
from swarmnode.engines.memory import NotEnoughMemory
from swarmnode.engines.transformers_engine import EngineError, TransformersEngine
from swarmnode.environments import Environment, TaskConfigError, build_environment
from swarmnode.environments.prompt import (
    ModelTokenizer,
    TokenizerError,
    decode_completion,
    load_tokenizer,
    render_prompt,
)
from swarmnode.processes.channel import Channel
from swarmnode.processes.child import Failure, run_child
from swarmnode.processes.inbox import Inbox

log = logging.getLogger(__name__)

CONFIGURE_TIMEOUT_S = 60.0
BATCH_FILL_S = 0.005
"""How long a batch that is not full waits for requests that are on their way."""
MAX_PENDING = 4096
COUNTER_WINDOW = 65_536
"""How far below the highest counter a new one may lie; older ones are known to be used up."""

PROBE_TOLERANCE = {"float32": 0.01, "bfloat16": 0.5}
"""Largest allowed difference of a probe's log-prob from the learner's, in nats.

The learner computes its probe in float32 from the published bf16 weights. An engine in float32 differs by the
order of its sums: 2e-5 was seen for SmolLM2-135M, so 0.01 leaves room for larger models and other devices. An
engine in bfloat16 rounds every activation to 8 bits: up to 0.26 was seen. A layer that is missing or shuffled
gives 5 to 20 on that model and 0.6 to 3 on the tiny one.
"""

PATCH_PROBE_TOKENS = 3
"""How much of the probe is computed after deltas were applied. Up to three tokens cost little more than
reading all weights once; whether every bit is right is told by the file's hashes, checked meanwhile."""

KNOWN_FAILURES = (EngineError, NotEnoughMemory, TaskConfigError, TokenizerError)
"""Their messages are written for people; anything else is a bug and leaves a traceback in the log."""


class EngineSettings(BaseModel):
    """Which engine, and what it may use of this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["transformers"] = "transformers"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default=1, ge=1)
    max_batch_sequences: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class Asked:
    """One group to generate: everything that follows from its counter and the loaded version."""

    counter: int
    version: int
    task: TaskRef
    prompt_ids: list[int]
    seed: int


class Counters:
    """Which counters were used. A counter used twice would send two groups with the same tokens."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._floor = 0

    def use(self, counter: int) -> bool:
        """Mark `counter`; False when it was used before or is too old to know."""
        if counter < self._floor or counter in self._used:
            return False
        self._used.add(counter)
        if len(self._used) >= 2 * COUNTER_WINDOW:
            self._floor = max(self._used) - COUNTER_WINDOW + 1
            self._used = {used for used in self._used if used >= self._floor}
        return True


class RolloutWorker:
    """One run's groups for one policy, made with one engine."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        policy: bytes,
        node_key: bytes,
        engine: TransformersEngine,
        environment: Environment,
        tokenizer: ModelTokenizer,
        probe_tolerance: float,
        share_text: bool,
    ) -> None:
        self.engine = engine
        self.groups_per_batch = max(1, engine.max_batch_sequences // spec.sampling.group_size)
        self._spec = spec
        self._run_id = spec.run_id
        self._policy = policy
        self._node_key = node_key
        self._environment = environment
        self._tokenizer = tokenizer
        self._probe_tolerance = probe_tolerance
        self._share_text = share_text

    def load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Bring a version in by deltas or from its file, check it by its probe, and return the answer for the
        node. A version that fails changes nothing.
        """
        version, probe = int(message["version"]), message.get("probe")
        deltas = message.get("deltas") or []
        started = time.monotonic()
        errors: list[float] = []

        def check() -> None:
            if probe is not None:
                tokens, logprobs = probe["tokens"], probe["logprobs"]
                if deltas:
                    tokens, logprobs = tokens[:PATCH_PROBE_TOKENS], logprobs[: PATCH_PROBE_TOKENS - 1]
                errors.append(self._probe_error(tokens, logprobs))

        way = "deltas" if deltas else "file"
        try:
            if deltas:
                self._patch(deltas, version, check)
            else:
                self.engine.load(Path(message["path"]), version, check)
        except LoadError as error:
            log.error("version %d is not used (from %s): %s", version, way, error)
            return {"type": "load_failed", "version": version, "way": way, "reason": str(error)}
        return {
            "type": "loaded",
            "version": version,
            "way": way,
            "seconds": time.monotonic() - started,
            "probe_error": errors[0] if errors else None,
            "patch_obstacle": self.engine.patch_obstacle,
        }

    def _patch(self, deltas: list[dict[str, Any]], version: int, check: Callable[[], None]) -> None:
        at = self.engine.version
        for delta in deltas:
            if delta["parent"] != at:
                raise LoadError(f"a delta for version {delta['parent']} was given, version {at} is there")
            at = delta["version"]
        if at != version:
            raise LoadError(f"the deltas lead to version {at}")
        self.engine.patch([Path(delta["path"]) for delta in deltas], version, check)

    def _probe_error(self, tokens: list[int], logprobs: list[float]) -> float:
        """Largest difference to the learner's log-probs. Raises `LoadError` when it is too large."""
        if len(tokens) != len(logprobs) + 1 or not logprobs:
            raise LoadError(f"the probe has {len(tokens)} tokens and {len(logprobs)} log-probs")
        if not all(0 <= token < self.engine.vocabulary_size for token in tokens):
            raise LoadError("the probe has a token that the model lacks")
        own = self.engine.probe(tokens)
        error = max(abs(mine - theirs) for mine, theirs in zip(own, logprobs, strict=True))
        # Written so that a difference that is not a number fails as well.
        if not error <= self._probe_tolerance or not all(map(math.isfinite, own)):
            raise LoadError(
                f"its probe differs from the learner's by {error:.3g}, {self.engine.name} allows "
                f"{self._probe_tolerance:g}: the file was changed, or this engine computes another model"
            )
        return error

    def ask(self, counter: int) -> Asked:
        """What the loaded version has to answer for `counter`."""
        version = self.engine.version
        if version is None:
            raise EngineError("no version is loaded: the node must send a load before groups are made")
        names = (self._run_id, self._node_key, self._policy, version, counter)
        task = assigned_task(self._spec.tasks, *names)
        question = self._environment.question(task)
        return Asked(
            counter=counter,
            version=version,
            task=task,
            prompt_ids=render_prompt(self._tokenizer, question),
            seed=group_seed(*names),
        )

    def generate(self, counters: list[int]) -> list[dict[str, Any]]:
        """The groups of `counters` in one batch, as messages for the node."""
        started = time.monotonic()
        sampling = self._spec.sampling
        asked = [self.ask(counter) for counter in counters]
        found = self.engine.generate(
            [GroupRequest(each.prompt_ids, each.seed, sampling.group_size) for each in asked],
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
        )
        groups = [self.build_group(each, completions) for each, completions in zip(asked, found, strict=True)]
        # The batch's time is shared out, so that the sum over groups is the time that was spent.
        seconds = (time.monotonic() - started) / len(groups)
        return [
            {
                "type": "group",
                "counter": group.counter,
                "version": group.version,
                "body": group.encode(),
                "tokens": sum(len(completion.tokens) // 4 for completion in group.completions),
                "seconds": seconds,
                "mean_reward": sum(group.rewards) / len(group.rewards),
            }
            for group in groups
        ]

    def build_group(self, asked: Asked, completions: list[SampledCompletion]) -> RolloutGroup:
        """The message of one group, its completions scored."""
        texts = [decode_completion(self._tokenizer, completion.token_ids) for completion in completions]
        return RolloutGroup(
            task=asked.task,
            policy=self._policy,
            version=asked.version,
            counter=asked.counter,
            prompt_hash=prompt_hash(asked.prompt_ids),
            sampling=self._spec.sampling,
            engine=self.engine.name,
            completions=[
                Completion.build(
                    completion.token_ids,
                    completion.logprobs,
                    completion.version_runs,
                    completion.finish,
                    text if self._share_text and len(text) <= limits.MAX_TEXT_CHARS else None,
                )
                for completion, text in zip(completions, texts, strict=True)
            ],
            rewards=[float(self._environment.score(asked.task, text)) for text in texts],
        )


def configure(message: dict[str, Any]) -> RolloutWorker:
    """Everything that a configure message describes. Raises `Failure` and `KNOWN_FAILURES`."""
    if message["type"] != "configure":
        raise Failure(f"the first message was a {message['type']}, not a configuration")
    try:
        spec = RunSpec.decode(message["spec"])
        settings = EngineSettings.model_validate(message["engine"])
    except (Refused, ValidationError) as error:
        raise Failure(f"the configuration cannot be used: {' '.join(str(error).split())}") from error
    if message["run_id"] != spec.run_id:
        raise Failure("the run's spec does not have the run's id: fetch the spec again with `swarmnode join`")
    model_dir = Path(message["model_dir"])
    engine = TransformersEngine(
        model_dir,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_batch_sequences=settings.max_batch_sequences,
        adapter=spec.adapter,
    )
    return RolloutWorker(
        spec=spec,
        policy=message["policy"],
        node_key=message["node_key"],
        engine=engine,
        environment=build_environment(spec.tasks, spec.partial_credit),
        tokenizer=load_tokenizer(model_dir),
        probe_tolerance=PROBE_TOLERANCE[settings.dtype],
        share_text=bool(message["share_text"]),
    )


def serve(channel: Channel, inbox: Inbox) -> None:
    """Until the node asks for an end (`Stopped`). Loads go before groups: newer weights make fresher ones."""
    first = inbox.receive(CONFIGURE_TIMEOUT_S)
    if first is None:
        raise Failure(f"no configuration came within {CONFIGURE_TIMEOUT_S:.0f} s")
    worker = configure(first)
    # What is here now stays. Else the collector visits all of it now and then, for 0.2 s, most often in the
    # middle of a patch, which makes many small objects.
    gc.collect()
    gc.freeze()
    channel.send({"type": "ready"})
    counters, pending = Counters(), deque[int]()
    while True:
        can_generate = bool(pending) and worker.engine.version is not None
        wait_s = None if not can_generate else BATCH_FILL_S if len(pending) < worker.groups_per_batch else 0
        message = inbox.receive(wait_s)
        if message is not None:
            if message["type"] == "load":
                channel.send(worker.load(message))
            elif message["type"] == "generate":
                if not counters.use(message["counter"]):
                    raise Failure(f"the node asked for group {message['counter']} twice: please report this")
                if len(pending) >= MAX_PENDING:
                    raise Failure(
                        f"the node asked for more than {MAX_PENDING} groups at once: please report this"
                    )
                pending.append(message["counter"])
            else:
                raise Failure(f"the node sent an unknown message {message['type']!r}: please report this")
        elif can_generate:
            batch = [pending.popleft() for _ in range(min(len(pending), worker.groups_per_batch))]
            for group in worker.generate(batch):
                channel.send(group)


def main() -> int:
    return run_child(serve, KNOWN_FAILURES)


if __name__ == "__main__":
    sys.exit(main())

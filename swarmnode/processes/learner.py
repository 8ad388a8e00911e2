"""The learner process: trains on the groups that the node hands it, and says which version consumed which.

Started by a node with a channel. One thread reads the channel, so that a stop or the node's death is noticed
in the middle of an update; everything else happens in the main thread. The order of an update is its promise:
train, publish, tell the node, checkpoint (consumed ids inside), wait for the node's acknowledgement. What a
crash loses of it is trained again under new numbers.
"""

import logging
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers.utils.logging import disable_progress_bar

from protocol.limits import MAX_PROBE_TOKENS
from protocol.messages import RolloutGroup
from protocol.refusals import Refused
from protocol.run_spec import RunSpec
from protocol.tasks import held_out_tasks
from swarmnode.engines.base import Engine, LoadError
from swarmnode.engines.memory import NotEnoughMemory
from swarmnode.engines.transformers_engine import EngineError, TransformersEngine
from swarmnode.environments import TaskConfigError, build_environment
from swarmnode.environments.prompt import TokenizerError, load_tokenizer, render_prompt
from swarmnode.processes.channel import Channel
from swarmnode.processes.child import Failure, run_child
from swarmnode.processes.evaluation import evaluate
from swarmnode.processes.inbox import Inbox, Stopped
from trainer.checkpoint import CheckpointError
from trainer.collapse import HaltRules
from trainer.distributed import started_followers
from trainer.groups import BadGroup, TrainingGroup, external_group, local_group
from trainer.learner import Learner, LogprobSource, TrainingHalted, UpdateAbandoned, UpdateResult
from trainer.policy import BasePolicy, Policy, PolicyLoadError, load_policy
from trainer.publication import Publication
from trainer.sharded_policy import load_sharded_policy
from trainer.store import LearnerStore

log = logging.getLogger(__name__)

CONFIGURE_TIMEOUT_S = 60.0
ACK_TIMEOUT_S = 60.0
FINAL_EVALUATION_FACTOR = 4
EVALUATION_BATCH = 64

KNOWN_FAILURES = (
    CheckpointError,
    EngineError,
    LoadError,
    NotEnoughMemory,
    PolicyLoadError,
    TaskConfigError,
    TokenizerError,
)
"""Their messages are written for people; anything else is a bug and also leaves a traceback in the log."""


class LearnerSettings(BaseModel):
    """What the node decides for its own learner; nothing here changes what the run is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    checkpoint_keep: int = Field(default=3, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    eval_every: int = Field(default=10, ge=0)
    """Updates between evaluations; 0: only before and at the end."""
    eval_prompts: int = Field(default=128, ge=0)
    """0: never evaluate."""
    max_updates: int | None = Field(default=None, ge=0)
    max_seconds: float | None = Field(default=None, ge=0)
    token_budget: int = Field(default=8192, ge=1)
    processes: int = Field(default=1, ge=1)
    gradient_checkpointing: bool = False
    fp32_head: bool = True
    min_ess: float = Field(default=0.1, ge=0, le=1)
    min_entropy: float = Field(default=1e-3, ge=0)
    halt_after: int = Field(default=5, ge=1)


class LearnerProcess:
    """The loop around a `Learner`: messages in, updates and evaluations out."""

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox
        self._state = ""
        self._first_training: float | None = None
        self._bad_groups: list[bytes] = []
        self._told_to_finish = False
        self._followers = ExitStack()
        """Other processes that train with this one; they end when this closes."""
        self._checkpoint_seconds = 0.0
        self._resumed = False

    def run(self) -> None:
        """Until the node asks for an end. Raises what keeps it from going on."""
        with self._followers:
            try:
                self._train_and_stay()
            except (Stopped, UpdateAbandoned):
                log.info("stopped as asked")
                if self._resumed:
                    self._checkpoint(must=True)

    def _train_and_stay(self) -> None:
        try:
            self._train_to_the_end()
        except TrainingHalted as halt:
            self._halt(halt)
        while True:
            self._receive(timeout_s=60.0)

    def _train_to_the_end(self) -> None:
        self._configure(self._await_configuration())
        if self._learner.updates == 0 and self._learner.eval_before is None:
            self._evaluate(self._settings.eval_prompts, final=False)
        while not self._finished():
            self._await_groups()
            if self._learner.ready_for_update():
                self._update()
        self._evaluate(FINAL_EVALUATION_FACTOR * self._settings.eval_prompts, final=True)
        self._say("finished")

    def _halt(self, halt: TrainingHalted) -> None:
        """Put the last good version in front again and tell the node; a person decides what comes next."""
        log.error("%s", halt)
        publication = self._store.publish_last_good(halt.last_good)
        self._channel.send(
            {
                "type": "halted",
                "reason": str(halt),
                "version": self._learner.version,
                "publication": None if publication is None else publication_message(publication),
            }
        )

    # Starting

    def _await_configuration(self) -> dict[str, Any]:
        message = self._inbox.receive(CONFIGURE_TIMEOUT_S)
        if message is None or message["type"] != "configure":
            raise Failure(f"the node did not configure its learner within {CONFIGURE_TIMEOUT_S:.0f} s")
        return message

    def _configure(self, message: dict[str, Any]) -> None:
        self._settings = settings = LearnerSettings.model_validate(message["settings"])
        self._spec = spec = RunSpec.decode(message["spec"])
        self._model_dir = Path(message["model_dir"])
        torch.set_num_threads(settings.threads)
        self._tokenizer = load_tokenizer(self._model_dir)
        self._environment = build_environment(spec.tasks, spec.partial_credit)
        self._engine: Engine | None = None
        policy = self._load_policy()
        self._learner = Learner(
            policy,
            spec,
            message["policy"],
            token_budget=settings.token_budget * settings.processes,
            seed=settings.seed,
            halt_rules=HaltRules(settings.min_ess, settings.min_entropy, settings.halt_after),
            reference=self._load_reference(policy),
        )
        question = self._environment.question(held_out_tasks(spec.tasks, 1)[0])
        self._store = LearnerStore(
            Path(message["data_dir"]),
            self._learner,
            render_prompt(self._tokenizer, question)[:MAX_PROBE_TOKENS],
            checkpoint_keep=settings.checkpoint_keep,
            checkpoint_every=settings.checkpoint_every,
        )
        self._publication = self._store.resume(message["newest_published"])
        self._evaluated_at = self._learner.updates
        self._elapsed_before = self._learner.elapsed_s
        self._resumed = True
        self._channel.send(
            {
                "type": "ready",
                "version": self._learner.version,
                "consumed": self._learner.consumed,
                "eval_before": self._learner.eval_before,
                "publication": publication_message(self._publication),
            }
        )

    def _load_policy(self) -> Policy:
        settings = self._settings
        how: dict[str, Any] = {
            "device": settings.device,
            "dtype": settings.dtype,
            "adapter": self._spec.adapter,
            "seed": settings.seed,
            "fp32_head": settings.fp32_head,
            "checkpoint_layers": settings.gradient_checkpointing,
        }
        if settings.processes == 1:
            return load_policy(self._model_dir, **how)
        kind, _, number = settings.device.partition(":")
        if number:
            raise Failure(
                f'learner.device = "{settings.device}" names one device for {settings.processes} processes: '
                f'set it to "{kind}"'
            )
        processes = self._followers.enter_context(started_followers(settings.processes, kind))
        return load_sharded_policy(processes, self._model_dir, **how)

    def _load_reference(self, policy: Policy) -> LogprobSource | None:
        """The base model beside the policy, where the run's `beta` needs it. Under an adapter it is there
        already; else its weights are in memory twice then, in float32."""
        if not self._spec.algorithm.beta:
            return None
        if self._spec.adapter is not None:
            return BasePolicy(policy)
        reference = load_policy(self._model_dir, device=self._settings.device, dtype=self._settings.dtype)
        reference.model.requires_grad_(False)
        return reference

    # Messages

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Take one message in; groups go to the learner. Returns it, None when there was none."""
        message = self._inbox.receive(timeout_s)
        if message is not None and message["type"] == "group":
            self._add_group(message)
        elif message is not None and message["type"] == "finish":
            self._told_to_finish = True
        return message

    def _add_group(self, message: dict[str, Any]) -> None:
        try:
            group = training_group(message)
        except (BadGroup, Refused) as error:
            # It was checked before it came here, so this is a bug; one group must not end the training.
            log.error("group %s cannot be trained on and is dropped: %s", message["id"].hex()[:12], error)
            self._bad_groups.append(message["id"])
            return
        added = self._learner.add_group(group)
        log.debug("group %s: %s", group.id.hex()[:12], added.value)

    def _await_groups(self) -> None:
        """Take in what has come; when that is not enough, wait for more, until the time limit at most."""
        while self._receive(timeout_s=0) is not None:
            pass
        while not self._learner.ready_for_update() and not self._finished():
            self._say("waiting for groups")
            self._receive(timeout_s=min(60.0, max(self._seconds_left(), 0.001)))

    def _await_ack(self, version: int) -> None:
        limit = time.monotonic() + ACK_TIMEOUT_S
        while (remaining := limit - time.monotonic()) > 0:
            message = self._receive(timeout_s=remaining)
            if message is not None and message["type"] == "ack" and message["version"] == version:
                return
        raise Failure(
            f"the node did not record version {version} within {ACK_TIMEOUT_S:.0f} s: is its disk full?"
        )

    def _say(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._channel.send({"type": "state", "text": state})

    # Working

    def _update(self) -> None:
        self._say("training")
        if self._first_training is None:
            self._first_training = time.monotonic()
        result = self._learner.update(self._inbox.stopping)
        if self._inbox.stopping():
            raise Stopped
        finished = self._finished()
        started = time.perf_counter()
        publication = self._store.publish(must=finished)
        result.metrics["publish_seconds"] = time.perf_counter() - started
        result.metrics["checkpoint_seconds"] = self._checkpoint_seconds
        self._channel.send(update_message(result, self._bad_groups, publication))
        self._bad_groups = []
        self._checkpoint(must=finished)
        self._await_ack(result.version)
        if publication is None:
            return
        self._publication = publication
        every = self._settings.eval_every
        if every and self._learner.updates - self._evaluated_at >= every and not self._finished():
            self._evaluate(self._settings.eval_prompts, final=False)

    def _checkpoint(self, *, must: bool) -> None:
        self._learner.elapsed_s = self._elapsed()
        started = time.perf_counter()
        if self._store.checkpoint(must=must):
            self._checkpoint_seconds = time.perf_counter() - started

    def _evaluate(self, count: int, *, final: bool) -> None:
        """Score the newest published version on held-out questions and tell the node."""
        self._evaluated_at = self._learner.updates
        if count == 0:
            return
        self._say("evaluating")
        if self._engine is None:
            self._engine = self._new_engine()
        self._engine.load(self._publication.path, self._publication.version)
        result = evaluate(
            self._engine,
            self._environment,
            self._tokenizer,
            self._spec,
            count=count,
            batch_size=EVALUATION_BATCH,
            should_stop=self._inbox.stopping,
        )
        if result is None:
            raise Stopped
        if self._learner.updates == 0:
            self._learner.eval_before = result.accuracy
        self._channel.send(
            {
                "type": "eval",
                "version": self._publication.version,
                "accuracy": result.accuracy,
                "by_task": result.by_task,
                "count": result.count,
                "final": final,
            }
        )

    def _new_engine(self) -> Engine:
        settings = self._settings
        return TransformersEngine(
            self._model_dir,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            max_batch_sequences=EVALUATION_BATCH,
            adapter=self._spec.adapter,
        )

    # Limits

    def _elapsed(self) -> float:
        """Seconds since training first started, in earlier lives too."""
        now = 0.0 if self._first_training is None else time.monotonic() - self._first_training
        return self._elapsed_before + now

    def _seconds_left(self) -> float:
        limit = self._settings.max_seconds
        return float("inf") if limit is None else limit - self._elapsed()

    def _finished(self) -> bool:
        limit = self._settings.max_updates
        return (
            self._told_to_finish
            or self._seconds_left() <= 0
            or (limit is not None and self._learner.updates >= limit)
        )


def training_group(message: dict[str, Any]) -> TrainingGroup:
    """The group of a "group" message. Raises `BadGroup` or `Refused` when its parts do not fit together."""
    group = RolloutGroup.decode(message["body"])
    if message["source"] == "local":
        return local_group(message["id"], group, message["prompt_ids"], message["rewards"])
    return external_group(
        message["id"], group, message["prompt_ids"], message["completions"], message["rewards"]
    )


def update_message(
    result: UpdateResult, bad_groups: list[bytes], publication: Publication | None
) -> dict[str, Any]:
    """The "update" message of a result."""
    return {
        "type": "update",
        "version": result.version,
        "consumed": result.consumed,
        "stale": [*result.dropped, *bad_groups],
        "publication": None if publication is None else publication_message(publication),
        "metrics": result.metrics,
        "staleness": result.staleness,
        "by_age": result.by_age,
    }


def publication_message(publication: Publication) -> dict[str, Any]:
    """A published version as the node is told of it."""
    delta = publication.delta
    return {
        "version": publication.version,
        "path": str(publication.path),
        "size": publication.size_bytes,
        "state_hash": publication.state_hash,
        "chunk_size": publication.chunk_size,
        "chunks": publication.chunks,
        "delta": None
        if delta is None
        else {
            "parent": delta.parent,
            "parent_state": delta.parent_state,
            "path": str(delta.path),
            "size": delta.size_bytes,
            "chunk_size": delta.chunk_size,
            "chunks": delta.chunks,
        },
        "probe": {"tokens": publication.probe.tokens, "logprobs": publication.probe.logprobs},
    }


def main() -> int:
    disable_progress_bar()
    return run_child(lambda channel, inbox: LearnerProcess(channel, inbox).run(), KNOWN_FAILURES)


if __name__ == "__main__":
    sys.exit(main())

"""The learner: groups in, one optimizer step and one version at a time out. No processes, sockets or files.

Each update takes R local groups (earliest staleness deadline first) and up to J external ones, turns rewards
into advantages, and minimises the run's objective over the completions of all groups that have advantages.
Groups with equal rewards count towards R, so that pacing needs no guesses, and take no part in the mean.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from protocol.run_spec import RunSpec
from protocol.staleness import is_admissible, staleness
from trainer.batching import MicroBatch, PromptRows, collate, plan_micro_batches
from trainer.checkpoint import (
    Checkpoint,
    LearnerState,
    generator_from,
    set_torch_random_state,
    torch_random_state,
)
from trainer.collapse import CollapseWatch, HaltRules
from trainer.corrections.penalties import next_penalty
from trainer.groups import TrainingGroup
from trainer.metrics import UpdateMetrics
from trainer.objective import (
    BatchStatistics,
    evaluate_objective,
    needs_statistics,
    sample_of,
    statistics_of,
)
from trainer.optimizer import Optimizer
from trainer.policy import Policy, TokenLogprobs
from trainer.replay_buffer import Added, Batch, ReplayBuffer
from trainer.rows import row_tensors, rows_of

REMEMBERED_VERSIONS = 64
"""Versions whose consumed groups are kept (or S + 2, if that is more): as far back as a ledger may need to
look."""

EXTERNAL_POOL_BATCHES = 8
"""The external pool holds this many times J groups: the newest, so that it does not lag far behind the swarm.
"""


class TrainingHalted(Exception):
    """Training cannot go on. The message names the cause; `last_good` is the version to go back to, of which
    the weights are if it is the learner's own."""

    def __init__(self, message: str, last_good: int) -> None:
        super().__init__(message)
        self.last_good = last_good


class StalenessViolated(AssertionError):
    """A group beyond the staleness bound reached training: a bug, and never trained through."""


class UpdateAbandoned(Exception):
    """Asked to stop in the middle of an update; its groups wait again."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step. `version` is the new one; `staleness` counts the local groups consumed by their
    lag."""

    version: int
    consumed: list[bytes]
    dropped: list[bytes]
    """Ids that will never be consumed: beyond the staleness bound, without advantage, or out of a full pool.
    """
    metrics: dict[str, float]
    staleness: dict[int, int]
    by_age: dict[int, dict[str, float]]
    """Figures of local tokens by how many versions ago they were made (see `trainer.metrics`)."""


class LogprobSource(Protocol):
    """Whatever gives log-probs of a micro-batch's completions: a second policy, or one without adapters."""

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> TokenLogprobs: ...


@dataclass
class Learner:
    """Owns a policy, its optimizer and the waiting groups. Invariant: nothing staler than S is trained on."""

    policy: Policy
    spec: RunSpec
    policy_id: bytes
    token_budget: int = 8192
    seed: int = 0
    version: int = 0
    updates: int = 0
    eval_before: float | None = None
    elapsed_s: float = 0.0
    halt_rules: HaltRules = field(default_factory=HaltRules)
    reference: LogprobSource | None = None
    """The base model, where the run's `beta` is above 0."""
    consumed: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        self.optimizer = Optimizer(self.policy, spec.algorithm)
        if spec.algorithm.beta and self.reference is None:
            raise ValueError("the run's beta is above 0, so the learner needs the base model as `reference`")
        self._watch = CollapseWatch(self.halt_rules)
        self._variance_penalty = spec.algorithm.ratio_variance_penalty
        self._rng = np.random.default_rng(self.seed)
        self._buffer: ReplayBuffer[TrainingGroup] = ReplayBuffer(
            max_staleness=spec.max_staleness,
            local_bound=spec.local_groups * max(spec.pacing_batches, spec.max_staleness + 1) * 4,
            external_bound=spec.external_groups * EXTERNAL_POOL_BATCHES,
        )

    # Groups in

    def add_group(self, group: TrainingGroup) -> Added:
        """Let a group wait for an update; says what became of it."""
        return self._buffer.add(group, self.version)

    def ready_for_update(self) -> bool:
        """Whether R local groups wait. External groups are never waited for."""
        return self._buffer.local_waiting >= self.spec.local_groups

    @property
    def local_waiting(self) -> int:
        return self._buffer.local_waiting

    # One update

    def update(self, should_stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take a batch, make one step, advance the version.

        Raises `TrainingHalted` when a loss or gradient is not finite or the policy has collapsed, and
        `UpdateAbandoned` when `should_stop` says so between two micro-batches; weights, version and waiting
        groups are then as before.
        """
        batch = self._buffer.take(self.version, self.spec.local_groups, self.spec.external_groups, self._rng)
        if batch is None:
            raise RuntimeError(
                f"{self._buffer.local_waiting} local groups wait, an update needs {self.spec.local_groups}"
            )
        try:
            return self._train(batch, should_stop)
        except BaseException:
            self.optimizer.clear_gradients()
            self._buffer.put_back(batch)
            raise

    def _train(self, batch: Batch[TrainingGroup], should_stop: Callable[[], bool]) -> UpdateResult:
        started = time.perf_counter()
        self._check_staleness(batch)
        groups = [*batch.local, *batch.external]
        trained = rows_of(groups, self.spec.algorithm, self.version, self.spec.sampling.max_new_tokens)
        plan = list(plan_micro_batches(trained, self.token_budget, share_prompts=self.policy.share_prompts))
        sums = UpdateMetrics()
        statistics = self._statistics(plan, should_stop)
        for pieces in plan:
            self._check_stop(should_stop)
            self._accumulate(pieces, statistics, sums)
        grad_norm, rate = 0.0, 0.0
        if plan:
            grad_norm = self.optimizer.clip_gradients()
            self._check_finite("the gradient norm", grad_norm)
            self._check_health(sums)
            rate = self.optimizer.step(self.updates, sums.ess_ratio)

        lags = Counter(staleness(self.version, group.oldest_version) for group in batch.local)
        self.version += 1
        self.updates += 1
        ids = [group.id for group in groups]
        self.consumed[self.version] = ids
        oldest_kept = self.version - max(REMEMBERED_VERSIONS, self.spec.max_staleness + 2) + 1
        self.consumed = {version: ids for version, ids in self.consumed.items() if version >= oldest_kept}
        self._buffer.forget_before(oldest_kept - 1)
        self._buffer.expire(self.version)
        dropped = self._buffer.take_dropped()
        metrics = {
            **self._metrics(batch, sums),
            "dropped_groups": float(len(dropped)),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            **self._adapt(sums),
            "update_seconds": time.perf_counter() - started,
        }
        return UpdateResult(self.version, ids, dropped, metrics, dict(sorted(lags.items())), sums.by_age())

    def _check_staleness(self, batch: Batch[TrainingGroup]) -> None:
        for group in batch.local:
            if not is_admissible(self.version, group.oldest_version, self.spec.max_staleness):
                raise StalenessViolated(
                    f"group {group.id.hex()[:12]} of version {group.oldest_version} reached training at "
                    f"version {self.version}, the bound is {self.spec.max_staleness}: please report this"
                )

    def _check_stop(self, should_stop: Callable[[], bool]) -> None:
        if should_stop():
            raise UpdateAbandoned(f"stopped while training version {self.version + 1}")

    def _statistics(
        self, plan: list[list[PromptRows]], should_stop: Callable[[], bool]
    ) -> BatchStatistics | None:
        """Thresholds of the whole batch, by a forward pass over it. A batch of one micro-batch needs none:
        its own forward pass tells them."""
        algorithm = self.spec.algorithm
        if not needs_statistics(algorithm) or len(plan) <= 1:
            return None
        samples = []
        for pieces in plan:
            self._check_stop(should_stop)
            batch = collate(pieces).to(self.policy.device)
            with torch.no_grad():
                current = self.policy.token_logprobs(batch, self.spec.sampling.temperature)
            samples.append(sample_of(current, batch))
        return statistics_of(samples, algorithm)

    def _accumulate(
        self, pieces: list[PromptRows], statistics: BatchStatistics | None, sums: UpdateMetrics
    ) -> None:
        """Add one micro-batch's part of the gradient of the batch's objective."""
        algorithm, temperature = self.spec.algorithm, self.spec.sampling.temperature
        batch = collate(pieces).to(self.policy.device)
        rows = row_tensors(pieces, batch.mask_BT.shape[1], self.policy.device)
        current = self.policy.token_logprobs(batch, temperature)
        if statistics is None and needs_statistics(algorithm):
            statistics = statistics_of([sample_of(current, batch)], algorithm)
        loss, report = evaluate_objective(
            current,
            batch,
            rows,
            algorithm,
            statistics=statistics,
            variance_penalty=self._variance_penalty,
            reference_logprobs_BT=self._reference_logprobs(batch),
        )
        value = float(loss.detach())
        self._check_finite("the loss", value)
        loss.backward()
        sums.add(report, value)

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if not self.spec.algorithm.beta or self.reference is None:
            return None
        with torch.no_grad():
            return self.reference.token_logprobs(batch, self.spec.sampling.temperature).logprobs_BT

    # Whether to go on

    @property
    def last_good_version(self) -> int:
        """What a halt would go back to: the newest version, or the last one before figures fell."""
        return self._watch.last_good

    def _check_finite(self, what: str, value: float) -> None:
        if not np.isfinite(value):
            last_good = self._watch.last_good if self._watch.is_suspicious else self.version
            raise TrainingHalted(
                f"training halted: {what} was {value} while training version {self.version + 1}; version "
                f"{last_good} is the last good one. Start a run with a lower learning_rate",
                last_good,
            )

    def _check_health(self, sums: UpdateMetrics) -> None:
        reason = self._watch.observe(self.version, sums.totals())
        if reason is not None:
            last_good = self._watch.last_good
            raise TrainingHalted(
                f"training halted: the policy has collapsed, {reason}; version {last_good} is the last good "
                "one. Start a run with a lower learning_rate or max_staleness, or a stronger correction "
                "(docs/algorithms.md)",
                last_good,
            )

    def _adapt(self, sums: UpdateMetrics) -> dict[str, float]:
        """Move the ratio-variance penalty towards its target; nothing where it has none."""
        algorithm = self.spec.algorithm
        start, target = algorithm.ratio_variance_penalty, algorithm.ratio_variance_target
        if target is None:
            return {}
        used = self._variance_penalty
        self._variance_penalty = next_penalty(used, start, sums.totals()["ratio_variance"], target)
        return {"ratio_variance_penalty": used}

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Take weights and optimizer of an earlier version, as the version after this one."""
        self.policy.load_tensors(checkpoint.model)
        self.optimizer.load_tensors(checkpoint.optimizer)
        self.version += 1
        self._watch.forgive(self.version)

    def _metrics(self, batch: Batch[TrainingGroup], sums: UpdateMetrics) -> dict[str, float]:
        groups = [*batch.local, *batch.external]
        lags = [staleness(self.version - 1, group.oldest_version) for group in batch.local]
        rewards = [reward for group in batch.local for reward in group.rewards]
        lengths = [len(completion) for group in batch.local for completion in group.completions]
        return {
            **sums.totals(),
            "reward_mean": float(np.mean(rewards)),
            "zero_variance_share": sum(not group.is_informative for group in groups) / len(groups),
            "staleness_mean": float(np.mean(lags)),
            "staleness_max": float(max(lags)),
            "completion_length_mean": float(np.mean(lengths)),
            "local_groups": float(len(batch.local)),
            "external_groups": float(len(batch.external)),
        }

    # Its whole state

    def checkpoint(self) -> Checkpoint:
        """A view of the state now; write it before the next update changes it."""
        return Checkpoint(
            state=LearnerState(
                run_id=self.spec.run_id,
                policy=self.policy_id,
                version=self.version,
                updates=self.updates,
                consumed=dict(self.consumed),
                eval_before=self.eval_before,
                elapsed_s=self.elapsed_s,
                generator_state=dict(self._rng.bit_generator.state),
                torch_state=torch_random_state(),
                controls={
                    "variance_penalty": self._variance_penalty,
                    "last_good": self._watch.last_good,
                    **{f"low.{name}": count for name, count in self._watch.low.items()},
                },
            ),
            model=self.policy.tensors(),
            optimizer=self.optimizer.tensors(),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same run and model. Raises `PolicyLoadError` when the model is
        another."""
        state = checkpoint.state
        self.policy.load_tensors(checkpoint.model)
        self.optimizer.load_tensors(checkpoint.optimizer)
        self.version, self.updates = state.version, state.updates
        self.eval_before, self.elapsed_s = state.eval_before, state.elapsed_s
        self.consumed = dict(state.consumed)
        self._variance_penalty = state.controls["variance_penalty"]
        self._watch.last_good = int(state.controls["last_good"])
        self._watch.low = {
            name.removeprefix("low."): int(count)
            for name, count in state.controls.items()
            if name.startswith("low.")
        }
        for version, ids in state.consumed.items():
            self._buffer.remember_consumed(ids, version - 1)
        self._rng = generator_from(state.generator_state)
        set_torch_random_state(state.torch_state)

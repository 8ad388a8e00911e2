"""The learner: groups in, one optimizer step and one version at a time out. No processes, sockets or files.

Each update takes R local groups (earliest staleness deadline first) and up to J external ones, turns rewards
into advantages, and minimises the mean of the run's loss over the completion tokens of all groups that have
advantages. Groups with equal rewards count towards R, so that pacing needs no guesses, and take no part in
the mean.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from protocol.run_spec import RunSpec
from protocol.staleness import is_admissible, staleness
from trainer.advantages import group_advantages
from trainer.batching import MicroBatch, PromptRows, TrainingRow, collate, plan_micro_batches
from trainer.checkpoint import (
    Checkpoint,
    LearnerState,
    generator_from,
    set_torch_random_state,
    torch_random_state,
)
from trainer.groups import TrainingGroup
from trainer.losses import LOSSES
from trainer.losses.base import log_ratio
from trainer.optimizer import Optimizer
from trainer.policy import Policy
from trainer.replay_buffer import Added, Batch, ReplayBuffer

REMEMBERED_VERSIONS = 64
"""Versions whose consumed groups are kept (or S + 2, if that is more): as far back as a ledger may need to
look."""

EXTERNAL_POOL_BATCHES = 8
"""The external pool holds this many times J groups: the newest, so that it does not lag far behind the swarm.
"""


class TrainingHalted(Exception):
    """Training cannot go on; the weights are those of the last good version. The message names the cause."""


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


@dataclass
class _Sums:
    """Totals over the tokens of an update; those of ratios over local groups' tokens only."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    local_tokens: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    log_ratio_squared: float = 0.0


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
    consumed: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        self.optimizer = Optimizer(self.policy, spec.algorithm)
        self._loss = LOSSES[spec.algorithm.loss_type]
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

        Raises `TrainingHalted` when a loss or gradient is not finite and `UpdateAbandoned` when `should_stop`
        says so between two micro-batches; weights, version and waiting groups are then as before.
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
        trained = self._rows(groups)
        tokens = sum(len(row.token_ids) for prompt in trained for row in prompt.rows)
        sums = _Sums()
        for pieces in plan_micro_batches(trained, self.token_budget, share_prompts=self.policy.share_prompts):
            if should_stop():
                raise UpdateAbandoned(f"stopped while training version {self.version + 1}")
            self._accumulate(collate(pieces).to(self.policy.device), tokens, sums)
        grad_norm, rate = 0.0, 0.0
        if tokens:
            grad_norm = self.optimizer.clip_gradients()
            self._check_finite("the gradient norm", grad_norm)
            rate = self.optimizer.step(self.updates)

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
            **self._metrics(batch, sums, tokens),
            "dropped_groups": float(len(dropped)),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "update_seconds": time.perf_counter() - started,
        }
        return UpdateResult(self.version, ids, dropped, metrics, dict(sorted(lags.items())))

    def _check_staleness(self, batch: Batch[TrainingGroup]) -> None:
        for group in batch.local:
            if not is_admissible(self.version, group.oldest_version, self.spec.max_staleness):
                raise StalenessViolated(
                    f"group {group.id.hex()[:12]} of version {group.oldest_version} reached training at "
                    f"version {self.version}, the bound is {self.spec.max_staleness}: please report this"
                )

    def _rows(self, groups: list[TrainingGroup]) -> list[PromptRows]:
        """The completions that carry a gradient, under their prompts."""
        advantages = group_advantages([group.rewards for group in groups], self.spec.algorithm.scale_rewards)
        trained = []
        for group, values in zip(groups, advantages, strict=True):
            if not group.is_informative:
                continue
            logprobs = group.behavior_logprobs or (None,) * len(group.completions)
            rows = tuple(
                TrainingRow(ids, behavior, float(advantage))
                for ids, behavior, advantage in zip(group.completions, logprobs, values, strict=True)
                if len(ids)
            )
            trained.append(PromptRows(group.prompt_ids, rows))
        return trained

    def _accumulate(self, batch: MicroBatch, tokens: int, sums: _Sums) -> None:
        """Add one micro-batch's gradient of (sum of token losses / tokens of the whole batch)."""
        current = self.policy.token_logprobs(batch, self.spec.sampling.temperature)
        behavior_BT = torch.where(
            batch.own_behavior_B[:, None], current.logprobs_BT.detach(), batch.behavior_logprobs_BT
        )
        terms = self._loss(current.logprobs_BT, behavior_BT, batch.advantages_B, self.spec.algorithm)
        loss = (terms.loss_BT * batch.mask_BT).sum() / tokens
        value = float(loss.detach())
        self._check_finite("the loss", value)
        loss.backward()

        with torch.no_grad():
            local_BT = batch.mask_BT * ~batch.own_behavior_B[:, None]
            drift_BT = log_ratio(current.logprobs_BT.detach(), behavior_BT) * local_BT
            ratio_BT = drift_BT.exp() * local_BT
            sums.loss += value
            sums.entropy += float((current.entropy_BT * batch.mask_BT).sum())
            sums.clipped += float((terms.clipped_BT * batch.mask_BT).sum())
            sums.local_tokens += float(local_BT.sum())
            sums.ratio += float(ratio_BT.sum())
            sums.ratio_max = max(sums.ratio_max, float(ratio_BT.max()))
            sums.log_ratio_squared += float((drift_BT**2).sum())

    def _check_finite(self, what: str, value: float) -> None:
        if not np.isfinite(value):
            raise TrainingHalted(
                f"training halted: {what} was {value} while training version {self.version + 1}; version "
                f"{self.version} is the last good one. Start a run with a lower learning_rate"
            )

    def _metrics(self, batch: Batch[TrainingGroup], sums: _Sums, tokens: int) -> dict[str, float]:
        groups = [*batch.local, *batch.external]
        lags = [staleness(self.version - 1, group.oldest_version) for group in batch.local]
        rewards = [reward for group in batch.local for reward in group.rewards]
        lengths = [len(completion) for group in batch.local for completion in group.completions]
        local_tokens = max(sums.local_tokens, 1.0)
        return {
            "loss": sums.loss,
            "reward_mean": float(np.mean(rewards)),
            "ratio_mean": sums.ratio / local_tokens if sums.local_tokens else 1.0,
            "ratio_max": sums.ratio_max if sums.local_tokens else 1.0,
            "logratio_rms": float(np.sqrt(sums.log_ratio_squared / local_tokens)),
            "entropy": sums.entropy / max(tokens, 1),
            "clip_fraction": sums.clipped / max(tokens, 1),
            "zero_variance_share": sum(not group.is_informative for group in groups) / len(groups),
            "staleness_mean": float(np.mean(lags)),
            "staleness_max": float(max(lags)),
            "completion_length_mean": float(np.mean(lengths)),
            "tokens": float(tokens),
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
        for version, ids in state.consumed.items():
            self._buffer.remember_consumed(ids, version - 1)
        self._rng = generator_from(state.generator_state)
        set_torch_random_state(state.torch_state)

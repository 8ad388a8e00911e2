"""The learner of a simulated fleet: the node's own credit, admission and queue around modelled updates."""

import random
from collections import Counter
from typing import Protocol

import numpy as np

from peers.base import PeerId
from peers.reputation import Reputation
from protocol.admission import check_versions
from protocol.pacing import PacingState, grant_credit
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.credit_book import CreditBook
from swarmnode.scheduler.capacity import Demand, pacing_batches_needed
from swarmnode.scheduler.measurements import Measurements
from swarmnode.scheduler.pacing import WorkerPace, retry_after_s, time_left_s, worker_limit
from swarmnode.simulator.clock import EventQueue
from swarmnode.simulator.population import lognormal
from swarmnode.simulator.scenario import Scenario
from swarmnode.simulator.worker import SimGroup, Worker
from trainer.replay_buffer import Added, ReplayBuffer

REMEMBERED_VERSIONS = 64


def mean_latency_s(scenario: Scenario) -> float:
    """Of a group, from its grant to its arrival, weighted by the rates of the classes."""
    total = sum(kind.count * kind.groups_per_min for kind in scenario.nodes)
    return (
        sum(
            kind.count * (60 * kind.groups_in_hand + kind.groups_per_min * kind.round_trip_ms / 1000)
            for kind in scenario.nodes
        )
        / total
    )


class Listener(Protocol):
    """Who wants to know what the learner did."""

    def on_update(self, batch: list[SimGroup], version: int) -> None: ...
    def on_published(self, version: int) -> None: ...
    def on_excluded(self, worker: Worker) -> None: ...


class SimLearner:
    """Consumes R groups per update; grants, admits and orders them as the node does."""

    def __init__(
        self,
        scenario: Scenario,
        demand: Demand,
        clock: EventQueue,
        rng: random.Random,
        measured: Measurements,
    ) -> None:
        self._scenario = scenario
        self._demand = demand
        self._clock = clock
        self._rng = rng
        self._measured = measured
        latency_s = mean_latency_s(scenario)
        self._pacing_batches = demand.pacing_batches or min(
            demand.max_staleness + 1, pacing_batches_needed(demand, latency_s)
        )
        self.credits = CreditBook()
        self.reputation = Reputation()
        self.buffer: ReplayBuffer[SimGroup] = ReplayBuffer(
            max_staleness=demand.max_staleness,
            local_bound=demand.batch_groups * max(self._pacing_batches, demand.max_staleness + 1) * 4,
            external_bound=0,
        )
        self._numpy_rng = np.random.default_rng(0)  # Local batches need no draw.
        self.version = 0
        self.published_version = 0
        self.training_since_s: float | None = None
        self.busy_s = 0.0
        self.updates = 0
        self.refused: Counter[str] = Counter()
        self.accepted = 0
        self.stale_in_queue = 0
        self.bad_consumed = 0
        self.staleness: Counter[int] = Counter()
        self.most_stale = 0
        self.consumed_twice = 0
        self.listener: Listener | None = None

    # Credit

    def credit(self, worker: Worker, wanted: int) -> tuple[int, float]:
        """Groups granted, and after how long to ask again if these are fewer than wanted."""
        now = self._clock.now
        state = PacingState(
            version=self.version,
            published_version=self.published_version,
            batch_groups=self._demand.batch_groups,
            waiting=self.waiting,
            outstanding=self.credits.outstanding(now),
            max_staleness=self._demand.max_staleness,
            pacing_batches=self._pacing_batches,
        )
        version = worker.weights.version
        assert version is not None
        training_for_s = None if self.training_since_s is None else now - self.training_since_s
        left_s = time_left_s(
            self.version - version, self._demand.max_staleness, self._demand.train_s, training_for_s
        )
        room = self.credits.room(worker.key, now)
        outstanding = self.credits.undelivered(worker.key)
        self._measured.credit_asked(worker.key, wanted=wanted, outstanding=outstanding)
        limit = worker_limit(self._pace(worker), left_s, outstanding)
        grant = grant_credit(state, version, min(wanted, room, limit))
        if grant.count > 0:
            self.credits.grant(worker.key, grant.count, now)
        if grant.count >= wanted:
            return grant.count, 0.0
        return grant.count, retry_after_s(
            state,
            version,
            train_s=self._demand.train_s,
            training_for_s=training_for_s,
            spread=self._rng.random(),
        )

    def _pace(self, worker: Worker) -> WorkerPace:
        known = self._measured.worker(worker.key)
        machine = worker.machine
        if known is None or not known.latency_s:
            return WorkerPace(machine.groups_per_s, machine.kind.groups_in_hand / machine.groups_per_s)
        # A worker that stands still for a new version has its groups in hand for so much longer.
        stands_still_s = known.broadcast_s.value if self._demand.form == "conservative" else 0.0
        return WorkerPace(known.rate.value, known.latency_s.value + stands_still_s, known.latency_s.deviation)

    @property
    def waiting(self) -> int:
        """Accepted and not yet in a version: as the node's ledger counts, the batch in training included."""
        return self.buffer.local_waiting + (0 if self.training_since_s is None else self._demand.batch_groups)

    # Intake

    def receive(self, group: SimGroup, newest_version: int) -> bool:
        """A group is here: admitted, or refused with a counted reason."""
        now, worker = self._clock.now, group.worker
        reason = self._refusal(group, newest_version)
        self.credits.received(worker.key, now, accepted=reason is None)
        self._measured.group_arrived(worker.key, now - group.granted_at_s - group.added_pause_s)
        if reason is not None:
            self.refused[reason.value] += 1
            self._penalize(worker, reason)
            return False
        added = self.buffer.add(group, self.version)
        assert added is Added.WAITING, added
        self.accepted += 1
        self.start_if_ready()
        return True

    def _refusal(self, group: SimGroup, newest_version: int) -> RefusalReason | None:
        demand = self._demand
        if self.waiting >= (demand.max_staleness + 2) * demand.batch_groups:
            return RefusalReason.NO_CREDIT
        try:
            check_versions(group.oldest_version, newest_version, self.version, demand.max_staleness)
        except Refused as refused:
            return refused.reason
        if group.bad and self._rng.random() < self._scenario.trust.audit_share:
            return RefusalReason.BAD_TOKENS
        return None

    def _penalize(self, worker: Worker, reason: RefusalReason) -> None:
        trust = self.reputation.penalize(PeerId(worker.key), reason, self._clock.now)
        if trust < self._scenario.trust.exclude_below and not worker.excluded:
            worker.excluded = True
            if self.listener is not None:
                self.listener.on_excluded(worker)

    def forget(self, worker: Worker) -> None:
        """The connection is gone."""
        self.credits.forget_grants(worker.key)

    # Updates

    def start_if_ready(self) -> None:
        """Begin an update if a batch is there and none is under way."""
        if self.training_since_s is not None or self.buffer.local_waiting < self._demand.batch_groups:
            return
        batch = self.buffer.take(self.version, self._demand.batch_groups, 0, self._numpy_rng)
        self.stale_in_queue += len(self.buffer.take_dropped())
        if batch is None:
            return
        for group in batch.local:
            lag = self.version - group.oldest_version
            self.staleness[lag] += 1
            self.most_stale = max(self.most_stale, lag)
            self.consumed_twice += group.consumed
            group.consumed = True
            self.bad_consumed += group.bad
            group.worker.consumed += 1
        run = self._scenario.run
        self.training_since_s = self._clock.now
        self._clock.after(lognormal(self._rng, run.train_s, run.train_spread), self._finish, batch.local)

    def _finish(self, batch: list[SimGroup]) -> None:
        assert self.training_since_s is not None
        took_s = self._clock.now - self.training_since_s
        self.busy_s += took_s
        self.training_since_s = None
        self._measured.update_finished(took_s)
        self.version += 1
        self.updates += 1
        self.buffer.forget_before(self.version - REMEMBERED_VERSIONS)
        if self.version % self._demand.kappa == 0:
            self.published_version = self.version
            if self.listener is not None:
                self.listener.on_published(self.version)
        if self.listener is not None:
            self.listener.on_update(batch, self.version)
        self.start_if_ready()

    def busy_until_now_s(self) -> float:
        """Time spent in updates, the one under way included."""
        under_way = 0.0 if self.training_since_s is None else self._clock.now - self.training_since_s
        return self.busy_s + under_way

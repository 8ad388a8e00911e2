"""A fleet on virtual time: one learner, any number of workers that come, work, leave, and cost money."""

import random
from collections import Counter

from swarmnode.scheduler.broadcast import MBIT
from swarmnode.scheduler.measurements import Measurements
from swarmnode.scheduler.planning import BYTES_PER_TOKEN
from swarmnode.simulator.accounts import Money, Report, Tally, TimeLine
from swarmnode.simulator.clock import EventQueue
from swarmnode.simulator.dispatch import Dispatcher
from swarmnode.simulator.fleet_report import fleet_report
from swarmnode.simulator.invariants import FleetInvariants
from swarmnode.simulator.learner import SimLearner
from swarmnode.simulator.population import draw_machines, lognormal
from swarmnode.simulator.scenario import Scenario
from swarmnode.simulator.weights import Weights
from swarmnode.simulator.worker import SimGroup, State, Worker

PRICE_STEP_S = 600.0
SAMPLES = 240


class FleetSimulation:
    """Runs a scenario of kind `fleet`. The same scenario gives the same report, on any machine."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.demand = scenario.demand()
        self.rng = random.Random(scenario.seed)
        self.clock = EventQueue()
        self.measured = Measurements()
        self.weights = Weights(scenario.weights)
        self.workers = [Worker(machine, scenario.seed) for machine in draw_machines(scenario, self.rng)]
        self.learner = SimLearner(scenario, self.demand, self.clock, self.rng, self.measured)
        self.learner.listener = self
        self.money = Money()
        self.tally = Tally()
        self.capacity = 0.0
        self.timeline = TimeLine(scenario.duration_s / SAMPLES)
        self.dispatcher = Dispatcher(
            scenario,
            self.demand,
            scenario.plan_settings(),
            self.workers,
            clock=self.clock,
            rng=self.rng,
            measured=self.measured,
            weights=self.weights,
            set_state=self.set_state,
            agree_on_price=self.agree_on_price,
            paid_per_hour=lambda: self.money.per_hour,
        )
        self.invariants = FleetInvariants(self)
        self.staleness_at_warmup: Counter[int] = Counter()
        self._groups = 0
        self._capacity_since_s = 0.0
        self._busy_at_sample = 0.0
        run = scenario.run
        self._group_bytes = run.group_size * run.completion_tokens * BYTES_PER_TOKEN
        self._learner_per_hour = run.learner_price_per_hour

    def run(self) -> Report:
        """Simulate from start to end."""
        self.weights.publish(0, 0.0)
        self.dispatcher.start()
        for worker in self.workers:
            if worker.present:
                self._schedule_departure(worker)
            else:
                self._schedule_return(worker)
            if worker.machine.kind.price_walk_per_hour > 0:
                self.clock.after(PRICE_STEP_S * worker.luck.random(), self._move_price, worker)
        self.clock.after(self.timeline.step_s, self._sample)
        self.clock.run(self.scenario.warmup_s, self.invariants.check)
        before = self.snapshot()
        self.staleness_at_warmup = Counter(self.learner.staleness)
        self.clock.run(self.scenario.duration_s, self.invariants.check)
        self.invariants.check_all()
        return fleet_report(self, before)

    # Generation

    def _ask(self, worker: Worker, life: int) -> None:
        """A request for credit reaches the learner."""
        if worker.life != life:
            return
        if worker.state is not State.ACTIVE:
            worker.asking = False
            return
        now = self.clock.now
        weights, machine = worker.weights, worker.machine
        self.weights.advance(machine, weights, now)
        fetching = weights.target is not None and self.demand.form == "conservative"
        if weights.version is None or fetching:
            wait_s = max(weights.ready_s - now, 0.0) if weights.target is not None else 1.0
            self.clock.after(wait_s + 1e-6, self._ask, worker, life)
            return
        wanted = machine.kind.groups_in_hand - worker.in_hand
        if wanted <= 0:
            worker.asking = False
            return
        granted, again_s = self.learner.credit(worker, wanted)
        worker.in_hand += granted
        start_s = now + machine.link.round_trip_s / 2
        for _ in range(granted):
            self._begin(worker, life, now, start_s)
        if granted < wanted:
            self.clock.after(max(again_s, machine.link.round_trip_s), self._ask, worker, life)
        else:
            worker.asking = False

    def _begin(self, worker: Worker, life: int, granted_at_s: float, start_s: float) -> None:
        machine, run = worker.machine, self.scenario.run
        version = worker.weights.version
        assert version is not None
        self._groups += 1
        self.tally.started += 1
        group = SimGroup(self._groups, version, worker, granted_at_s, start_s)
        group.paused_at_start_s = worker.weights.fetching_for_s(self.clock.now)
        mean_s = machine.kind.groups_in_hand / machine.groups_per_s
        spread = run.length_spread
        takes_s = lognormal(self.rng, mean_s, (spread * spread + machine.kind.rate_wobble**2) ** 0.5)
        self.clock.at(start_s + takes_s, self._finished, worker, life, group)

    def _finished(self, worker: Worker, life: int, group: SimGroup) -> None:
        if worker.life != life:
            self.tally.lost_with_worker += 1
            return
        now = self.clock.now
        if self.demand.form == "conservative":
            self.weights.advance(worker.machine, worker.weights, now)
            paused_s = worker.weights.fetching_for_s(now) - group.paused_at_start_s - group.added_pause_s
            if paused_s > 1e-6:
                # It stood still while weights were fetched.
                group.added_pause_s += paused_s
                self.clock.after(paused_s, self._finished, worker, life, group)
                return
        link = worker.machine.link
        upload_s = self._group_bytes / (link.upload_mbps * MBIT)
        self.tally.finished += 1
        self.tally.work_s += now - group.started_at_s - group.added_pause_s
        self.tally.paused_s += group.added_pause_s
        self.tally.upload_s += upload_s
        worker.in_hand -= 1
        self.clock.at(now + upload_s + link.round_trip_s / 2, self._arrive, worker, life, group)
        if worker.state is State.DRAINING:
            if worker.in_hand == 0:
                self.set_state(worker, State.COLD)
        elif not worker.asking:
            worker.asking = True
            self.clock.after(link.round_trip_s / 2, self._ask, worker, life)

    def _arrive(self, worker: Worker, life: int, group: SimGroup) -> None:
        if worker.life != life:
            self.tally.lost_with_worker += 1
            return
        if not self.learner.receive(group, group.oldest_version):
            worker.wasted += 1

    # States

    def set_state(self, worker: Worker, state: State) -> None:
        """Activation, draining, standby; who drains with nothing in hand is done at once."""
        now, old = self.clock.now, worker.state
        if not worker.present:
            return  # The message does not arrive; that the worker is gone is noticed in a moment.
        if state is State.DRAINING and worker.in_hand == 0:
            state = State.COLD
        self._settle_capacity()
        paid = worker.is_paid
        worker.state = state
        if worker.is_paid and not paid:
            worker.price_per_hour = worker.asked_price_per_hour
        if worker.is_paid != paid:
            self.money.change(now, worker.price_per_hour if worker.is_paid else -worker.price_per_hour)
        if (old is State.ACTIVE) != (state is State.ACTIVE):
            self.capacity += worker.machine.groups_per_s * (1 if state is State.ACTIVE else -1)
        follows = state in (State.WARM, State.ACTIVE)
        if follows != worker.weights.follows:
            self.weights.follow(worker.machine, worker.weights, now, follows=follows)
        if state is State.ACTIVE and old is not State.ACTIVE:
            self.tally.activations += 1
            self.tally.cold_activations += old is State.COLD
            if not worker.asking:
                worker.asking = True
                self.clock.after(worker.machine.link.round_trip_s, self._ask, worker, worker.life)
        if old is State.DRAINING and state is State.COLD:
            self.dispatcher.money_is_free()

    def agree_on_price(self, worker: Worker) -> None:
        """A plan keeps an active worker at the price that it asks now."""
        self.money.change(self.clock.now, worker.asked_price_per_hour - worker.price_per_hour)
        worker.price_per_hour = worker.asked_price_per_hour

    def _settle_capacity(self) -> None:
        elapsed = self.clock.now - self._capacity_since_s
        self.tally.capacity_s += self.capacity * elapsed
        self.tally.need_s += elapsed
        self._capacity_since_s = self.clock.now

    # Machines come and go, prices move

    def _schedule_departure(self, worker: Worker) -> None:
        per_hour = worker.machine.kind.departures_per_hour
        if per_hour > 0:
            self.clock.after(worker.luck.expovariate(per_hour / 3600), self._depart, worker, worker.life)

    def _schedule_return(self, worker: Worker) -> None:
        self.clock.after(
            worker.luck.expovariate(1 / worker.machine.kind.returns_after_s), self._return, worker
        )

    def _depart(self, worker: Worker, life: int) -> None:
        if not worker.present or worker.life != life:
            return
        self.tally.departures += 1
        self._settle_capacity()
        if worker.is_paid:
            self.money.change(self.clock.now, -worker.price_per_hour)
        if worker.state is State.ACTIVE:
            self.capacity -= worker.machine.groups_per_s
        was_active = worker.state is State.ACTIVE
        worker.present = False
        worker.state = State.COLD
        worker.life += 1
        worker.in_hand = 0
        worker.asking = False
        self.weights.lose(worker.machine, worker.weights, self.clock.now)
        self.clock.after(self.scenario.plan.noticed_after_s, self._noticed, worker, worker.life, was_active)
        self._schedule_return(worker)

    def _noticed(self, worker: Worker, life: int, was_active: bool) -> None:
        if worker.life == life and not worker.present:
            self.learner.forget(worker)
            self.dispatcher.gone(worker, was_active=was_active)
            self.dispatcher.money_is_free()

    def _return(self, worker: Worker) -> None:
        if worker.present:
            return
        worker.present = True
        self.tally.joins += 1
        self.learner.forget(worker)
        if not worker.excluded:
            self.dispatcher.arrived(worker)
        self._schedule_departure(worker)

    def _move_price(self, worker: Worker) -> None:
        self.clock.after(PRICE_STEP_S, self._move_price, worker)
        step = worker.machine.kind.price_walk_per_hour * (PRICE_STEP_S / 3600) ** 0.5
        mean = worker.machine.price_per_hour
        # Drawn back to the listed price, so that a walk of days stays near it.
        pull = (mean / worker.asked_price_per_hour) ** 0.1
        worker.asked_price_per_hour *= lognormal(worker.luck, 1.0, step) * pull
        self.dispatcher.changed(worker)
        if worker.present and worker.state is State.ACTIVE:
            self.dispatcher.price_moved(worker)

    # What the learner did

    def on_update(self, batch: list[SimGroup], version: int) -> None:
        """Nothing more to do: the learner counted."""

    def on_published(self, version: int) -> None:
        self.weights.publish(version, self.clock.now)
        for machine, seconds in self.weights.broadcast_log:
            self.measured.version_ready(machine.key, seconds)
        self.weights.broadcast_log.clear()

    def on_excluded(self, worker: Worker) -> None:
        was_active = worker.state is State.ACTIVE
        if worker.state >= State.WARM:
            self.set_state(worker, State.COLD if worker.state is State.WARM else State.DRAINING)
        self.learner.forget(worker)
        self.dispatcher.gone(worker, was_active=was_active)

    # Numbers

    def _sample(self) -> None:
        self.clock.after(self.timeline.step_s, self._sample)
        busy = self.learner.busy_until_now_s()
        self.timeline.add(
            time_s=self.clock.now,
            utilization=(busy - self._busy_at_sample) / self.timeline.step_s,
            active=float(sum(worker.state is State.ACTIVE for worker in self.workers)),
            present=float(sum(worker.present for worker in self.workers)),
            capacity=self.capacity,
            waiting=float(self.learner.buffer.local_waiting),
            cost_per_hour=self.money.per_hour,
            version=float(self.learner.version),
        )
        self._busy_at_sample = busy

    def snapshot(self) -> dict[str, float]:
        """Counters of now, to take off those of the end."""
        self._settle_capacity()
        learner = self.learner
        return {
            "time_s": self.clock.now,
            "busy_s": learner.busy_until_now_s(),
            "updates": float(learner.updates),
            "dollars": self.money.settle(self.clock.now),
            "accepted": float(learner.accepted),
            "stale_in_queue": float(learner.stale_in_queue),
            "bad_consumed": float(learner.bad_consumed),
            "refused": float(sum(learner.refused.values())),
            "sent_bytes": self.weights.sent_bytes,
            **{name: float(value) for name, value in vars(self.tally).items()},
        }

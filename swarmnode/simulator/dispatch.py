"""Who is active in a simulated fleet: the node's planner on what is measured, or a policy that it is compared
with."""

import random
from collections.abc import Callable
from dataclasses import replace

from swarmnode.scheduler.activation import Plan, make_plan, may_drain, replan_reason, stand_ins
from swarmnode.scheduler.capacity import Demand, Timing, required_rate
from swarmnode.scheduler.measurements import Measurements
from swarmnode.scheduler.offers import WorkerOffer, traffic_mbps
from swarmnode.scheduler.planning import BYTES_PER_TOKEN
from swarmnode.scheduler.settings import PlanSettings
from swarmnode.simulator.clock import EventQueue
from swarmnode.simulator.scenario import Scenario
from swarmnode.simulator.weights import Weights
from swarmnode.simulator.worker import State, Worker

SetState = Callable[[Worker, State], None]

LEAST_GAP_S = 5.0
"""Between two plans, however much happens."""
DRAIN_EVERY_S = 10.0
"""How often it is looked whether who comes has weights, so that who goes may go."""


class Dispatcher:
    """Keeps the active set. Only what the learner could know decides: offers and measurements."""

    def __init__(
        self,
        scenario: Scenario,
        demand: Demand,
        settings: PlanSettings,
        workers: list[Worker],
        *,
        clock: EventQueue,
        rng: random.Random,
        measured: Measurements,
        weights: Weights,
        set_state: SetState,
        agree_on_price: Callable[[Worker], None],
        paid_per_hour: Callable[[], float],
    ) -> None:
        self._scenario = scenario
        self._base_demand = demand
        self._settings = settings
        self._workers = workers
        self._by_key = {worker.key: worker for worker in workers}
        self._clock = clock
        self._rng = rng
        self._measured = measured
        self._weights = weights
        self._set_state = set_state
        self._agree_on_price = agree_on_price
        self._paid_per_hour = paid_per_hour
        self._waiting: list[Worker] = []
        """Chosen, and not active yet for want of money."""
        self._offers: dict[int, WorkerOffer] = {}
        self._stale_offers: set[int] = {worker.machine.number for worker in workers}
        self._order: list[int] = []
        self._planned_at_s = -LEAST_GAP_S
        self.plan: Plan | None = None
        self.plans = 0
        self.stood_in = 0
        self.reasons: dict[str, int] = {}

    def start(self) -> None:
        """The first plan, and a look at it every so often."""
        for worker in self._workers:
            if worker.present:
                self.arrived(worker)
        self._replan("start")
        self._clock.after(self._scenario.plan.check_every_s, self._check)

    # What happens

    def arrived(self, worker: Worker) -> None:
        """A machine is there, or there again."""
        machine = worker.machine
        self._measured.joined(
            worker.key,
            self._clock.now,
            kind=machine.kind.name,
            claimed_groups_per_s=machine.groups_per_s * machine.kind.claims,
        )
        self.changed(worker)

    def gone(self, worker: Worker, *, was_active: bool) -> None:
        """A machine left, or is excluded: spares stand in at once for one that was active."""
        self._measured.left(worker.key, self._clock.now, by_choice_of_ours=worker.excluded)
        self.changed(worker)
        if not was_active:
            return
        if self._scenario.plan.policy != "plan":
            self._replan("left")
        elif self.plan is not None:
            self._stand_in()

    def changed(self, worker: Worker) -> None:
        """Its offer is another one now."""
        self._stale_offers.add(worker.machine.number)

    def money_is_free(self) -> None:
        """Somebody is not paid any more: who waited for that can begin."""
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            if worker.present and not worker.excluded and worker.state in (State.COLD, State.WARM):
                self._activate(worker)

    def price_moved(self, worker: Worker) -> None:
        """An active worker asks another price: paid at once, or what was agreed until a plan decides."""
        self._take_price(worker)
        if worker.asked_price_per_hour != worker.price_per_hour:
            self._replan("a price rose above the budget")

    def demand(self) -> Demand:
        """With the update time that is measured."""
        measured = self._measured.train_s
        return replace(self._base_demand, train_s=measured.value) if measured else self._base_demand

    # Plans

    def _check(self) -> None:
        self._clock.after(self._scenario.plan.check_every_s, self._check)
        for worker in self._workers:
            if worker.state >= State.WARM:
                self._stale_offers.add(worker.machine.number)
        if self._scenario.plan.policy != "plan":
            self._replan("tick")
            return
        assert self.plan is not None
        leaving = set(self.plan.draining)
        active = [w for w in self._workers if w.state is State.ACTIVE and w.key not in leaving]
        plan = replace(
            self.plan,
            active=tuple(worker.key for worker in active),
            cost_per_hour=sum(worker.price_per_hour for worker in active),
        )
        reason = replan_reason(plan, self._current_offers(), self.demand(), self._settings)
        if reason is not None:
            self._replan(reason)

    def _replan(self, reason: str) -> None:
        if self._clock.now - self._planned_at_s < LEAST_GAP_S:
            return
        self._planned_at_s = self._clock.now
        self.plans += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        offers = self._current_offers()
        if self._scenario.plan.policy != "plan":
            self._apply(self._other_policy(offers), frozenset())
            return
        plan = make_plan(
            offers,
            self.demand(),
            self._settings,
            active={worker.key for worker in self._workers if worker.state is State.ACTIVE},
            draining={worker.key for worker in self._workers if worker.state is State.DRAINING},
        )
        self.plan = plan
        self._apply(frozenset(plan.active), frozenset(plan.spares))
        self._drain()

    def _drain(self) -> None:
        """Let those go whose place is taken; all of them if the money is needed for who takes it."""
        if self.plan is None:
            return
        active = {worker.key for worker in self._workers if worker.state is State.ACTIVE}
        leaving = [key for key in self.plan.draining if key in active]
        if not leaving:
            return
        for worker in self._workers:
            if worker.state is State.ACTIVE:
                self._weights.advance(worker.machine, worker.weights, self._clock.now)
        have_weights = {key for key in active if self._by_key[key].weights.version is not None}
        for key in leaving if self._waiting else may_drain(self.plan, active, have_weights):
            self._set_state(self._by_key[key], State.DRAINING)
        if any(self._by_key[key].state is State.ACTIVE for key in leaving):
            self._clock.after(DRAIN_EVERY_S, self._drain_later, self.plans)

    def _drain_later(self, plans: int) -> None:
        if plans == self.plans:
            self._drain()

    def _apply(self, active: frozenset[bytes], spares: frozenset[bytes]) -> None:
        if self._scenario.plan.policy != "plan":
            for worker in self._workers:
                if worker.state is State.ACTIVE and worker.key not in active:
                    self._set_state(worker, State.DRAINING)
        self._waiting.clear()
        for worker in self._workers:
            if worker.key in active:
                if worker.state is not State.ACTIVE:
                    self._activate(worker)
                else:
                    self._take_price(worker)
            elif worker.state in (State.COLD, State.WARM):
                wanted = State.WARM if worker.key in spares else State.COLD
                if worker.state is not wanted:
                    self._set_state(worker, wanted)

    def _activate(self, worker: Worker) -> None:
        """Now, or when those that drain leave the money for it."""
        paid = worker.price_per_hour if worker.is_paid else 0.0
        cost = self._paid_per_hour() - paid + worker.asked_price_per_hour
        if cost <= self._settings.budget_per_hour * (1 + 1e-9):
            self._set_state(worker, State.ACTIVE)
        else:
            self._waiting.append(worker)

    def _take_price(self, worker: Worker) -> None:
        """Pay what a worker asks now, or go on as agreed while the money is short."""
        more = worker.asked_price_per_hour - worker.price_per_hour
        if more != 0 and (
            more < 0 or self._paid_per_hour() + more <= self._settings.budget_per_hour * (1 + 1e-9)
        ):
            self._agree_on_price(worker)

    def _stand_in(self) -> None:
        """Call spares, in the plan's order, for what was lost; a new plan if they are too few."""
        assert self.plan is not None
        active = {worker.key for worker in self._workers if worker.state is State.ACTIVE}
        ready = {
            key
            for key in self.plan.spares
            if self._by_key[key].state is State.WARM and not self._by_key[key].excluded
        }
        called = stand_ins(self.plan, active, ready)
        for key in called:
            self._activate(self._by_key[key])
            self.stood_in += 1
        if stand_ins(self.plan, active.union(called), set(self._by_key)):
            self._replan("active workers left")

    # Offers

    def _current_offers(self) -> list[WorkerOffer]:
        for number in sorted(self._stale_offers):
            worker = self._workers[number - 1]
            if worker.present and not worker.excluded:
                self._offers[number] = self._offer(worker)
            else:
                self._offers.pop(number, None)
        self._stale_offers.clear()
        return [self._offers[number] for number in sorted(self._offers)]

    def _offer(self, worker: Worker) -> WorkerOffer:
        machine, run = worker.machine, self._scenario.run
        rate = machine.groups_per_s * machine.kind.claims
        word = Timing(
            rate,
            broadcast_s=self._expected_broadcast_s(worker),
            latency_s=machine.kind.groups_in_hand / rate + machine.link.round_trip_s,
            latency_deviation_s=run.length_spread * machine.kind.groups_in_hand / rate,
        )
        timing = self._measured.timing(worker.key, word)
        group_bytes = run.group_size * run.completion_tokens * BYTES_PER_TOKEN
        return WorkerOffer(
            worker=worker.key,
            timing=timing,
            name=f"{machine.kind.name} {machine.number}",
            owner=machine.owner,
            region=machine.kind.region,
            device=machine.kind.name,
            # Who drains is paid what was agreed.
            price_per_hour=(
                worker.price_per_hour if worker.state is State.DRAINING else worker.asked_price_per_hour
            ),
            departures_per_hour=3600 * self._measured.departure_rate(worker.key, self._clock.now),
            rate_spread=machine.kind.rate_wobble,
            start_s=self._weights.start_s(machine, worker.weights),
            traffic_mbps=traffic_mbps(
                self._base_demand,
                timing,
                version_bytes=self._scenario.weights.delta_mb * 1e6,
                group_bytes=group_bytes,
            ),
        )

    def _expected_broadcast_s(self, worker: Worker) -> float:
        """For who has not fetched a version yet: what its line takes, at least as long as the whole swarm's
        part."""
        section, link = self._scenario.weights, worker.machine.link
        size = section.delta_mb * 1e6
        swarm_s = self._weights.publications[-1].swarm_s_per_byte if self._weights.publications else 0.0
        own_s = section.overhead * size * 8 / (link.download_mbps * 1e6)
        return max(size * swarm_s, own_s) + link.round_trip_s + section.load_s

    # What the planner is compared with

    def _other_policy(self, offers: list[WorkerOffer]) -> frozenset[bytes]:
        policy, settings = self._scenario.plan.policy, self._scenario.plan
        if policy == "everyone":
            return frozenset(offer.worker for offer in offers)
        if policy == "cheapest":
            ordered = sorted(offers, key=lambda offer: offer.price_per_hour)
        elif policy == "cheapest_per_group":
            ordered = sorted(offers, key=lambda offer: offer.price_per_hour / offer.timing.groups_per_s)
        else:
            # One order for the whole run: who is chosen stays until it leaves.
            if not self._order:
                self._order = [worker.machine.number for worker in self._workers]
                self._rng.shuffle(self._order)
            place = {number.to_bytes(8, "big"): index for index, number in enumerate(self._order)}
            ordered = sorted(offers, key=lambda offer: place[offer.worker])
        demand = self.demand()
        wanted = settings.overbuy * demand.floor_rate
        chosen: list[bytes] = []
        capacity = 0.0
        for offer in ordered:
            if capacity >= wanted:
                break
            chosen.append(offer.worker)
            # The rule with this worker's own broadcast time, and its word.
            needed = required_rate(demand, offer.timing.broadcast_s)
            capacity += (
                offer.timing.groups_per_s * demand.floor_rate / needed if needed < float("inf") else 0.0
            )
        return frozenset(chosen)

"""What must hold after every event of a simulated fleet; a broken rule ends it and says what and when."""

from typing import TYPE_CHECKING

from swarmnode.simulator.worker import State

if TYPE_CHECKING:
    from swarmnode.simulator.fleet import FleetSimulation


class InvariantBroken(AssertionError):
    """A rule of the node's own code was broken: a bug of it or of the simulator."""


class FleetInvariants:
    """Nothing staler than S is consumed, nothing consumed twice, credit never negative, activation never
    above budget; at the end, every sum against what it is the sum of."""

    def __init__(self, fleet: "FleetSimulation") -> None:
        self._fleet = fleet
        self._budget = fleet.scenario.plan_settings().budget_per_hour * (1 + 1e-9) + 1e-9
        self.checked = 0

    def check(self) -> None:
        """After every event."""
        self.checked += 1
        fleet, learner = self._fleet, self._fleet.learner
        if learner.most_stale > fleet.demand.max_staleness:
            self._broken(f"a group {learner.most_stale} versions behind was consumed")
        if learner.consumed_twice:
            self._broken("a group was consumed twice")
        if learner.credits.outstanding(fleet.clock.now) < 0:
            self._broken("credit is negative")
        if fleet.money.per_hour > self._budget:
            self._broken(f"${fleet.money.per_hour:.4f} per hour are spent, above the budget")

    def check_all(self) -> None:
        """Once at the end: what is too dear for every event."""
        fleet, learner = self._fleet, self._fleet.learner
        capacity = sum(w.machine.groups_per_s for w in fleet.workers if w.state is State.ACTIVE)
        if abs(capacity - fleet.capacity) > 1e-6 * max(1.0, capacity):
            self._broken(f"capacity is {capacity}, counted as {fleet.capacity}")
        cost = sum(worker.price_per_hour for worker in fleet.workers if worker.is_paid)
        if abs(cost - fleet.money.per_hour) > 1e-6 * max(1.0, cost):
            self._broken(f"${cost} per hour are spent, counted as {fleet.money.per_hour}")
        consumed = sum(learner.staleness.values())
        if learner.accepted != consumed + learner.stale_in_queue + learner.buffer.local_waiting:
            self._broken("accepted groups are not those consumed, stale and waiting")
        in_hand = sum(worker.in_hand for worker in fleet.workers)
        tally = fleet.tally
        if tally.started < tally.finished + in_hand:
            self._broken("more groups were finished than started")

    def _broken(self, what: str) -> None:
        raise InvariantBroken(f"at {self._fleet.clock.now:.3f} s: {what}")

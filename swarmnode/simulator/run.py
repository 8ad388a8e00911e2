"""Runs a scenario of either kind."""

from swarmnode.simulator.accounts import Report
from swarmnode.simulator.fleet import FleetSimulation
from swarmnode.simulator.scenario import Scenario
from swarmnode.simulator.swarm import SwarmSimulation


def simulate(scenario: Scenario) -> Report:
    """The report of a scenario. Raises `InvariantBroken`."""
    if scenario.kind == "swarm":
        return SwarmSimulation(scenario).run()
    return FleetSimulation(scenario).run()

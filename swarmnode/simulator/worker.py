"""One worker of a fleet: what it has in hand, in which state it is, what it costs."""

import random
from enum import IntEnum

from swarmnode.simulator.population import Machine
from swarmnode.simulator.weights import WorkerWeights


class State(IntEnum):
    COLD = 0
    """On standby without fresh weights, or not there."""
    WARM = 1
    ACTIVE = 2
    DRAINING = 3


class SimGroup:
    """A group on its way. The names are those that `trainer.replay_buffer` asks for."""

    __slots__ = (
        "added_pause_s",
        "bad",
        "consumed",
        "granted_at_s",
        "id",
        "oldest_version",
        "paused_at_start_s",
        "started_at_s",
        "worker",
    )  # fmt: skip
    is_local = True
    is_informative = True

    def __init__(
        self, number: int, version: int, worker: "Worker", granted_at_s: float, started_at_s: float
    ) -> None:
        self.id = number.to_bytes(8, "big")
        self.oldest_version = version
        self.worker = worker
        self.granted_at_s = granted_at_s
        self.started_at_s = started_at_s
        self.paused_at_start_s = 0.0
        self.added_pause_s = 0.0
        self.bad = worker.machine.is_cheat
        self.consumed = False


class Worker:
    """Mutable. `life` counts its stays: what was begun in an earlier one never arrives."""

    __slots__ = (
        "asked_price_per_hour",
        "asking",
        "consumed",
        "excluded",
        "in_hand",
        "life",
        "luck",
        "machine",
        "present",
        "price_per_hour",
        "refused_until_s",
        "state",
        "upload_s",
        "wasted",
        "weights",
        "work_s",
    )  # fmt: skip

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.luck = random.Random(f"{seed} {machine.number}")
        """When it leaves and returns and how its price moves: the same whatever a policy does, so that
        policies can be compared on one market."""
        self.weights = WorkerWeights()
        self.state = State.COLD
        self.present = machine.present
        self.life = 0
        self.in_hand = 0
        self.asking = False
        """Whether a request for credit is under way or waits to be sent again."""
        self.price_per_hour = machine.price_per_hour
        """What it is paid while it is active or draining: agreed when a plan took it on or kept it."""
        self.asked_price_per_hour = machine.price_per_hour
        self.excluded = False
        self.consumed = 0
        self.wasted = 0

    @property
    def key(self) -> bytes:
        return self.machine.key

    @property
    def is_paid(self) -> bool:
        return self.present and self.state >= State.ACTIVE

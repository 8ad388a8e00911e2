"""How much of the learner's credit one worker may hold, by its rate and its way; and when to ask again.

`protocol.pacing` says how many groups the learner wants in all. This says how many of them a worker can
deliver before they would be too stale, so that slow or far workers get what they can finish in time and no
more.
"""

import math
from dataclasses import dataclass

from protocol.pacing import PacingState
from swarmnode.scheduler.capacity import SLOWEST_IN_DEVIATIONS

IN_TRANSIT = 2
"""Groups that are done and have not arrived: they count as outstanding and keep nobody busy."""
SHORTEST_RETRY_S = 0.25
LONGEST_RETRY_S = 10.0


@dataclass(frozen=True)
class WorkerPace:
    """What is measured of a worker."""

    groups_per_s: float
    latency_s: float
    """From granted credit to the group's arrival: round trip, generation, upload."""
    latency_deviation_s: float = 0.0


def time_left_s(lag: int, max_staleness: int, train_s: float, training_for_s: float | None) -> float:
    """Until the last update that may consume what a worker `lag` versions behind starts now begins.

    `training_for_s` is how long the update of now has been running, None if the learner waits for groups:
    then the batch that it waits for takes whatever comes first, and nothing is late for it.
    """
    if training_for_s is None:
        return math.inf
    return (max_staleness - lag) * train_s - training_for_s


def worker_limit(pace: WorkerPace, left_s: float, outstanding: int) -> int:
    """Most groups to grant to a worker now, so that even a slow one among them arrives before `left_s` has
    passed."""
    if math.isinf(left_s):
        return 2**30
    slowest_s = pace.latency_s + SLOWEST_IN_DEVIATIONS * pace.latency_deviation_s
    if slowest_s > left_s:
        return 0
    possible = math.ceil(pace.groups_per_s * left_s) + IN_TRANSIT
    return max(0, possible - outstanding)


def retry_after_s(
    state: PacingState, worker_version: int, *, train_s: float, training_for_s: float | None, spread: float
) -> float:
    """When a worker that got nothing should ask again; `spread` in [0, 1) keeps many from asking at once.

    Room comes with the next update; to a worker that is behind, with the version that it is about to have.
    """
    if worker_version < state.published_version or training_for_s is None:
        return SHORTEST_RETRY_S * (1 + 3 * spread)
    rest_s = max(0.0, train_s - training_for_s)
    return min(LONGEST_RETRY_S, rest_s + (SHORTEST_RETRY_S + 0.1 * train_s) * spread + SHORTEST_RETRY_S)

"""Credit: how many groups a learner lets a worker generate, so that little is produced to be thrown away."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PacingState:
    """What the learner knows when a worker asks for credit."""

    version: int
    """The learner's current version."""
    published_version: int
    batch_groups: int
    """Local groups consumed by one update (R)."""
    waiting: int
    """Accepted groups not yet consumed."""
    outstanding: int
    """Groups granted to workers and not yet received."""
    max_staleness: int
    pacing_batches: int


@dataclass(frozen=True)
class Grant:
    count: int
    reason: str


def grant_credit(state: PacingState, worker_version: int, wanted: int) -> Grant:
    """Grant up to `wanted` groups.

    A group granted now stands behind `waiting + outstanding` others, so it is consumed about (waiting +
    outstanding) // R updates from now; its staleness then is that plus the worker's lag. The grant ends where
    this would exceed the bound S, and where `pacing_batches` batches exist already. This is AReaL's admission
    rule ((S + version + 1) * R - produced), written in what exists now, so that a resumed learner needs no
    counters.
    """
    lag = state.version - worker_version
    if lag < 0:
        return Grant(0, "the worker is ahead of the learner: it must load the learner's version")
    if lag > state.max_staleness:
        return Grant(0, f"version {worker_version} is {lag} behind, the bound is {state.max_staleness}")
    batches = min(state.pacing_batches, state.max_staleness - lag + 1)
    free = batches * state.batch_groups - state.waiting - state.outstanding
    if free <= 0:
        return Grant(0, "enough groups are waiting or being generated")
    return Grant(min(wanted, free), "")

"""Staleness, defined once: consuming version minus the oldest version that made any token of the group."""

from collections.abc import Iterable

from protocol.messages import RolloutGroup


def oldest_version(group: RolloutGroup) -> int:
    """The oldest version among the group's tokens."""
    return min(run.version for completion in group.completions for run in completion.version_runs)


def newest_version(group: RolloutGroup) -> int:
    """The newest version among the group's tokens."""
    return max(run.version for completion in group.completions for run in completion.version_runs)


def staleness(consuming_version: int, oldest: int) -> int:
    """How many versions behind. `consuming_version` is the learner's version before the update that uses the
    group."""
    return consuming_version - oldest


def is_admissible(consuming_version: int, oldest: int, max_staleness: int) -> bool:
    """Whether a group may be consumed: staleness at most `max_staleness`, and not from the future."""
    return 0 <= staleness(consuming_version, oldest) <= max_staleness


def deadline(oldest: int, max_staleness: int) -> int:
    """The last version that may consume the group. The queue serves the earliest deadline first."""
    return oldest + max_staleness


def expired(groups: Iterable[tuple[bytes, int]], consuming_version: int, max_staleness: int) -> list[bytes]:
    """Ids of the (id, oldest version) pairs that can never be consumed any more."""
    return [name for name, oldest in groups if deadline(oldest, max_staleness) < consuming_version]

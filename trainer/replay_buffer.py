"""The groups that wait to be trained on: bounded, earliest staleness deadline first, each consumed at most
once.

Local groups are of the learner's own policy: one whose staleness would exceed the bound is dropped and
reported. External groups are other policies' and have no staleness here; J of them are drawn uniformly from a
pool that keeps the newest ones (SAPO, arXiv 2509.08721). Every id that enters leaves exactly once: consumed,
dropped, or still waiting. Pure Python; knows nothing of tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import numpy as np

from protocol.staleness import deadline, is_admissible


class Group(Protocol):
    """What the buffer must know of a group."""

    @property
    def id(self) -> bytes: ...
    @property
    def oldest_version(self) -> int: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def is_informative(self) -> bool: ...


G = TypeVar("G", bound=Group)


class Added(StrEnum):
    """What became of a group handed to the buffer."""

    WAITING = "waiting"
    DUPLICATE = "duplicate"
    """Its id waits, or was consumed or dropped before: nothing changes."""
    STALE = "stale"
    """Beyond the bound already, or from a version that does not exist: dropped."""
    NO_ADVANTAGE = "no_advantage"
    """External with equal rewards: dropped, it would take the place of one that teaches."""


@dataclass(frozen=True)
class Batch(Generic[G]):
    """Groups taken for one update."""

    local: list[G]
    external: list[G]


class ReplayBuffer(Generic[G]):
    """Invariant: a group is in at most one of waiting, consumed, dropped; what `take` gives is within the
    bound."""

    def __init__(self, *, max_staleness: int, local_bound: int, external_bound: int) -> None:
        self._max_staleness = max_staleness
        self._local_bound = local_bound
        self._external_bound = external_bound
        self._local: dict[bytes, G] = {}
        self._external: dict[bytes, G] = {}
        self._consumed: dict[bytes, int] = {}
        self._dropped: dict[bytes, int] = {}
        self._unreported: list[bytes] = []

    @property
    def local_waiting(self) -> int:
        return len(self._local)

    @property
    def external_waiting(self) -> int:
        return len(self._external)

    def add(self, group: G, version: int) -> Added:
        """Let a group wait. `version` is the learner's current one: the one that would consume it next."""
        name = group.id
        if any(name in known for known in (self._local, self._external, self._consumed, self._dropped)):
            return Added.DUPLICATE
        if not group.is_local:
            if not group.is_informative or self._external_bound == 0:
                self._drop(name, version)
                return Added.NO_ADVANTAGE
            self._external[name] = group
            while len(self._external) > self._external_bound:
                self._drop(next(iter(self._external)), version)
            return Added.WAITING
        if not is_admissible(version, group.oldest_version, self._max_staleness):
            self._drop(name, version)
            return Added.STALE
        self._local[name] = group
        while len(self._local) > self._local_bound:
            self._drop(self._by_deadline()[0].id, version)
        return Added.WAITING

    def expire(self, version: int) -> None:
        """Drop local groups that no version from `version` on may consume."""
        for group in list(self._local.values()):
            if deadline(group.oldest_version, self._max_staleness) < version:
                self._drop(group.id, version)

    def take(
        self, version: int, local_groups: int, external_groups: int, rng: np.random.Generator
    ) -> Batch[G] | None:
        """The batch of the update from `version`; None while fewer than `local_groups` wait.

        The groups are consumed by this: hand them back with `put_back` if the update does not happen.
        """
        self.expire(version)
        if len(self._local) < local_groups:
            return None
        local = self._by_deadline()[:local_groups]
        pool = list(self._external.values())
        picks = rng.permutation(len(pool))[:external_groups]
        external = [pool[int(index)] for index in picks]
        for group in (*local, *external):
            (self._local if group.is_local else self._external).pop(group.id)
            self._consumed[group.id] = version
        return Batch(local, external)

    def take_dropped(self) -> list[bytes]:
        """Ids dropped since the last call."""
        dropped, self._unreported = self._unreported, []
        return dropped

    def put_back(self, batch: Batch[G]) -> None:
        """Undo a `take` whose update was abandoned."""
        for group in (*batch.local, *batch.external):
            del self._consumed[group.id]
        self._local = {group.id: group for group in batch.local} | self._local
        self._external = {group.id: group for group in batch.external} | self._external

    def remember_consumed(self, ids: Iterable[bytes], version: int) -> None:
        """Ids consumed before a restart, so that they are not taken again."""
        self._consumed.update(dict.fromkeys(ids, version))

    def forget_before(self, version: int) -> None:
        """Forget ids consumed or dropped before `version`; the bound keeps local ones of that age out."""
        self._consumed = {name: v for name, v in self._consumed.items() if v >= version}
        self._dropped = {name: v for name, v in self._dropped.items() if v >= version}

    def _by_deadline(self) -> list[G]:
        # Stable: equal deadlines leave in the order they came.
        return sorted(self._local.values(), key=lambda group: group.oldest_version)

    def _drop(self, name: bytes, version: int) -> None:
        self._local.pop(name, None)
        self._external.pop(name, None)
        self._dropped[name] = version
        self._unreported.append(name)

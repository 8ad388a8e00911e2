"""What to fetch so that a version is here with the fewest bytes: one delta, a chain of deltas, or a snapshot.

Every version has at most one delta and names its parent, so all ways to a version lie on one line that leads
back from it: at each ancestor the line can end in a snapshot that is held already, or in one to be fetched.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from protocol.messages import Manifest

LITTLE_DONE = 0.1
"""A snapshot of which less than this share is here is given up for a newer one: nearly all of it would have
to come in any case. With more it is finished, or a learner that publishes faster than snapshots travel would
leave its workers without any version."""


@dataclass(frozen=True)
class Piece:
    """One file of a version."""

    kind: Literal["snapshot", "delta"]
    version: int

    def __str__(self) -> str:
        return f"{self.kind} of version {self.version}"


@dataclass(frozen=True)
class Way:
    """Files that give a version, in the order in which they are of use, and how much of them is not here yet.

    The first may be a snapshot. If it is a delta, its parent is held; each other delta's parent is the
    version before it.
    """

    pieces: tuple[Piece, ...]
    missing_bytes: int


@dataclass(frozen=True)
class NeedManifest:
    """The manifest of this version would tell of a way that may be shorter."""

    version: int


@dataclass(frozen=True)
class DeltaFacts:
    """What a delta applies to, by version and state hash, and its size."""

    parent: int
    parent_state: bytes
    size_bytes: int


@dataclass(frozen=True)
class VersionFacts:
    """As much of a manifest as matters here. Its state hash costs a pass over all chunk hashes."""

    version: int
    state: bytes
    snapshot_bytes: int
    delta: DeltaFacts | None

    @classmethod
    def of(cls, manifest: Manifest) -> "VersionFacts":
        delta = manifest.delta
        return cls(
            manifest.version,
            manifest.state_hash,
            manifest.size_bytes,
            None if delta is None else DeltaFacts(delta.parent, delta.parent_state, delta.size_bytes),
        )

    def size_of(self, piece: Piece) -> int:
        """The size of one of its files."""
        if piece.kind == "snapshot":
            return self.snapshot_bytes
        assert self.delta is not None
        return self.delta.size_bytes


def cheapest_way(
    target: int,
    *,
    held: Mapping[int, bytes],
    known: Mapping[int, VersionFacts],
    done: Mapping[Piece, int],
    without: AbstractSet[Piece] = frozenset(),
    unknown: AbstractSet[int] = frozenset(),
    longest_chain: int,
) -> Way | NeedManifest | None:
    """How to come to `target`, which is in `known`; None when `without` leaves no way.

    `held` are the versions whose snapshot is complete here, with their state hashes; `known` those whose
    manifest is at hand; `done` how many bytes of a file are on disk; `without` files that cannot be had or
    are wrong; `unknown` versions whose manifest nobody has. No more than `longest_chain` deltas are taken in
    a row: older ones are deleted everywhere. Among equal ways the one with fewer files is taken.
    """
    best: Way | None = None
    chain: tuple[Piece, ...] = ()
    chain_bytes = 0
    version, state = target, known[target].state
    while True:
        if version in held:
            return _better(best, Way(chain, chain_bytes)) if held[version] == state else best
        facts = known.get(version)
        if facts is None:
            # Its manifest is of use only if a version that is here, or a snapshot that is partly here, may be
            # on this line.
            here = [*held, *(piece.version for piece in done if piece.kind == "snapshot")]
            may_help = version not in unknown and any(other <= version for other in here)
            return NeedManifest(version) if may_help else best
        if facts.state != state:
            return best  # Other weights than those that the delta was made for.
        snapshot = Piece("snapshot", version)
        if snapshot not in without:
            missing = max(0, facts.snapshot_bytes - done.get(snapshot, 0))
            best = _better(best, Way((snapshot, *chain), chain_bytes + missing))
        delta, piece = facts.delta, Piece("delta", version)
        if delta is None or piece in without or len(chain) == longest_chain:
            return best
        chain = (piece, *chain)
        chain_bytes += max(0, delta.size_bytes - done.get(piece, 0))
        if best is not None and chain_bytes >= best.missing_bytes:
            return best
        version, state = delta.parent, delta.parent_state


def _better(best: Way | None, other: Way) -> Way:
    if best is None or other.missing_bytes < best.missing_bytes:
        return other
    return best


def is_given_up(running: Piece, done_bytes: int, size_bytes: int, way: Way | None) -> bool:
    """Whether to end the transfer of `running` because `way`, to a newer version, does not need it.

    A delta is always finished: it is small, and its version can be used sooner than any newer one.
    """
    if way is None or running.kind == "delta" or running in way.pieces:
        return False
    if all(piece.kind == "delta" for piece in way.pieces):
        return way.missing_bytes < size_bytes - done_bytes
    return done_bytes < LITTLE_DONE * size_bytes

"""The way with the fewest bytes, against trying all ways; and when a transfer is given up for another."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.runtime.weight_plan import (
    DeltaFacts,
    NeedManifest,
    Piece,
    VersionFacts,
    Way,
    cheapest_way,
    is_given_up,
)

SNAPSHOT = 1_000


def state(version: int) -> bytes:
    return b"%032d" % version


def facts(version: int, parent: int | None = None, size: int = 10, snapshot: int = SNAPSHOT) -> VersionFacts:
    delta = None if parent is None else DeltaFacts(parent, state(parent), size)
    return VersionFacts(version, state(version), snapshot, delta)


def lineage(*sizes: int | None) -> dict[int, VersionFacts]:
    """Versions 0, 1, 2, … with deltas of these sizes (None: it has none)."""
    return {
        version: facts(version, version - 1 if size is not None else None, size or 0)
        for version, size in enumerate(sizes)
    }


def snapshot(version: int) -> Piece:
    return Piece("snapshot", version)


def delta(version: int) -> Piece:
    return Piece("delta", version)


def plan(target: int, known: dict[int, VersionFacts], **given_: object) -> Way | NeedManifest | None:
    arguments = {"held": {}, "done": {}, "longest_chain": 9, **given_}
    return cheapest_way(target, known=known, **arguments)  # type: ignore[arg-type]


def test_one_delta_from_the_version_that_is_held() -> None:
    assert plan(3, {3: facts(3, 2)}, held={2: state(2)}) == Way((delta(3),), 10)


def test_a_chain_of_deltas_for_a_node_that_is_behind() -> None:
    known = lineage(None, 10, 20, 30)
    assert plan(3, known, held={0: state(0)}) == Way((delta(1), delta(2), delta(3)), 60)
    assert plan(3, known, held={0: state(0), 2: state(2)}) == Way((delta(3),), 30)


def test_the_snapshot_when_the_chain_is_larger_or_too_long_or_cut() -> None:
    whole = Way((snapshot(3),), SNAPSHOT)
    held = {0: state(0)}
    assert plan(3, lineage(None, 300, 400, 300), held=held) == whole
    assert plan(3, lineage(None, 10, 10, 10), held=held, longest_chain=2) == whole
    assert plan(3, lineage(None, 10, None, 10), held=held) == whole
    assert plan(3, lineage(None, 10, 10, 10), held=held, without={delta(2)}) == whole
    assert plan(3, {3: facts(3, 2)}, held=held, unknown={2}) == whole


def test_one_who_has_nothing_fetches_one_snapshot_and_asks_for_nothing_else() -> None:
    assert plan(7, {7: facts(7, 6)}) == Way((snapshot(7),), SNAPSHOT)


def test_version_zero_is_a_version() -> None:
    assert plan(1, {1: facts(1, 0)}, held={0: state(0)}) == Way((delta(1),), 10)
    assert plan(0, {0: facts(0)}) == Way((snapshot(0),), SNAPSHOT)


def test_a_parent_with_other_weights_is_no_parent() -> None:
    whole = Way((snapshot(2),), SNAPSHOT)
    assert plan(2, {2: facts(2, 1)}, held={1: b"x" * 32}) == whole
    other = {2: facts(2, 1), 1: VersionFacts(1, b"x" * 32, SNAPSHOT, DeltaFacts(0, state(0), 1))}
    assert plan(2, other, held={0: state(0)}) == whole


def test_a_manifest_between_is_asked_for_only_if_it_may_help() -> None:
    assert plan(3, {3: facts(3, 2)}, held={0: state(0)}) == NeedManifest(2)
    assert plan(3, {3: facts(3, 2)}, held={5: state(5)}) == Way((snapshot(3),), SNAPSHOT)
    assert plan(3, {3: facts(3, 2)}, done={snapshot(2): 500}) == NeedManifest(2)
    large = {3: facts(3, 2, size=SNAPSHOT - 1)}
    assert plan(3, large, held={0: state(0)}) == NeedManifest(2)
    assert plan(3, large, held={0: state(0)}, done={snapshot(3): 1}) == Way((snapshot(3),), SNAPSHOT - 1)


def test_what_is_on_disk_counts() -> None:
    known = lineage(None, 10, 10, 10)
    assert plan(3, known, done={snapshot(2): 995}) == Way((snapshot(2), delta(3)), 15)
    assert plan(3, known, done={snapshot(3): 995, snapshot(2): 995}) == Way((snapshot(3),), 5)
    assert plan(3, known, held={2: state(2)}, done={delta(3): 10}) == Way((delta(3),), 0)


@given(
    sizes=st.lists(st.one_of(st.none(), st.integers(1, 1_200)), min_size=1, max_size=7),
    held=st.sets(st.integers(0, 6)),
    done=st.dictionaries(st.integers(0, 6), st.integers(0, SNAPSHOT)),
    done_deltas=st.dictionaries(st.integers(1, 6), st.integers(0, 1_200)),
    without=st.sets(st.builds(Piece, st.sampled_from(["snapshot", "delta"]), st.integers(0, 6))),
    longest=st.integers(1, 8),
)
def test_no_way_is_shorter(
    sizes: list[int | None],
    held: set[int],
    done: dict[int, int],
    done_deltas: dict[int, int],
    without: set[Piece],
    longest: int,
) -> None:
    known = lineage(*[None, *sizes])
    target = len(sizes)
    held -= {target}
    on_disk = {snapshot(v): n for v, n in done.items()} | {delta(v): n for v, n in done_deltas.items()}
    found = plan(
        target,
        known,
        held={version: state(version) for version in held},
        done=on_disk,
        without=without,
        longest_chain=longest,
    )

    # Every ancestor is a place to begin at; a way is what it costs to begin there and the deltas after it.
    costs = []
    steps = [max(0, (size or 0) - done_deltas.get(v, 0)) for v, size in enumerate(sizes, start=1)]
    after = [0, *accumulate(reversed(steps))][::-1]
    for start in range(target, -1, -1):
        if start < target:
            step = start + 1
            usable = known[step].delta is not None and delta(step) not in without
            if not usable or target - start > longest:
                break
        if start in held:
            costs.append(after[start])
            break
        if snapshot(start) not in without:
            costs.append(after[start] + SNAPSHOT - done.get(start, 0))

    assert not isinstance(found, NeedManifest)
    assert (None if found is None else found.missing_bytes) == min(costs, default=None)
    if found is not None:
        assert_sound(found, target, held, without, longest)


def assert_sound(way: Way, target: int, held: set[int], without: set[Piece], longest: int) -> None:
    assert not without.intersection(way.pieces)
    first, *rest = way.pieces
    assert first.kind == "snapshot" or first.version - 1 in held
    assert all(piece.kind == "delta" for piece in rest)
    versions = [piece.version for piece in way.pieces]
    assert versions == list(range(versions[0], target + 1))
    assert sum(piece.kind == "delta" for piece in way.pieces) <= longest


@pytest.mark.parametrize(
    ("running", "done", "way", "given_up"),
    [
        (snapshot(5), 0, Way((snapshot(6),), 1_000), True),
        (snapshot(5), 99, Way((snapshot(6),), 1_000), True),
        (snapshot(5), 100, Way((snapshot(6),), 1_000), False),
        (snapshot(5), 0, Way((snapshot(5), delta(6)), 1_010), False),
        (snapshot(5), 700, Way((delta(6),), 299), True),
        (snapshot(5), 700, Way((delta(6),), 300), False),
        (snapshot(5), 0, None, False),
        (delta(5), 0, Way((snapshot(6),), 1_000), False),
    ],
)
def test_a_snapshot_is_given_up_when_it_has_hardly_begun_or_deltas_lead_there(
    running: Piece, done: int, way: Way | None, given_up: bool
) -> None:
    assert is_given_up(running, done, SNAPSHOT, way) is given_up

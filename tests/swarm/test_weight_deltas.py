"""Versions that come as deltas: the fewest bytes are fetched, snapshots are rebuilt bit for bit, and what
does not give what was signed is thrown away. Virtual time, in memory; files are real."""

from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.delta import encode_delta
from protocol.refusals import RefusalReason
from swarmnode.runtime.version_store import DELTA_NAME, VersionStore
from tests.swarm.small_swarm import connect, running, until
from tests.swarm.weight_scene import CHUNK, SIZE, Scene, WeightNode, use_inline_threads, weights


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_inline_threads(monkeypatch)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def delta_bytes(node: WeightNode, *versions: int) -> int:
    """The sizes of a node's own deltas."""
    return sum(node.file(node.key, version).with_name(DELTA_NAME).stat().st_size for version in versions)


async def test_the_next_version_comes_as_a_delta_and_is_handed_over_before_and_after_it_is_rebuilt(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        before = learner.served_bytes
        learner.publish(1, parent=0)
        scene.follower.heard_of(1)
        await until(lambda: node.loaded == [0, 1], within_s=2)
        assert node.patched == [1]
        assert learner.served_bytes - before == delta_bytes(learner, 1) < SIZE // 10
    assert node.file(learner.key, 1).read_bytes() == weights(1)
    assert node.refusals == [] and node.withdrawn == []


async def test_a_node_that_was_away_fetches_the_deltas_between(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [1])
        before = learner.served_bytes
        for version in (2, 3, 4, 5):
            learner.publish(version, parent=version - 1)
        scene.follower.heard_of(5)
        await until(lambda: 5 in node.loaded, within_s=10)
        assert node.patched == [2, 3, 4, 5] and node.loaded == [1, 2, 3, 4, 5]
        assert learner.served_bytes - before == delta_bytes(learner, 2, 3, 4, 5)
    assert node.file(learner.key, 5).read_bytes() == weights(5)


async def test_a_node_that_was_away_for_too_long_fetches_the_newest_snapshot(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [1])
        before = learner.served_bytes
        for version in range(2, 9):
            learner.publish(version, parent=version - 1)
        await learner.versions.retain(learner.key, scene.spec.max_staleness + 2)
        assert learner.versions.versions(learner.key) == [5, 6, 7, 8]
        scene.follower.heard_of(8)
        await until(lambda: node.loaded == [1, 8], within_s=10)
        assert learner.served_bytes - before == SIZE


async def test_one_who_joins_late_gets_the_newest_snapshot_from_a_node_that_rebuilt_it(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    late = scene.node(3)
    late.serving = [node]
    late.follow(learner.key)
    learner.publish(0)
    async with running(learner, node, late):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        learner.publish(1, parent=0)
        await until(lambda: node.loaded == [0, 1])
        await connect(late, node)
        await until(lambda: late.loaded == [1])
    assert late.file(learner.key, 1).read_bytes() == weights(1)
    assert late.patched == [] and node.served_bytes == SIZE


async def test_a_snapshot_in_progress_is_finished_and_a_delta_leads_on_from_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    source = scene.node(9, uplink_bytes_per_s=1_000)
    node.serving = [source, learner]
    source.hold(learner.publish(5))
    learner.versions.shelf._files.clear()
    async with running(learner, source, node):
        await connect(node, source, learner)
        await until(lambda: node.follower.transfer is not None and node.follower.transfer.done_bytes > 5_000)
        source.hold(learner.publish(6, parent=5))
        learner.versions.shelf._files.clear()
        scene.follower.heard_of(6)
        await until(lambda: node.loaded == [5, 6])
        assert node.patched == [6]
        assert source.served_bytes == SIZE + delta_bytes(learner, 6)


async def test_a_snapshot_that_has_hardly_begun_is_given_up_for_a_newer_one(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    source = scene.node(9, uplink_bytes_per_s=100)
    node.serving = [source, learner]
    source.hold(learner.publish(5))
    learner.versions.shelf._files.clear()
    async with running(learner, source, node):
        await connect(node, source, learner)
        await until(lambda: node.follower.transfer is not None)
        source.hold(learner.publish(6, parent=5))
        scene.follower.heard_of(6)
        await until(lambda: node.loaded == [6])
    assert node.patched == []


async def test_a_delta_that_gives_other_weights_is_the_learners_fault_and_the_snapshot_is_fetched(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        before = learner.served_bytes
        lie = b"".join(encode_delta(weights(0), weights(2), CHUNK, threads=1))
        learner.publish(1, parent=0, delta=lie)
        await until(lambda: node.loaded == [0, 1])
        assert node.patched == [1] and node.withdrawn == [1]
        assert node.refusals == [(learner.peer, RefusalReason.WRONG_HASH)]
        assert any("does not give the weights" in text for text in node.events)
        assert not node.file(learner.key, 1).with_name(DELTA_NAME).exists()
        assert learner.served_bytes - before == len(lie) + SIZE
        learner.publish(2, parent=1)
        await until(lambda: node.loaded == [0, 1, 2])
    assert node.file(learner.key, 2).read_bytes() == weights(2)
    assert len(node.refusals) == 1


@pytest.mark.parametrize("junk", [b"junk", b"SWDELTA1" + bytes(200)])
async def test_junk_in_place_of_a_delta_is_refused_once(
    scene: Scene, junk: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        learner.publish(1, parent=0, delta=junk)
        await until(lambda: node.loaded == [0, 1])
        await trio.sleep(30)
    assert node.refusals == [(learner.peer, RefusalReason.WRONG_HASH)]


async def test_versions_after_a_wrong_one_are_withdrawn_with_it(
    scene: Scene, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        wake = node.follower._rebuilds.wake
        monkeypatch.setattr(node.follower._rebuilds, "wake", lambda: None)
        lie = b"".join(encode_delta(weights(0), weights(2), CHUNK, threads=1))
        learner.publish(1, parent=0, delta=lie)
        learner.publish(2, parent=1)
        await until(lambda: node.patched == [1, 2])
        wake()
        await until(lambda: node.loaded == [0, 2])
        assert node.withdrawn == [1, 2]


async def test_a_parent_that_was_damaged_here_is_mended_and_nobody_is_blamed(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        path = node.file(learner.key, 0)
        content = bytearray(path.read_bytes())
        content[5 * CHUNK] ^= 1
        path.write_bytes(content)
        before = learner.served_bytes
        learner.publish(1, parent=0)
        await until(lambda: 1 in node.loaded)
        assert node.withdrawn == [0, 1] and node.loaded == [0, 0, 1]
        assert learner.served_bytes - before == delta_bytes(learner, 1) + CHUNK, "one chunk was damaged"
    assert node.refusals == []
    assert node.file(learner.key, 1).read_bytes() == weights(1)


async def test_a_delta_for_other_weights_of_the_parents_number_is_not_used(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        learner.publish(1, parent=0, parent_state=b"x" * 32)
        await until(lambda: node.loaded == [0, 1])
    assert node.patched == [] and node.refusals == []


async def test_a_crash_in_the_middle_costs_what_was_not_on_disk_yet(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner = scene.learner
    source = scene.node(9, uplink_bytes_per_s=1_000)
    source.hold(learner.publish(3))
    node = scene.node_a
    node.serving = [source]
    async with running(source, node):
        await connect(node, source)
        await until(lambda: node.follower.transfer is not None and node.follower.transfer.done_bytes > 4_000)
        await node.crash()
    again, source_again = scene.node(2), scene.node(9)
    stored = source.versions.get(learner.key, 3)
    assert stored is not None
    source_again.hold(stored)
    again.serving = [source_again]
    again.follow(learner.key)
    async with running(source_again, again):
        await connect(again, source_again)
        await until(lambda: again.loaded == [3])
        assert source_again.served_bytes <= SIZE - 4_000


async def test_a_delta_left_by_a_crash_is_rebuilt_without_the_network(
    scene: Scene, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        monkeypatch.setattr(node.follower._rebuilds, "wake", lambda: None)
        learner.publish(1, parent=0)
        await until(lambda: node.patched == [1])
        await node.crash()
    again = scene.node(2)
    again.follow(learner.key)
    async with running(again):
        await until(lambda: again.loaded == [0, 1], within_s=5)
    assert again.file(learner.key, 1).read_bytes() == weights(1)


async def test_old_versions_go_with_their_deltas_unless_they_are_kept(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        with node.versions.keep(learner.key, 0) as kept:
            assert kept is not None
            for version in range(1, 8):
                learner.publish(version, parent=version - 1)
                scene.follower.heard_of(version)
                await until(lambda version=version: version in node.loaded)
            folder = node.file(learner.key, 0).parents[1]
            assert {path.name for path in folder.glob("v*")} == {"v0", "v4", "v5", "v6", "v7"}
            assert node.versions.versions(learner.key) == [0, 4, 5, 6, 7]
        learner.publish(8, parent=7)
        await until(lambda: 8 in node.loaded)
        assert {path.name for path in folder.glob("v*")} == {"v5", "v6", "v7", "v8"}
    store = VersionStore(node.policies, scene.spec.run_id)
    store.scan()
    assert [stored.version for stored in store.complete(learner.key)] == [5, 6, 7, 8]
    newest = store.get(learner.key, 8)
    assert newest is not None and newest.delta_path is not None


async def test_a_version_without_a_delta_comes_whole_and_deltas_go_on_from_it(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(0)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [0])
        learner.publish(1)
        await until(lambda: node.loaded == [0, 1])
        learner.publish(2, parent=1)
        await until(lambda: node.loaded == [0, 1, 2])
    assert node.patched == [2]

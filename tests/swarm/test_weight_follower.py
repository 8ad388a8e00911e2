"""Weights from peers: only what the learner signed and what has its hashes is handed over, versions only move
forward, and no liar or loss stops it. Virtual time, in memory; files are real."""

from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.refusals import RefusalReason
from tests.swarm.small_swarm import connect, running, until
from tests.swarm.weight_scene import Scene, use_inline_threads, weights


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_inline_threads(monkeypatch)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_new_version_is_fetched_and_only_newer_ones_after_it(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(3)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [3])
        assert node.file(learner.key, 3).read_bytes() == weights(3)
        learner.publish(5)
        scene.follower.heard_of(5)
        await until(lambda: node.loaded == [3, 5], within_s=1)
        learner.forget(5)
        await trio.sleep(30)
    assert node.loaded == [3, 5]
    assert node.refusals == []


async def test_forged_manifests_are_refused_and_the_learner_is_heard(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    node, learner = scene.node_a, scene.learner
    forger, honest = scene.node(7), scene.node(8)
    # Signed by the forger as the learner's policy; and the learner's own words with another's policy.
    forger.publish(9, policy=learner.key)
    forger.versions._versions[learner.key, 9] = forger.versions._versions.pop((learner.key, 9))
    honest_version = learner.publish(2)
    honest.hold(honest_version)
    node.serving = [forger, honest]
    async with running(node, forger, honest):
        await connect(node, forger, honest)
        scene.follower.heard_of(9)
        await until(lambda: node.loaded == [2])
        await trio.sleep(60)
    assert (forger.peer, RefusalReason.NOT_A_LEARNER) in node.refusals
    assert {peer for peer, _ in node.refusals} == {forger.peer}


async def test_three_liars_cannot_keep_the_one_honest_peer_from_being_asked(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    node, learner = scene.node_a, scene.learner
    liars = [scene.node(number) for number in (11, 12, 13, 14)]
    for liar in liars:
        liar.publish(9, policy=learner.key)
    version = learner.publish(2)
    honest = scene.node(15)
    honest.hold(version)
    node.serving = [*liars, honest]
    async with running(node, honest, *liars):
        await connect(node, honest, *liars)
        await until(lambda: node.loaded == [2])


async def test_a_download_goes_on_at_another_provider_when_one_dies(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    version = learner.publish(4)
    slow = scene.node(21, uplink_bytes_per_s=1_000)
    second = scene.node(22, uplink_bytes_per_s=2_000)
    for holder in (slow, second):
        holder.hold(version)
    node.serving = [slow, second]
    async with running(node, slow, second):
        await connect(node, slow, second)
        await trio.sleep(3)
        assert node.loaded == []
        await slow.crash()
        await until(lambda: node.loaded == [4])
    assert node.file(learner.key, 4).read_bytes() == weights(4)


async def test_what_is_too_old_to_be_of_use_is_given_up_for_the_newest_and_cleaned_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        with trio.fail_after(60):
            while not (tmp_path / "node2").exists():
                await trio.sleep(0.01)
        # The learner moves on and forgets version 1 before it has been fetched.
        learner.forget(1)
        for version in range(2, 6):
            learner.publish(version)
            scene.follower.heard_of(version)
        await until(lambda: node.loaded == [5], within_s=20)
        assert {path.name for path in node.file(learner.key, 5).parents[1].glob("v*")} == {"v5"}


async def test_after_a_restart_the_held_version_is_there_at_once_unless_it_is_damaged(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    for damaged in (False, True):
        scene = Scene(tmp_path / str(damaged))
        learner, node = scene.learner, scene.node_a
        learner.publish(4)
        async with running(learner, node):
            await connect(node, learner)
            await until(lambda node=node: node.loaded == [4])
        if damaged:
            content = bytearray(node.file(learner.key, 4).read_bytes())
            content[-1] ^= 1
            node.file(learner.key, 4).write_bytes(content)
        again, source = scene.node(2), scene.node(1)
        again.serving = [source]
        again.follow(learner.key)
        async with running(again, source):
            await trio.sleep(1)
            assert again.loaded == ([] if damaged else [4])
            await connect(again, source)
            await until(lambda again=again: again.loaded == [4])
        assert again.file(learner.key, 4).read_bytes() == weights(4)
        assert bool(again.events) == damaged


async def test_a_damaged_manifest_costs_no_second_download(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(4)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [4])
    node.file(learner.key, 4).with_name("manifest.msgpack").write_bytes(b"torn")
    again, source = scene.node(2), scene.node(1)
    source.versions.shelf._files.clear()
    again.serving = [source]
    again.follow(learner.key)
    async with running(again, source):
        await connect(again, source)
        await until(lambda: again.loaded == [4], within_s=20)


async def test_a_full_disk_is_said_and_tried_again(
    scene: Scene, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peers import file_assembly

    full = [True]
    reserve = file_assembly._reserve

    def maybe(descriptor: int, size_bytes: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        reserve(descriptor, size_bytes)

    monkeypatch.setattr(file_assembly, "_reserve", maybe)
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: any("No space left" in text for text in node.events))
        full[0] = False
        await until(lambda: node.loaded == [1])

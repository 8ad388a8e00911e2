"""What the page is told: counts that add up, bounded whatever others claim."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from peers.membership import Membership
from protocol.identity import Identity
from protocol.messages import PolicyProgress, Presence
from swarmnode.runtime.events import Journal
from swarmnode.runtime.learner_role import LearnerRole
from swarmnode.runtime.state import MAX_ROWS, StateBuilder
from tests.unit.swarmnode.role_parts import LEARNER, OTHER, WORKER, LearnerParts

MAX_VERSION = 2**40


class LearnerRoles:
    """The roles of a learner's node, as far as the state looks at them."""

    worker = follower = None

    def __init__(self, learner: LearnerRole) -> None:
        self.learner = learner
        self.policy = learner.policy

    @property
    def version(self) -> int | None:
        return self.learner.status.version

    def figures(self) -> dict[str, Any]:
        return {"refused": 0}


class Scene:
    """A learner's node as far as the state looks at it: a real ledger, learner, membership and journal."""

    def __init__(self, path: Path) -> None:
        self.parts = LearnerParts(path)
        self.membership = Membership(LEARNER.key)
        self.connected: set[Any] = set()
        discovery = SimpleNamespace(
            members=lambda: self.membership.view(self.connected),
            member=lambda key: self.membership.find(key, self.connected),
            seed_status=lambda: [],
        )
        self.node = SimpleNamespace(
            roles=LearnerRoles(self.parts.role),
            spec=self.parts.spec,
            name="learner",
            identity=LEARNER,
            role="learner",
            config=SimpleNamespace(network=SimpleNamespace(gone_after_s=10)),
            directory=SimpleNamespace(root=path),
            transport=SimpleNamespace(addresses=[]),
            invite_text=lambda: None,
            rss_mb=1.0,
            discovery=discovery,
            journal=Journal(path / "metrics.jsonl"),
            refused=Counter(),
            store=self.parts.store,
            name_of=self.name_of,
        )

    def name_of(self, key: bytes) -> str:
        member = self.membership.find(key, self.connected)  # type: ignore[arg-type]
        return "learner" if key == LEARNER.key else "unknown" if member is None else member.hello.name

    def heard(self, identity: Identity, name: str, policy: bytes, version: int, **presence: Any) -> None:
        progress = [PolicyProgress(policy=policy, version=version)]
        message = Presence(name=name, role="worker", software="x", policies=progress, **presence)
        self.membership.heard_presence(identity.key, message, trio.current_time())

    async def state(self) -> dict[str, Any]:
        builder = StateBuilder(self.node)  # type: ignore[arg-type]
        with trio.move_on_after(0.5):
            await builder.run()
        return builder.latest()

    async def row(self, name: str) -> dict[str, Any]:
        return next(row for row in (await self.state())["nodes"] if row["name"] == name)


@pytest.fixture
async def scene(tmp_path: Path, nursery: trio.Nursery):
    made = Scene(tmp_path)
    made.parts.verify_by(nursery)
    yield made
    made.parts.store.store.close()


def balance(state: dict[str, Any]) -> tuple[int, int, int, int]:
    groups = state["groups"]
    assert groups["accepted"] == groups["consumed"] + groups["waiting"] + groups["stale"]
    return groups["accepted"], groups["consumed"], groups["waiting"], groups["stale"]


async def test_accepted_is_consumed_waiting_and_stale_in_every_state(scene: Scene) -> None:
    parts = scene.parts
    assert balance(await scene.state()) == (0, 0, 0, 0)
    await parts.up()
    names = [await parts.push(counter) for counter in range(6)]
    assert balance(await scene.state()) == (6, 0, 6, 0)
    await parts.update(1, names[:4], stale=names[4:5])
    assert balance(await scene.state()) == (6, 4, 1, 1)
    parts.role.on_learner_down()
    await parts.push(6, version=1)
    assert balance(await scene.state()) == (7, 4, 2, 1)
    await parts.learner_ready(0, {})
    state = await scene.state()
    assert balance(state) == (7, 0, 7, 0)
    assert (state["learner"]["updates"], state["learner"]["published_versions"]) == (0, 2)


async def test_a_learner_counts_what_it_accepted_and_not_what_a_worker_claims(scene: Scene) -> None:
    await scene.parts.up()
    await scene.parts.push(1)
    scene.heard(WORKER, "worker", LEARNER.key, 0, accepted=1_000_000)
    assert (await scene.row("worker"))["accepted"] == 1


async def test_a_version_that_only_a_liar_knows_makes_nobody_lag(scene: Scene) -> None:
    await scene.parts.up(version=0)
    scene.heard(WORKER, "worker", LEARNER.key, 0)
    scene.heard(OTHER, "liar", LEARNER.key, MAX_VERSION)
    assert (await scene.row("worker"))["lag"] == 0
    assert (await scene.row("liar"))["lag"] == 0
    assert (await scene.state())["policy"]["swarm_version"] == 0


async def test_two_nodes_with_one_name_are_counted_apart(scene: Scene) -> None:
    await scene.parts.up()
    for identity in (WORKER, OTHER):
        scene.heard(identity, "twin", identity.key, 0)
        envelope = scene.parts.envelope(1, identity, policy=identity.key)
        assert await scene.parts.role.receive_external(envelope)
    names = scene.parts.store.store.waiting()
    await scene.parts.update(1, [group.id for group in names])
    counted = (await scene.state())["groups"]["external_consumed"]
    assert sorted(counted.values()) == [1, 1] and "twin" in counted


async def test_a_flood_of_identities_shows_the_live_and_connected_ones(scene: Scene) -> None:
    await scene.parts.up()
    for number in range(MAX_ROWS + 100):
        scene.heard(Identity.from_seed(number.to_bytes(32, "big")), f"a{number}", b"p" * 32, 0)
    scene.heard(WORKER, "z the worker", LEARNER.key, 0)
    scene.connected = {WORKER.key}
    rows = (await scene.state())["nodes"]
    assert len(rows) == MAX_ROWS + 1
    assert {"learner", "z the worker"} <= {row["name"] for row in rows}


async def test_a_silent_node_is_gone_and_its_rates_are_nothing(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    scene.heard(WORKER, "worker", LEARNER.key, 0, groups_per_min=5.0)
    row = await scene.row("worker")
    assert (row["state"], row["groups_per_min"]) == ("live", 5.0)
    await trio.sleep(11)
    row = await scene.row("worker")
    assert (row["state"], row["groups_per_min"]) == ("gone", 0.0)


async def test_a_learner_that_failed_says_why(scene: Scene) -> None:
    await scene.parts.up()
    scene.parts.role.on_learner_down("the disk is full")
    assert (await scene.state())["learner"]["state"] == "failed: the disk is full"

"""Finding the swarm and staying in it: dead seeds, restarts, peer exchange, liars, who sees whom."""

import json
import random
from pathlib import Path

import pytest
import trio

from peers.base import PeerId, PeerUnreachable
from peers.discovery import MAX_DIALS, Discovery
from peers.memory_transport import MemoryNetwork
from protocol.base import Message
from protocol.identity import NodeKey
from protocol.messages import Hello, PeerAddresses, PeersReply, Presence
from tests.swarm.small_swarm import SmallNode, connect, running, start, until


class Member(SmallNode):
    """A node with discovery. `addresses` is what it tells others of itself."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        *seeds: str,
        run_id: bytes = b"r" * 32,
        first_sequence: int = 0,
        target: int = 8,
        path: Path | None = None,
        role: str = "worker",
    ) -> None:
        super().__init__(network, number, run_id=run_id, first_sequence=first_sequence)
        self.addresses = [self.address]
        self.role = role
        self.discovery = Discovery(
            self.swarm,
            seeds=seeds,
            hello=lambda: Hello(**self._words()),
            presence=lambda: Presence(**self._words()),
            path=path,
            target_connections=target,
            rng=random.Random(number),
        )
        self.services.append(self.discovery.run)

    def _words(self) -> dict[str, object]:
        return {
            "name": self.identity.name,
            "role": self.role,
            "software": "test",
            "addresses": self.addresses,
        }

    def sees(self, *others: "Member") -> bool:
        """Connected to all of them, hello said."""
        return all(self.discovery.is_connected(other.key) for other in others)


def address_of(number: int) -> str:
    return SmallNode(MemoryNetwork(), number).address


async def test_a_dead_seed_does_not_block_the_living_one(autojump_clock: object) -> None:
    network = MemoryNetwork()
    seed = Member(network, 1)
    node = Member(network, 2, address_of(99), "/ip4/nonsense", seed.address)
    async with running(seed, node):
        with trio.fail_after(2):
            await node.discovery.wait_connected(seed.key)
        await trio.sleep(60)
        dead, malformed, living = node.discovery.seed_status()
        assert not dead.connected and dead.failures >= 3
        assert dead.last_error == f"nobody listens at {address_of(99)}; is the node running?"
        assert 0 < dead.next_try_in_s <= 30
        assert malformed.key is None and "expected /ip4/HOST" in malformed.last_error
        assert living.connected and living.last_error == ""


async def test_a_seed_that_comes_late_is_found(autojump_clock: object) -> None:
    network = MemoryNetwork()
    node, seed = Member(network, 1, address_of(2)), Member(network, 2)
    async with running(node) as nursery:
        await trio.sleep(3600)
        await start(nursery, seed)
        with trio.fail_after(31):
            await node.discovery.wait_connected(seed.key)
        await until(lambda: seed.sees(node), within_s=1)


async def test_a_node_is_found_through_a_seed_and_a_lost_connection_comes_back(
    autojump_clock: object,
) -> None:
    network = MemoryNetwork()
    seed = Member(network, 1)
    left, right = Member(network, 2, seed.address), Member(network, 3, seed.address)
    async with running(seed, left, right):
        await until(lambda: left.sees(seed, right) and right.sees(left), within_s=15)
        await left.transport.disconnect(right.peer)
        assert not left.sees(right)
        await until(lambda: left.sees(right) and right.sees(left), within_s=15)


async def test_without_the_seed_the_swarm_holds_together_and_takes_it_back(autojump_clock: object) -> None:
    network = MemoryNetwork()
    seed = Member(network, 1)
    nodes = [Member(network, number, seed.address) for number in range(2, 6)]
    async with running(seed, *nodes) as nursery:
        await until(lambda: all(node.sees(seed) for node in nodes))
        await seed.crash()
        await until(lambda: not any(node.sees(seed) for node in nodes))
        await until(lambda: all(a.sees(b) for a in nodes for b in nodes if a is not b))
        restarted = Member(network, 1, first_sequence=10_000)
        await start(nursery, restarted)
        await until(lambda: all(node.sees(restarted) and restarted.sees(node) for node in nodes), within_s=40)


async def test_every_node_gets_its_connections_without_a_storm_of_dials(autojump_clock: object) -> None:
    network = MemoryNetwork()
    seed = Member(network, 1, target=4)
    nodes = [seed, *(Member(network, number, seed.address, target=4) for number in range(2, 21))]
    dialing = {node.key: 0 for node in nodes}
    most = dict(dialing)

    def counted(node: Member) -> None:
        dial = node.transport.connect

        async def counting(address: str, timeout_s: float) -> PeerId:
            dialing[node.key] += 1
            most[node.key] = max(most[node.key], dialing[node.key])
            try:
                return await dial(address, timeout_s)
            finally:
                dialing[node.key] -= 1

        node.transport.connect = counting  # type: ignore[method-assign]

    for node in nodes:
        counted(node)
    async with running(*nodes):
        await until(lambda: all(len(node.discovery.connected()) >= 4 for node in nodes))
        await until(lambda: all(len(node.discovery.members()) == 19 for node in nodes))
        assert max(most.values()) <= MAX_DIALS
        assert all(not node.refusals for node in nodes)


async def test_a_learner_restarted_on_another_address_is_found_again(autojump_clock: object) -> None:
    network = MemoryNetwork()
    relay = Member(network, 1, role="relay")
    learner = Member(network, 2, relay.address, role="learner")
    worker = Member(network, 3, relay.address, target=1)
    id_part = learner.address[learner.address.index("/p2p/") :]
    old, new = "/memory/old" + id_part, "/memory/new" + id_part
    reachable = {old, relay.address, worker.address}

    def dialing_what_listens(node: Member) -> None:
        dial = node.transport.connect

        async def checked(address: str, timeout_s: float) -> PeerId:
            if address not in reachable:
                raise PeerUnreachable(f"nobody listens at {address}")
            return await dial(address, timeout_s)

        node.transport.connect = checked  # type: ignore[method-assign]

    for node in (relay, learner, worker):
        dialing_what_listens(node)
    learner.addresses = [old]
    worker.discovery.require(learner.key)
    async with running(relay, learner, worker) as nursery:
        await until(lambda: worker.sees(learner), within_s=20)
        await learner.crash()
        reachable.remove(old)
        await until(lambda: not worker.sees(learner))
        await trio.sleep(100)
        reachable.add(new)
        again = Member(network, 2, relay.address, role="learner", first_sequence=10_000)
        again.addresses = [new]
        dialing_what_listens(again)
        await start(nursery, again)
        await until(lambda: worker.sees(again), within_s=40)
        assert worker.discovery.book.addresses(again.peer) == [new]


async def test_a_node_of_another_run_is_not_a_connection(autojump_clock: object) -> None:
    network = MemoryNetwork()
    stranger = Member(network, 1, run_id=b"x" * 32)
    node = Member(network, 2, stranger.address)
    async with running(stranger, node):
        await trio.sleep(30)
        assert node.discovery.connected() == stranger.discovery.connected() == []
        assert node.discovery.members() == {}
        (status,) = node.discovery.seed_status()
        assert "it is a node of another run" in status.last_error


async def test_an_open_port_that_says_no_hello_is_not_a_connection(autojump_clock: object) -> None:
    network = MemoryNetwork()
    mute = SmallNode(network, 1)
    node = Member(network, 2, mute.address)
    async with running(mute, node):
        await trio.sleep(30)
        assert node.discovery.connected() == []
        assert "it refuses this node: wrong_kind" in node.discovery.seed_status()[0].last_error


async def test_a_connection_that_has_died_unnoticed_is_dropped(autojump_clock: object) -> None:
    network = MemoryNetwork(dead_after_s=1e6)
    seed = Member(network, 1)
    node = Member(network, 2, seed.address)
    async with running(seed, node):
        await node.discovery.wait_connected()
        network.partition({seed.peer}, {node.peer})
        await until(lambda: not node.sees(seed) and not seed.sees(node), within_s=90)
        await until(lambda: "does not say hello" in node.discovery.seed_status()[0].last_error, within_s=30)
        await until(lambda: "no answer from" in node.discovery.seed_status()[0].last_error, within_s=30)
        network.heal()
        await until(lambda: node.sees(seed) and seed.sees(node), within_s=60)


async def test_members_are_seen_from_both_sides_directly_or_by_gossip(autojump_clock: object) -> None:
    network = MemoryNetwork()
    middle = Member(network, 1, target=1)
    left = Member(network, 2, middle.address, target=1)
    right = Member(network, 3, middle.address, target=1)
    async with running(middle, left, right):
        await until(lambda: right.key in left.discovery.members() and left.key in right.discovery.members())
        seen = left.discovery.members()
        assert set(seen) == {middle.key, right.key}
        assert seen[middle.key].connected and seen[middle.key].direct
        assert not seen[right.key].connected and not seen[right.key].direct
        assert seen[right.key].hello.name == right.identity.name
        assert middle.discovery.members()[left.key].connected, "membership is mutual"
        await right.discovery.leave()
        await right.stop()
        await until(lambda: left.discovery.members()[right.key].left, within_s=5)
        await trio.sleep(60)
        gone = left.discovery.members()[right.key]
        assert trio.current_time() - gone.last_heard_s > 50


async def test_the_address_cache_finds_the_swarm_again_without_seeds(
    autojump_clock: object, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    path = tmp_path / "peers.json"
    seed, node = Member(network, 1), Member(network, 2, address_of(1), path=path)
    async with running(seed, node):
        await node.discovery.wait_connected()
        await node.stop()
    assert json.loads(path.read_text())["peers"] == {seed.key.hex(): [seed.address]}
    assert [file.name for file in tmp_path.iterdir()] == ["peers.json"]
    network = MemoryNetwork()
    seed, node = Member(network, 1), Member(network, 2, path=path)
    async with running(seed, node):
        with trio.fail_after(5):
            await node.discovery.wait_connected(seed.key)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"peers": 3}', '{"peers": {"zz": ["a"], "00": 7}}', "\udcff"]
)
async def test_a_broken_address_cache_is_replaced(
    autojump_clock: object, tmp_path: Path, content: str
) -> None:
    network = MemoryNetwork()
    path = tmp_path / "peers.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    seed, node = Member(network, 1), Member(network, 2, address_of(1), path=path)
    async with running(seed, node):
        await node.discovery.wait_connected()
        await node.stop()
    assert list(json.loads(path.read_text())["peers"]) == [seed.key.hex()]


async def test_lies_about_peers_do_no_harm(autojump_clock: object) -> None:
    network = MemoryNetwork()
    honest, liar = Member(network, 1), Member(network, 3)
    node = Member(network, 2, honest.address, liar.address)
    suffix = honest.address[honest.address.index("/p2p/") :]

    invented = [SmallNode(MemoryNetwork(), 1_000 + number) for number in range(25)]

    async def lie(sender: PeerId, message: Message) -> tuple[str, Message]:
        peers = [PeerAddresses(key=one.key, addresses=[one.address]) for one in invented]
        peers += [
            PeerAddresses(key=node.key, addresses=[node.address]),
            PeerAddresses(key=honest.key, addresses=["/memory/elsewhere" + suffix]),
            PeerAddresses(key=NodeKey(b"k" * 32), addresses=[honest.address, "not an address", "/p2p/x"]),
        ]
        return "peers_reply", PeersReply(peers=peers)

    liar.swarm.serve("peers_request", lie)
    async with running(honest, liar, node):
        await until(lambda: node.sees(honest, liar))
        await trio.sleep(60)
        assert node.sees(honest, liar)
        assert node.peer not in node.discovery.book.peers()
        assert PeerId(NodeKey(b"k" * 32)) not in node.discovery.book.peers()
        assert node.discovery.book.addresses(honest.peer) == [honest.address], "its own word stands"
        await connect(node, honest)

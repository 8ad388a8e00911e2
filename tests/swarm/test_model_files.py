"""A node without the model gets it from peers, weights included, and gives it on. Virtual time, in memory."""

from pathlib import Path

import pytest
import trio
import trio.testing

from peers.base import TransportError
from peers.chunk_exchange import TransferProgress
from peers.chunk_serving import ChunkServer
from peers.memory_transport import MemoryNetwork
from protocol.run_spec import Asset, BaseModelRef, WeightsFile
from swarmnode.runtime.joining import MODEL_SILENCE_S, fetch_model
from swarmnode.runtime.model_files import hash_chunks, model_matches
from swarmnode.runtime.version_store import VersionStore
from tests.swarm.small_swarm import RUN, SmallNode, connect, running
from tests.swarm.weight_scene import use_inline_threads

CHUNK = 1_000


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_inline_threads(monkeypatch)


def make_model(folder: Path) -> BaseModelRef:
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "merges.txt").touch()
    (folder / "model.safetensors").write_bytes(b"w" * 20_500)

    def chunks(name: str) -> list[bytes]:
        return hash_chunks(folder / name, CHUNK)

    return BaseModelRef(
        name="m",
        assets=[
            Asset(path="config.json", size_bytes=2, chunks=chunks("config.json")),
            Asset(path="merges.txt", size_bytes=0, chunks=[]),
        ],
        weights=[
            WeightsFile(path="model.safetensors", size_bytes=20_500, chunks=chunks("model.safetensors"))
        ],
        chunk_size=CHUNK,
    )


class ModelNode(SmallNode):
    def __init__(self, network: MemoryNetwork, number: int, folder: Path) -> None:
        super().__init__(network, number)
        self.folder = folder
        self.versions = VersionStore(folder / "policies", RUN)
        ChunkServer(self.swarm, self.versions.shelf)
        self.progress: list[tuple[str, int]] = []

    async def fetch(self, model: BaseModelRef, *sources: SmallNode) -> None:
        def note(name: str, progress: TransferProgress) -> None:
            self.progress.append((name, progress.done_bytes))

        peers = [source.peer for source in sources]
        await fetch_model(model, self.swarm, self.versions, lambda: peers, self.folder, on_progress=note)


async def test_a_model_comes_whole_from_peer_to_peer(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    model = make_model(tmp_path / "a")
    nodes = [ModelNode(network, number, tmp_path / name) for number, name in ((1, "a"), (2, "b"), (3, "c"))]
    source, second, third = nodes
    source.versions.add_model(source.folder, model)
    async with running(*nodes):
        await connect(second, source)
        await second.fetch(model, source)
        await connect(third, second)
        await third.fetch(model, second)
    for node in (second, third):
        assert model_matches(node.folder, model)
        assert (node.folder / "merges.txt").read_bytes() == b""
        assert node.progress[-1] == ("model.safetensors", 20_500)
        assert [done for _, done in node.progress[2:]] == sorted(done for _, done in node.progress[2:])


async def test_nothing_for_ten_minutes_ends_the_wait(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    model = make_model(tmp_path / "a")
    node = ModelNode(network, 2, tmp_path / "b")
    async with running(node):
        started = trio.current_time()
        with pytest.raises(TransportError, match="nothing came for 600 s"):
            await node.fetch(model)
        assert trio.current_time() - started == pytest.approx(MODEL_SILENCE_S, abs=1)

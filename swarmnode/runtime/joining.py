"""Coming into a run with an invite: the signed spec and the model's files, from whichever peer answers."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from peers.base import PeerId, TransportError
from peers.chunk_exchange import TransferFailed, TransferProgress
from peers.chunk_shelf import ChunkShelf
from peers.discovery import Discovery
from peers.swarm import Swarm
from protocol.base import Message
from protocol.invite import Invite, format_invite
from protocol.messages import RunSpecRequest, SignedReply
from protocol.refusals import Refused
from protocol.run_spec import Asset, BaseModelRef, RunSpec, WeightsFile
from swarmnode.runtime.download import download_file
from swarmnode.runtime.run_setup import open_spec
from swarmnode.runtime.version_store import VersionStore

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
MODEL_SILENCE_S = 600.0
"""Files of the model are waited for as long as something of them comes."""
MAX_INVITE_SEEDS = 6


def serve_spec(swarm: Swarm, spec_envelope: bytes) -> None:
    """Give the run's signed spec to whoever asks."""

    async def handle(sender: PeerId, message: Message) -> tuple[str, Message]:
        return "signed_reply", SignedReply(envelope=spec_envelope)

    swarm.serve("run_spec_request", handle)


async def fetch_spec(swarm: Swarm, discovery: Discovery, timeout_s: float) -> tuple[RunSpec, bytes]:
    """The run's spec and its envelope. Raises `TransportError` when no seed was reached in
    `timeout_s`."""
    with trio.move_on_after(timeout_s):
        while True:
            await discovery.wait_connected()
            for peer in discovery.connected():
                try:
                    reply = await swarm.call(
                        peer, RunSpecRequest(), timeout_s=CALL_TIMEOUT_S, expect=SignedReply
                    )
                    return open_spec(reply.envelope, swarm.run_id), reply.envelope
                except (TransportError, Refused) as error:
                    log.info("no run description from %s: %s", peer.hex()[:12], error)
            await trio.sleep(1.0)
    seeds = "; ".join(str(status) for status in discovery.seed_status())
    raise TransportError(
        f"could not reach the run in {timeout_s:.0f} s ({seeds}). Is a node of the run up there? "
        "Ask its owner for a new invite ('swarmnode invite')"
    )


async def fetch_model(
    model: BaseModelRef,
    swarm: Swarm,
    versions: VersionStore,
    providers: Callable[[], Sequence[PeerId]],
    folder: Path,
    on_progress: Callable[[str, TransferProgress], None],
) -> None:
    """Download the model's files into `folder`, and serve them from there; `on_progress` is told of each by
    its name.

    Raises `TransportError` when nothing came for `MODEL_SILENCE_S`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with trio.move_on_after(MODEL_SILENCE_S) as scope:

        def note(name: str, progress: TransferProgress) -> None:
            scope.deadline = trio.current_time() + MODEL_SILENCE_S
            on_progress(name, progress)

        for file in model.files:
            path = folder / file.path
            if not file.chunks:
                path.touch()
                continue
            await _fetch_file(model, file, swarm, versions.shelf, providers, path, partial(note, file.path))
            versions.add_file(path, file, model.chunk_size)
        return
    raise TransportError(
        f"of the files of model {model.name!r} nothing came for {MODEL_SILENCE_S:.0f} s; what is here stays: "
        "start again when a node of the run that has them can be reached"
    )


async def _fetch_file(
    model: BaseModelRef,
    file: Asset | WeightsFile,
    swarm: Swarm,
    shelf: ChunkShelf,
    providers: Callable[[], Sequence[PeerId]],
    path: Path,
    progress: Callable[[TransferProgress], None],
) -> None:
    done = -1

    def note(now: TransferProgress) -> None:
        # A try that brought nothing tells where the last one ended: that is no progress.
        nonlocal done
        if now.done_bytes > done:
            done = now.done_bytes
            progress(now)

    while True:
        try:
            await download_file(
                swarm,
                shelf,
                path,
                size_bytes=file.size_bytes,
                chunk_size=model.chunk_size,
                chunks=file.chunks,
                providers=providers,
                progress=note,
            )
            return
        except TransferFailed as error:
            log.warning("%s of the model is not to be had yet: %s", file.path, error)
            await trio.sleep(2.0)


def make_invite(swarm: Swarm, discovery: Discovery, network_key: bytes | None) -> str | None:
    """An invite seeded by this node's own addresses and those of the relays it knows; None without any."""
    seeds = list(swarm.transport.addresses)
    for member in discovery.members().values():
        if member.hello.role == "relay" and member.connected:
            seeds += member.hello.addresses
    seeds = list(dict.fromkeys(seeds))[:MAX_INVITE_SEEDS]
    if not seeds:
        return None
    return format_invite(Invite(run_id=swarm.run_id, seeds=seeds, network_key=network_key))

"""Coming into a run with an invite: the signed spec and the model's files, from whichever peer answers."""

import logging
from pathlib import Path

import trio

from peers.base import PeerId, TransportError
from peers.chunk_exchange import TransferFailed
from peers.chunk_serving import ChunkShelf
from peers.discovery import Discovery
from peers.swarm import Swarm
from protocol.base import Message
from protocol.invite import Invite, format_invite
from protocol.messages import RunSpecRequest, SignedReply
from protocol.refusals import Refused
from protocol.run_spec import Asset, RunSpec
from swarmnode.runtime.download import download_file
from swarmnode.runtime.run_setup import open_spec

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
ASSETS_TIMEOUT_S = 600.0
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


async def fetch_assets(
    spec: RunSpec, swarm: Swarm, shelf: ChunkShelf, discovery: Discovery, folder: Path
) -> None:
    """Download the model's small files into `folder`. Raises `TransportError` after `ASSETS_TIMEOUT_S`."""
    folder.mkdir(parents=True, exist_ok=True)
    with trio.move_on_after(ASSETS_TIMEOUT_S):
        for asset in spec.model.assets:
            path = folder / asset.path
            if not asset.chunks:
                path.touch()
                continue
            await _fetch_asset(spec, asset, swarm, shelf, discovery, path)
        return
    raise TransportError(f"the files of model {spec.model.name!r} did not come in {ASSETS_TIMEOUT_S:.0f} s")


async def _fetch_asset(
    spec: RunSpec, asset: Asset, swarm: Swarm, shelf: ChunkShelf, discovery: Discovery, path: Path
) -> None:
    while True:
        try:
            await download_file(
                swarm,
                shelf,
                path,
                size_bytes=asset.size_bytes,
                chunk_size=spec.model.chunk_size,
                chunks=asset.chunks,
                providers=discovery.connected,
            )
            return
        except TransferFailed as error:
            log.warning("%s of the model is not to be had yet: %s", asset.path, error)
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

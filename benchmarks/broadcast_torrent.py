"""BitTorrent as libtorrent does it, the best known swarm downloader: one seed, N leechers, all connected.

Set up as well as we could: no discovery (all are told all addresses), TCP only (its uTP would back off before
other traffic, and there is none), no rate limits, small pieces, fast choking rounds, super-seeding, by which
the seed gives each piece once. A super-seed says nothing in the first 11 s of a connection, so everybody
connects before the start, wanting no file yet, and the start is when they want it.
"""

import time
from typing import Any

import libtorrent as lt

from benchmarks.broadcast_system import SOURCE, Task, answer_check
from benchmarks.lab_process import Channel
from benchmarks.namespaces import LabError

PORT = 4003
PIECE_BYTES = 128 * 1024
CONNECT_TIMEOUT_S = 60.0

SETTINGS: dict[str, Any] = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "allow_multiple_connections_per_ip": True,
    "connection_speed": 500,
    "unchoke_slots_limit": 8,
    "unchoke_interval": 2,
    "optimistic_unchoke_interval": 4,
    "close_redundant_connections": False,
    "alert_mask": int(lt.alert.category_t.status_notification) | int(lt.alert.category_t.error_notification),
}
_NOT_WANTED, _WANTED = 0, 4


def run_torrent(channel: Channel, task: Task) -> None:
    """Work of a lab process: the seed or one leecher."""
    settings: Any = {**SETTINGS, "listen_interfaces": f"{task.address}:{PORT}"}
    session = lt.session(settings)
    parameters = lt.add_torrent_params()
    parameters.ti = _torrent(task)
    parameters.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    parameters.save_path = str(task.file.path.parent if task.is_source else task.directory)
    if task.is_source:
        parameters.flags |= lt.torrent_flags.seed_mode | lt.torrent_flags.super_seeding
    else:
        parameters.file_priorities = [_NOT_WANTED]
    handle = session.add_torrent(parameters)
    channel.send(address=task.address)
    addresses = channel.receive()["connect"]
    for address in addresses[: task.number]:
        handle.connect_peer((address, PORT))
    _wait_until_connected(handle, len(addresses) - 1, addresses[SOURCE])
    channel.send(connected=True)
    channel.receive()
    if not task.is_source:
        handle.prioritize_files([_WANTED])
        _wait_until_here(session, handle, task.file.size_bytes)
        channel.send(at=time.monotonic(), peers=len(handle.get_peer_info()))
    answer_check(channel, task.directory / task.file.path.name)


def _torrent(task: Task) -> Any:
    files = lt.file_storage()
    lt.add_files(files, str(task.file.path))
    creator = lt.create_torrent(files, PIECE_BYTES)
    lt.set_piece_hashes(creator, str(task.file.path.parent))
    return lt.torrent_info(creator.generate())


def _wait_until_connected(handle: Any, peers: int, source: str) -> None:
    """Until all are connected and the seed has shown leechers a first piece. No alert tells of that."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        found = [peer for peer in handle.get_peer_info() if not peer.flags & peer.handshake]
        waiting = [peer for peer in found if peer.ip[0] == source and not any(peer.pieces)]
        if len(found) == peers and not waiting:
            return
        time.sleep(0.1)
    raise LabError(f"{len(found)} of {peers} peers connected within {CONNECT_TIMEOUT_S:g} s")


def _wait_until_here(session: Any, handle: Any, size_bytes: int) -> None:
    while handle.status().total_wanted_done < size_bytes:
        session.wait_for_alert(100)
        session.pop_alerts()

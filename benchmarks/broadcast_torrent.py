"""BitTorrent as libtorrent does it, the best known swarm downloader: one seed, N leechers, all connected.

Set up for this: no discovery (all are told all addresses), TCP only (its uTP would back off before other
traffic, and there is none), no rate limits, fast choking rounds, and super-seeding, with which the seed sends
each piece once.
"""

import time
from typing import Any

import libtorrent as lt

from benchmarks.broadcast_system import Task, answer_check
from benchmarks.lab_process import Channel

PORT = 4003
PIECE_BYTES = 256 * 1024

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
    "no_recheck_incomplete_resume": True,
    "alert_mask": int(lt.alert.category_t.status_notification) | int(lt.alert.category_t.error_notification),
}


def run_torrent(channel: Channel, task: Task) -> None:
    """Work of a lab process: the seed or one leecher."""
    settings = {**SETTINGS, "listen_interfaces": f"{task.address}:{PORT}"}
    session = lt.session(settings)
    parameters = lt.add_torrent_params()
    parameters.ti = _torrent(task)
    parameters.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    parameters.save_path = str(task.file.path.parent if task.is_source else task.directory)
    if task.is_source:
        parameters.flags |= lt.torrent_flags.seed_mode | lt.torrent_flags.super_seeding
    else:
        parameters.flags |= lt.torrent_flags.paused  # until the start
    handle = session.add_torrent(parameters)
    channel.send(address=task.address)
    addresses = channel.receive()["connect"]
    channel.send(connected=True)
    channel.receive()
    if not task.is_source:
        handle.resume()
        for address in addresses:
            if address != task.address:
                handle.connect_peer((address, PORT))
        _wait_until_seeding(session, handle)
        channel.send(at=time.monotonic(), peers=len(handle.get_peer_info()))
    answer_check(channel, task.directory / task.file.path.name)


def _torrent(task: Task) -> Any:
    files = lt.file_storage()
    lt.add_files(files, str(task.file.path))
    creator = lt.create_torrent(files, PIECE_BYTES)
    lt.set_piece_hashes(creator, str(task.file.path.parent))
    return lt.torrent_info(creator.generate())


def _wait_until_seeding(session: Any, handle: Any) -> None:
    while not handle.status().is_seeding:
        session.wait_for_alert(100)
        session.pop_alerts()

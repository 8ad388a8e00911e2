"""The compared systems really give the file to everybody through the laboratory's links."""

import pytest

from benchmarks.broadcast_http import run_http
from benchmarks.broadcast_swarmnode import run_node
from benchmarks.broadcast_system import broadcast, make_file
from benchmarks.lab_process import Work
from benchmarks.netlab import Lab, Link, why_not

reason = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(reason is not None, reason=f"no network laboratory here: {reason}"),
]

SIZE_BYTES = 1_500_000
CHUNK_SIZE = 256 * 1024


def torrent() -> Work:
    pytest.importorskip("libtorrent", reason="libtorrent is of the 'bench' extra")
    from benchmarks.broadcast_torrent import run_torrent

    return run_torrent


def give(work: Work, faults: dict[int, str]) -> None:
    with Lab([Link(100, 200)] * 5) as lab:
        file = make_file(lab.directory / "file", SIZE_BYTES, CHUNK_SIZE)
        outcome = broadcast(lab, "test", work, file, faults=faults, kill_after_s=0.05, timeout_s=90)
    killed = {number for number, fault in faults.items() if fault == "killed"}
    assert outcome.bit_exact
    assert set(outcome.seconds) == {1, 2, 3, 4} - killed
    assert all(0 < seconds <= outcome.last_s for seconds in outcome.seconds.values())
    assert outcome.source_sent_bytes >= SIZE_BYTES


def test_this_project_gives_a_file_to_all_though_one_lies_and_one_dies() -> None:
    give(run_node, {2: "corrupt", 3: "killed"})


def test_plain_http_gives_a_file_to_all() -> None:
    give(run_http, {})


def test_bittorrent_gives_a_file_to_all() -> None:
    give(torrent(), {})

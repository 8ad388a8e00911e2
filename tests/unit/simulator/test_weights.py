"""How versions reach simulated workers."""

import random

import pytest

from swarmnode.simulator.population import Machine, draw_machines
from swarmnode.simulator.scenario import WeightsSection, parse_scenario
from swarmnode.simulator.weights import Weights, WorkerWeights

SECTION = WeightsSection(delta_mb=10, snapshot_mb=100, source_upload_mbps=1e6, load_s=1.0, overhead=1.0)


def machine() -> Machine:
    """100 Mbit/s down: a delta takes 0.8 s, a snapshot 8 s."""
    node = {"name": "w", "count": 1, "download_mbps": 100, "upload_mbps": 100, "round_trip_ms": 0}
    scenario = parse_scenario({"name": "x", "nodes": [node]}, "here")
    return draw_machines(scenario, random.Random(0))[0]


def test_a_cold_worker_fetches_a_snapshot_and_then_deltas() -> None:
    weights, worker, one = Weights(SECTION), WorkerWeights(), machine()
    weights.publish(0, 0.0)
    weights.follow(one, worker, 5.0, follows=True)
    assert worker.version is None and worker.ready_s == pytest.approx(5 + 8 + 1)
    weights.publish(2, 20.0)
    weights.advance(one, worker, 21.0)
    assert worker.version == 0 and worker.ready_s == pytest.approx(20 + 0.8 + 1)
    weights.advance(one, worker, 22.0)
    assert worker.version == 2
    # Only what it fetched as a follower says how long a broadcast takes.
    assert [seconds for _, seconds in weights.broadcast_log] == [pytest.approx(1.8)]
    assert weights.sent_bytes == pytest.approx(110e6)


def test_a_worker_that_is_late_skips_to_the_newest_and_pays_for_what_it_missed() -> None:
    weights, worker, one = Weights(SECTION), WorkerWeights(), machine()
    weights.publish(0, 0.0)
    weights.follow(one, worker, 0.0, follows=True)
    for version in range(1, 6):
        weights.publish(version, 4.0 + version)
    # Busy with the snapshot until 9 s; then version 5, of 9 s, is the newest: five deltas.
    weights.advance(one, worker, 100.0)
    assert worker.version == 5
    assert weights.sent_bytes == pytest.approx(150e6)
    assert worker.free_at_s == pytest.approx(9 + 4 + 1)
    assert worker.paused_s == pytest.approx(9 + 5)


def test_time_stood_still_counts_the_fetch_under_way() -> None:
    weights, worker, one = Weights(SECTION), WorkerWeights(), machine()
    weights.publish(0, 0.0)
    weights.follow(one, worker, 0.0, follows=True)
    assert worker.fetching_for_s(4.0) == pytest.approx(4.0)
    weights.advance(one, worker, 50.0)
    assert worker.fetching_for_s(50.0) == pytest.approx(9.0)


def test_who_does_not_follow_fetches_nothing_and_who_is_lost_has_nothing() -> None:
    weights, worker, one = Weights(SECTION), WorkerWeights(), machine()
    weights.publish(0, 0.0)
    weights.follow(one, worker, 0.0, follows=True)
    assert weights.receivers == 1 and weights.serving_mbps == pytest.approx(100)
    weights.follow(one, worker, 10.0, follows=False)
    weights.publish(1, 11.0)
    weights.advance(one, worker, 100.0)
    assert worker.version == 0 and weights.receivers == 0
    weights.lose(one, worker, 100.0)
    assert worker.version is None


def test_many_receivers_share_all_uplinks() -> None:
    section = SECTION.model_copy(update={"source_upload_mbps": 10.0, "load_s": 0.0})
    weights, one = Weights(section), machine()
    for _ in range(9):
        weights.follow(one, WorkerWeights(), 0.0, follows=True)
    weights.publish(0, 0.0)
    worker = WorkerWeights()
    weights.follow(one, worker, 0.0, follows=True)
    # 800 Mbit: 80 s from the source at 10 Mbit/s are more than 9 · 800 / (10 + 9 · 100).
    assert worker.ready_s == pytest.approx(80.0)

"""The journal: bounded whatever happens, and readable whatever became of its file."""

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.identity import Identity
from protocol.messages import PolicyProgress, Presence
from swarmnode.runtime import events
from swarmnode.runtime.curves import CurvesOfOthers
from swarmnode.runtime.events import (
    MAX_EVENTS,
    MAX_OTHERS,
    MAX_POINTS,
    MAX_POINTS_OF_OTHERS,
    Journal,
)


def test_events_are_bounded_and_the_same_text_twice_is_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for number in range(MAX_EVENTS + 50):
        journal.event("info", f"event {number}")
        journal.event("info", f"event {number}")
    assert [event["text"] for event in journal.events] == [f"event {n}" for n in range(50, MAX_EVENTS + 50)]


def test_a_flood_of_one_kind_leaves_the_others_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.event("info", "something important")
    for number in range(1000):
        journal.event("warning", f"refused number {number}", "refused malformed")
    now[0] += 5
    journal.event("warning", "refused once more", "refused malformed")
    assert [event["text"] for event in journal.events] == [
        "something important",
        "refused number 0",
        "refused once more (and 999 more like it)",
    ]


def test_a_long_run_stays_visible_from_its_beginning(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for version in range(5 * MAX_POINTS):
        journal.point("reward", "me", version, 0.5)
    versions = [point["version"] for point in journal.series["reward"]]
    assert len(versions) <= MAX_POINTS
    assert versions == sorted(versions) and versions[0] == 0 and versions[-1] == 5 * MAX_POINTS - 1


def test_points_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.point("reward", "me", 1, 0.25)
    journal.point("accuracy", "me", 1, float("nan"))
    journal.point("accuracy", "me", 2, 0.75)
    journal.write_now()
    journal.write_now()
    again = Journal(path)
    again.load()
    assert again.series == journal.series
    last = again.last_own("accuracy")
    assert last is not None and (last["version"], last["value"]) == (2, 0.75)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"metric": "reward", "t": 3.0, "ver',
        b"\xff\xfe\0garbage\n",
        b"17\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b'{"metric": "spying", "t": 1.0, "version": 1, "value": 1.0, "policy": "me"}\n',
        b'{"metric": "reward", "t": 1.0, "version": 1, "value": "high", "policy": "me"}\n',
        b'{"metric": "reward", "t": 1.0, "version": 1, "value": NaN, "policy": "me"}\n',
    ],
)
def test_a_damaged_line_costs_itself_only(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    sound = json.dumps({"metric": "reward", "t": 1.0, "version": 1, "value": 0.5, "policy": "me"}) + "\n"
    path.write_bytes(sound.encode() + damage)
    journal = Journal(path)
    journal.load()
    journal.point("reward", "me", 2, 0.6)
    journal.write_now()
    again = Journal(path)
    again.load()
    assert [point["version"] for point in again.series["reward"]] == [1, 2]
    assert b"spying" not in path.read_bytes()


def test_a_file_that_grew_for_months_is_thinned_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_FILE_LINES", 2 * MAX_POINTS)
    path = tmp_path / "metrics.jsonl"
    line = '{{"metric": "reward", "t": 1.0, "version": {}, "value": 0.5, "policy": "me"}}\n'
    path.write_text("".join(line.format(version) for version in range(3 * MAX_POINTS)))
    journal = Journal(path)
    journal.load()
    assert len(journal.series["reward"]) <= MAX_POINTS
    assert len(path.read_text().splitlines()) <= MAX_POINTS


def test_an_unwritable_file_costs_nothing_but_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "no such folder" / "metrics.jsonl")
    journal.load()
    journal.point("reward", "me", 1, 0.5)
    journal.write_now()
    assert len(journal.series["reward"]) == 1


async def test_the_service_writes_what_is_new(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    nursery.start_soon(journal.write)
    journal.point("reward", "me", 1, 0.5)
    with trio.fail_after(30):
        while not path.exists() or not path.read_text():
            await trio.sleep(0.05)


# Other nodes' curves


def presence(author: bytes, name: str, version: int, reward: float | None = 0.5) -> Presence:
    return Presence(
        name=name,
        role="peer",
        software="x",
        policies=[PolicyProgress(policy=author, version=version)],
        reward=reward,
    )


async def test_any_number_of_nodes_that_claim_anything_is_bounded(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    curves = CurvesOfOthers(journal, "me", lambda author: True, lambda author: "me")
    authors = [bytes(Identity.from_seed(bytes([n]) * 32).key) for n in range(MAX_OTHERS + 5)]
    for version in range(2 * MAX_POINTS_OF_OTHERS):
        await trio.sleep(2)
        for author in authors:
            curves.heard(author, presence(author, "me", version))
            curves.heard(author, presence(author, "me", version + 1))
    points = journal.series["reward"]
    assert len(points) <= MAX_OTHERS * MAX_POINTS_OF_OTHERS
    assert len({point["policy"] for point in points}) == MAX_OTHERS
    assert "me" not in {point["policy"] for point in points}, "nobody draws in this node's own curve"


async def test_only_nodes_of_interest_are_plotted_and_a_point_per_version(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    curves = CurvesOfOthers(journal, "me", lambda author: author == b"a" * 32, lambda author: "other")
    for author in (b"a" * 32, b"b" * 32):
        curves.heard(author, presence(author, "x", 3))
        curves.heard(author, presence(author, "x", 4, reward=None))
    assert [(point["policy"], point["version"]) for point in journal.series["reward"]] == [("other", 3)]

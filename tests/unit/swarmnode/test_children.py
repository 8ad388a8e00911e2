"""Supervision of real child processes that crash, hang, flood, fail and say nonsense."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from swarmnode.runtime import children
from swarmnode.runtime.children import ChildGone, ChildProcess

WAIT_S = 30.0


class Parent:
    """The node's side: what the child said and what was told about it."""

    def __init__(self, tmp_path: Path, what: str) -> None:
        self.states: list[str] = []
        self.texts: list[str] = []
        self.messages: list[dict[str, Any]] = []
        self.changed = trio.Event()
        self.lives = 0
        self.handle: Callable[[dict[str, Any]], None] = lambda message: None
        self.child = ChildProcess(
            "tiny",
            "tests.unit.swarmnode.tiny_child",
            configure=lambda: self._configuration(what),
            on_message=self._on_message,
            on_state=self._on_state,
            log_path=tmp_path / "tiny.log",
        )

    def _configuration(self, what: str) -> dict[str, Any]:
        self.lives += 1
        return {"type": "configure", "what": what, "again": self.lives > 1}

    def _on_state(self, state: str, text: str) -> None:
        self.states.append(state)
        self.texts.append(text)
        self._change()

    async def _on_message(self, message: dict[str, Any]) -> None:
        self.handle(message)
        self.messages.append(message)
        self._change()

    def _change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(WAIT_S):
            while not condition():
                await self.changed.wait()

    async def until_states(self, *states: str) -> None:
        await self.until(lambda: self.states[: len(states)] == list(states))

    async def echo(self) -> int:
        """Send something and wait for the answer; the child's process id."""
        count = len(self.messages)
        self.child.send({"type": "echo"})
        await self.until(lambda: len(self.messages) > count)
        return int(self.messages[-1]["pid"])


@asynccontextmanager
async def running(parent: Parent) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent.child.run)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(children, "FIRST_BACK_OFF_S", 0.05)
    monkeypatch.setattr(children, "AFTER_FAILURE_S", 0.05)
    monkeypatch.setattr(children, "END_TIMEOUT_S", 0.5)


async def test_a_killed_child_is_restarted_and_works_again(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "echo")
    async with running(parent):
        await parent.until_states("running")
        first = await parent.echo()
        os.kill(first, signal.SIGKILL)
        await parent.until_states("running", "restarting", "running")
        assert await parent.echo() != first
        assert "was killed" in parent.texts[1]
    assert parent.child.pid is None
    with pytest.raises(ChildGone):
        parent.child.send({"type": "echo"})


async def test_a_child_that_never_gets_ready_is_given_up_with_its_reason(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "crash")
    with trio.fail_after(WAIT_S):
        await parent.child.run()
    assert parent.states == ["restarting"] * 4 + ["failed"]
    assert parent.child.failure is not None
    assert "ended with exit code 3, 5 times before it was ready; its log is " in parent.child.failure


async def test_a_reason_given_before_it_was_ready_is_final_at_once(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "fail")
    with trio.fail_after(WAIT_S):
        await parent.child.run()
    assert (parent.states, parent.texts) == (["failed"], ["no such model: choose another"])


async def test_what_failed_after_it_was_ready_is_tried_again(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "fail once ready")
    async with running(parent):
        await parent.until_states("running", "failed", "running")
        assert parent.texts[1].startswith("the disk is full")
        await parent.echo()


async def test_a_hang_before_ready_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "READY_TIMEOUT_S", 0.3)
    parent = Parent(tmp_path, "hang before ready")
    async with running(parent):
        await parent.until_states("restarting")
        assert "was not ready within" in parent.texts[0]


@pytest.mark.parametrize(
    ("what", "saying"),
    [
        ("garbage", "sent a message that cannot be read"),
        ("endless frame", "sent a frame of 4294967295 bytes"),
        ("hang up", "closed its channel and did not end"),
    ],
)
async def test_a_child_that_speaks_nonsense_or_hangs_up_is_replaced(
    tmp_path: Path, what: str, saying: str
) -> None:
    parent = Parent(tmp_path, what)
    async with running(parent):
        await parent.until_states("running", "restarting")
        assert saying in parent.texts[1]


async def test_a_child_that_hangs_amid_its_work_can_be_ended(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "echo")
    async with running(parent):
        await parent.until_states("running")
        os.kill(await parent.echo(), signal.SIGSTOP)
        parent.child.end("it answered nothing for 180 s")
        await parent.until_states("running", "restarting", "running")
        assert "was ended: it answered nothing for 180 s" in parent.texts[1]


async def test_a_flood_arrives_whole_and_in_order(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "flood")
    async with running(parent):
        await parent.until(lambda: len(parent.messages) == 3001)
    assert [message["number"] for message in parent.messages[1:]] == list(range(3000))


async def test_a_fault_of_the_node_is_raised_and_its_users_hear_that_the_child_is_down(
    tmp_path: Path,
) -> None:
    parent = Parent(tmp_path, "echo")

    def handle(message: dict[str, Any]) -> None:
        if message["type"] == "echo":
            raise RuntimeError("the ledger's disk is full")

    parent.handle = handle
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            await parent.until_states("running")
            parent.child.send({"type": "echo"})

        nursery.start_soon(ask)
        with pytest.raises(RuntimeError, match="disk is full"), trio.fail_after(WAIT_S):
            await parent.child.run()
    assert parent.states == ["running", "restarting"]
    assert parent.child.pid is None


async def test_stopping_ends_every_kind_of_child_quickly(tmp_path: Path) -> None:
    for what in ("echo", "ignore stop", "hang before ready"):
        parent = Parent(tmp_path, what)
        async with running(parent):
            if what == "hang before ready":
                await trio.testing.wait_all_tasks_blocked(0.05)
            else:
                await parent.until_states("running")
            pid = parent.child.pid
            with trio.fail_after(5):
                await parent.child.stop(grace_s=0.3)
        assert pid is not None and not psutil.pid_exists(pid)
        assert "restarting" not in parent.states


async def test_nobody_waits_for_room_in_the_queue_of_a_dead_child(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "echo")
    async with running(parent):
        await parent.until_states("running")
        pid = await parent.echo()
        os.kill(pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:

            async def end_later() -> None:
                await trio.testing.wait_all_tasks_blocked(0.1)
                parent.child.end("it hangs")

            nursery.start_soon(end_later)
            with pytest.raises(ChildGone), trio.fail_after(WAIT_S):
                for _ in range(children.MAX_QUEUED_MESSAGES + 100):
                    await parent.child.deliver({"type": "echo", "padding": b"x" * 10_000})
        await parent.until_states("running", "restarting")


async def test_nothing_leaks_when_a_child_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children.sys, "executable", str(tmp_path / "no such program"))
    parent = Parent(tmp_path, "echo")
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await parent.child.run()
    assert psutil.Process().num_fds() == before


async def test_a_log_is_cut_before_it_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(children, "LOOK_AT_LOG_S", 0.05)
    parent = Parent(tmp_path, "log")
    async with running(parent):
        with trio.fail_after(WAIT_S):
            while not (tmp_path / "tiny.log.1").exists() or (tmp_path / "tiny.log").stat().st_size:
                await trio.sleep(0.05)
    assert (tmp_path / "tiny.log.1").stat().st_size == 4097

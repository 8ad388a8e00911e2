"""The reading thread of a child: what a stop and the end of the node lead to."""

import queue
import socket
import threading

import pytest

from swarmnode.processes import inbox as inbox_module
from swarmnode.processes.channel import Channel
from swarmnode.processes.inbox import Inbox, Stopped

WAIT_S = 20.0


class Pair:
    """Both ends of a channel, and the exit codes that the child's end was told to end with."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.node = Channel(self.ours)
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.inbox = Inbox(Channel(theirs), end_process=self.ended.put)
        self.inbox.start()


def test_messages_come_in_order_and_none_when_there_is_none() -> None:
    pair = Pair()
    assert pair.inbox.receive(0) is None
    assert pair.inbox.receive(0.01) is None
    for number in range(3):
        pair.node.send({"type": "count", "number": number})
    assert [pair.inbox.receive(WAIT_S)["number"] for _ in range(3)] == [0, 1, 2]


def test_a_stop_overtakes_what_is_still_queued() -> None:
    pair = Pair()
    pair.node.send({"type": "work"})
    assert pair.inbox.receive(WAIT_S) == {"type": "work"}
    pair.node.send({"type": "work"})
    pair.node.send({"type": "stop"})
    with pytest.raises(Stopped):
        while True:
            pair.inbox.receive(WAIT_S)
    with pytest.raises(Stopped):
        pair.inbox.receive(0)


def test_a_stop_wakes_a_waiting_receive() -> None:
    pair = Pair()
    timer = threading.Timer(0.05, pair.inbox.stop)
    timer.start()
    with pytest.raises(Stopped):
        pair.inbox.receive(None)


def test_work_that_outlasts_the_grace_is_dropped_with_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "STOP_GRACE_S", 0.01)
    pair = Pair()
    pair.node.send({"type": "stop"})
    assert pair.ended.get(timeout=WAIT_S) == 0


def test_the_end_of_the_node_ends_the_process_at_once() -> None:
    pair = Pair()
    pair.ours.close()
    assert pair.ended.get(timeout=WAIT_S) == 1

"""What a child receives, read by a thread of its own: a stop or the node's death is noticed amid work."""

import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

from swarmnode.processes.channel import Channel, ChannelClosed

INBOX_BOUND = 4096
"""Messages read ahead of the main thread; beyond that the node waits."""

STOP_GRACE_S = 4.5
"""How long the thing in hand may take after a stop. The node kills its children after 5 s."""


class Stopped(Exception):
    """The node asked for an end, and nothing is in hand."""


class Inbox:
    """Messages in order, until a stop: `receive` then raises `Stopped`.

    A main thread that does not ask within `STOP_GRACE_S` is ended with code 0. When the node is gone the
    process ends at once: nobody is left to tell.
    """

    def __init__(self, channel: Channel, end_process: Callable[[int], None] = os._exit) -> None:
        """`end_process` takes an exit code and does not return; tests put something milder there."""
        self._channel = channel
        self._end_process = end_process
        self._messages: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(INBOX_BOUND)
        self._stopping = False

    def start(self) -> None:
        """Read from now on."""
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take_signals(self) -> None:
        """Interrupts are left to the node, a termination is a stop. Main thread only."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())

    def stop(self) -> None:
        """Ask for an end; may be called from any thread and from a signal handler."""
        if self._stopping:
            return
        self._stopping = True
        self._messages.put(None)  # wakes a waiting `receive`
        deadline = threading.Timer(STOP_GRACE_S, self._end_process, args=(0,))
        deadline.daemon = True
        deadline.start()

    def stopping(self) -> bool:
        """Whether an end was asked for; to look at in the middle of long work."""
        return self._stopping

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, None when none came in time (None waits for ever; 0 polls). Raises `Stopped`."""
        if self._stopping:
            raise Stopped
        try:
            if timeout_s == 0:
                message = self._messages.get_nowait()
            else:
                message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            raise Stopped
        if isinstance(message, Exception):
            raise message
        self._room.release()
        return message

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive(None)
                if message is None:
                    continue
                if message["type"] == "stop":
                    self.stop()
                    return
                self._room.acquire()
                self._messages.put(message)
        except ChannelClosed:
            self._end_process(1)
        except Exception as error:
            self._messages.put(error)  # the main thread reports it

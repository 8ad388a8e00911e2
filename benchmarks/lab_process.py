"""Processes of the laboratory: forked from one that has imported everything, each in its own namespace.

Parent and child talk in lines of JSON. A child dies with its parent; its standard error is kept for messages.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.namespaces import LabError, enter

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChannelClosed(LabError):
    """The other side is gone."""


class Channel:
    """One end of a pair that carries JSON objects both ways."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._received = b""

    def send(self, **message: Any) -> None:
        """Say something. Raises `ChannelClosed`."""
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed("the process at the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises `ChannelClosed`, `TimeoutError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if deadline is not None:
                ready, _, _ = select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"nothing was said for {timeout_s:g} s")
            data = self._end.recv(65536)
            if not data:
                raise ChannelClosed("the process at the other end is gone")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._end.close()


Work = Callable[..., None]
"""What a child does: called with its `Channel` and what else it was started with."""


class LabProcess:
    """A forked child. `namespace` None leaves it where the parent is."""

    def __init__(self, name: str, namespace: str | None, log: Path, work: Work, *arguments: Any) -> None:
        self.name = name
        self.cpu_s = 0.0
        """User and system time, known once it has ended."""
        self._log = log
        self._ended = False
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _be_child(parent, namespace, log, work, Channel(theirs), arguments)
        theirs.close()
        self.channel = Channel(ours)

    def send(self, **message: Any) -> None:
        self.channel.send(**message)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The child's next message. Raises `LabError` with the end of its log when there is none."""
        try:
            return self.channel.receive(timeout_s)
        except (ChannelClosed, TimeoutError) as error:
            raise LabError(f"{self.name}: {error}{self._end_of_log()}") from error

    def wait(self, timeout_s: float = 10.0) -> None:
        """Let it end by itself; kill it if it does not."""
        deadline = time.monotonic() + timeout_s
        while not self._reap(os.WNOHANG) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def terminate(self) -> None:
        """SIGTERM, and time to end in order; whatever it says meanwhile is lost."""
        if not self._ended:
            os.kill(self.pid, signal.SIGTERM)
            self.wait()

    def kill(self) -> None:
        """SIGKILL, as a lost machine."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        self.channel.close()

    def _reap(self, options: int) -> bool:
        if not self._ended:
            pid, _, usage = os.wait4(self.pid, options)
            if pid:
                self._ended = True
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self._ended

    def _end_of_log(self) -> str:
        try:
            text = self._log.read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""
        return f"; the end of its log:\n{text}" if text else ""


def _be_child(
    parent: int, namespace: str | None, log: Path, work: Work, channel: Channel, arguments: tuple[Any, ...]
) -> None:
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its children in order
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # Whatever the parent has put in their place is the parent's.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        if namespace is not None:
            enter(namespace)
        work(channel, *arguments)
        status = 0
    except ChannelClosed:
        pass
    except (
        BaseException
    ):  # whatever it is, it belongs into the log, and the child must not run the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

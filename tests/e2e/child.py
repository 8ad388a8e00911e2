"""A child process of a node, driven as the node drives it: over a socket pair, with framed messages."""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from swarmnode.processes.channel import CHANNEL_VARIABLE, Channel

WAIT_S = 100.0


class Child:
    """One module run as a child. Use as a context manager: it is killed at the end if it is still there."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self.channel = Channel(self._socket)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            pass_fds=[theirs.fileno()],
            env={**os.environ, CHANNEL_VARIABLE: str(theirs.fileno()), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send({"type": kind, **fields})

    def receive(self) -> dict[str, Any]:
        message = self.channel.receive(WAIT_S)
        assert message is not None, f"nothing within {WAIT_S} s"
        return message

    def expect(self, kind: str) -> dict[str, Any]:
        message = self.receive()
        assert message["type"] == kind, message
        return message

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """What the child sees when its node dies."""
        self._socket.close()

    def exit_code(self) -> int:
        """Of a child that ends by itself."""
        return self.process.wait(WAIT_S)

    def is_running(self, for_s: float) -> bool:
        """Whether the child is still there after `for_s`."""
        time.sleep(for_s)
        return self.process.poll() is None

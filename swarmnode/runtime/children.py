"""A child process of the node and its supervision: spawned with a socket, restarted with back-off when it
dies."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from swarmnode.processes.channel import CHANNEL_VARIABLE, HEADER, MAX_FRAME_BYTES, pack_frame, unpack_body

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
STABLE_AFTER_S = 60.0
LONGEST_BACK_OFF_S = 30.0
MAX_QUEUED_MESSAGES = 4096


class ChildGone(Exception):
    """The child ended or is not running; the message names it and its exit code."""


class ChildFailed(Exception):
    """The child said why it cannot go on; restarting would not help until a person acts."""


class ChildProcess:
    """One supervised child.

    `run` keeps it alive: it spawns the module, sends `configure()`'s message, and hands every message of
    the child to
    `on_message`. When the child dies it is spawned again after 1, 2, 4 … 30 seconds; `on_state` is told
    ("running",
    "restarting", "failed") with one line of text. A message sent while the child is down raises `ChildGone`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        configure: Callable[[], dict[str, Any]],
        on_message: Callable[[dict[str, Any]], Awaitable[None]],
        on_state: Callable[[str, str], None],
        log_path: Path,
        threads: int = 1,
    ) -> None:
        self.name = name
        self._module = module
        self._configure = configure
        self._on_message = on_message
        self._on_state = on_state
        self._log_path = log_path
        self._threads = threads
        self._outgoing: trio.MemorySendChannel[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return None if self._process is None else self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. Raises `ChildGone` when the child is down or hopelessly behind."""
        if self._outgoing is None:
            raise ChildGone(f"the {self.name} process is not running")
        try:
            self._outgoing.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ChildGone(f"the {self.name} process does not take messages") from error

    async def run(self) -> None:
        """Keep the child alive until cancelled or until it fails for good (`failure` says why)."""
        delay = 1.0
        while not self._stopping:
            started = trio.current_time()
            code = await self._run_once()
            if self._stopping:
                return
            if self.failure is not None:
                self._on_state("failed", self.failure)
                return
            if trio.current_time() - started > STABLE_AFTER_S:
                delay = 1.0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            hint = " (killed, perhaps for want of memory)" if code == -signal.SIGKILL else ""
            self._on_state(
                "restarting",
                f"the {self.name} process ended with {how}{hint}; starting it again in {delay:.0f} s, "
                f"its log is {self._log_path}",
            )
            await trio.sleep(delay)
            delay = min(delay * 2, LONGEST_BACK_OFF_S)

    async def stop(self) -> None:
        """Ask the child to finish what it has in hand; kill it after `STOP_GRACE_S`."""
        self._stopping = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            self.send({"type": "stop"})
        except ChildGone:
            process.terminate()
        with trio.move_on_after(STOP_GRACE_S):
            while process.poll() is None:
                await trio.sleep(0.02)
        if process.poll() is None:
            log.warning("the %s process did not stop within %.0f s: killed", self.name, STOP_GRACE_S)
            process.kill()

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        environment[CHANNEL_VARIABLE] = str(theirs.fileno())
        environment["OMP_NUM_THREADS"] = str(self._threads)
        environment["TOKENIZERS_PARALLELISM"] = "false"
        environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
        with open(self._log_path, "ab") as child_log:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.DEVNULL,
                stdout=child_log,
                stderr=child_log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self._process = process
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        send_channel, receive_channel = trio.open_memory_channel[dict[str, Any]](MAX_QUEUED_MESSAGES)
        self._outgoing = send_channel
        try:
            self.send(self._configure())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, receive_channel)
                await self._read(stream)
                nursery.cancel_scope.cancel()
            return await self._wait(process)
        finally:
            self._outgoing = None
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
                if process.poll() is None:
                    # The closed channel tells the child to go; a stuck one is not waited for.
                    with trio.move_on_after(1.0):
                        await self._wait(process)
                if process.poll() is None:
                    process.kill()
                    process.wait()

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while process.poll() is None:
            await trio.sleep(0.02)
        return process.returncode

    async def _write(
        self, stream: trio.SocketStream, queue: trio.MemoryReceiveChannel[dict[str, Any]]
    ) -> None:
        try:
            async for message in queue:
                await stream.send_all(pack_frame(message))
        except trio.BrokenResourceError:
            return  # The reader sees the same end and reports it.

    async def _read(self, stream: trio.SocketStream) -> None:
        buffer = bytearray()
        while True:
            try:
                data = await stream.receive_some(1 << 18)
            except trio.BrokenResourceError:
                return
            if not data:
                return
            buffer += data
            while len(buffer) >= HEADER.size:
                (size,) = HEADER.unpack_from(buffer)
                if size > MAX_FRAME_BYTES:
                    log.error("the %s process sent a frame of %d bytes", self.name, size)
                    return
                end = HEADER.size + size
                if len(buffer) < end:
                    break
                message = unpack_body(bytes(buffer[HEADER.size : end]))
                del buffer[:end]
                if message["type"] == "failed":
                    self.failure = str(message["reason"])
                elif message["type"] == "ready":
                    self._on_state("running", f"the {self.name} process is ready")
                await self._on_message(message)

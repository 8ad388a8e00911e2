"""A child process of the node and its supervision: spawned with a socket, restarted with back-off when it
dies."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import trio

from peers.supervisor import describe
from swarmnode.processes.channel import CHANNEL_VARIABLE, HEADER, MAX_FRAME_BYTES, pack_frame, unpack_body

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
STABLE_AFTER_S = 60.0
FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 30.0
AFTER_FAILURE_S = 60.0
LONGEST_AFTER_FAILURE_S = 600.0
READY_TIMEOUT_S = 600.0
"""How long a child may take to be ready: a large model is read from a slow disk in this time."""
TRIES_BEFORE_READY = 5
"""A child that ends so often before it was ever ready is not started again."""
MAX_QUEUED_MESSAGES = 4096
MAX_LOG_BYTES = 16 * 1024 * 1024
LOOK_AT_LOG_S = 30.0
END_TIMEOUT_S = 2.0
"""How long a child may take to end after its channel closed, and to die after it was killed."""

ChildState = Literal["running", "restarting", "failed"]


class ChildGone(Exception):
    """The child ended or is not running; the message names it."""


class ChildProcess:
    """One supervised child.

    `run` keeps it alive: it spawns the module, sends `configure()`'s message, and hands every message of the
    child to `on_message`, one at a time. `on_state` is told, with one line of text: "running" when the child
    is ready; "restarting" when it ended and is spawned again, after 1, 2, 4 … 30 seconds; "failed" when it
    said that it cannot go on, or ended again and again without ever being ready. What failed after it was
    once ready is tried again all the same, seldom: a disk may have room again. A message sent while the
    child is down raises `ChildGone`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        configure: Callable[[], dict[str, Any]],
        on_message: Callable[[dict[str, Any]], Awaitable[None]],
        on_state: Callable[[ChildState, str], None],
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
        self._ready = False
        self._was_ever_ready = False
        self._tries = 0
        self._ended_because: str | None = None
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. Raises `ChildGone` when the child is down or hopelessly behind."""
        if self._outgoing is None:
            raise ChildGone(f"the {self.name} process is not running")
        try:
            self._outgoing.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ChildGone(f"the {self.name} process does not take messages") from error

    async def deliver(self, message: dict[str, Any]) -> None:
        """As `send`, but waits for room behind what is queued. Raises `ChildGone` when the child is down."""
        if self._outgoing is None:
            raise ChildGone(f"the {self.name} process is not running")
        try:
            await self._outgoing.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ChildGone(f"the {self.name} process does not take messages") from error

    def end(self, reason: str) -> None:
        """Kill the child because it hangs; it is started again. `reason` is told to people."""
        if self.pid is not None and self._ended_because is None:
            assert self._process is not None
            self._ended_because = reason
            self._process.kill()

    async def run(self) -> None:
        """Keep the child alive until cancelled, or until it fails for good (`failure` says why)."""
        delay_s, failure_delay_s = FIRST_BACK_OFF_S, AFTER_FAILURE_S
        while not self._stopping:
            started = trio.current_time()
            try:
                code = await self._run_once()
            except Exception as error:
                # Its supervisor reports this; whoever uses the child must know that it is down.
                self._on_state(
                    "restarting", f"this node could not serve its {self.name} process: {describe(error)}"
                )
                raise
            if self._stopping:
                return
            if trio.current_time() - started > STABLE_AFTER_S:
                delay_s, failure_delay_s = FIRST_BACK_OFF_S, AFTER_FAILURE_S
            how = f"the {self.name} process {self._how_it_ended(code)}"
            if self.failure is None and not self._was_ever_ready and self._tries >= TRIES_BEFORE_READY:
                self.failure = f"{how}, {self._tries} times before it was ready; its log is {self._log_path}"
            if self.failure is None:
                self._on_state(
                    "restarting", f"{how}; starting it again in {delay_s:.0f} s, its log is {self._log_path}"
                )
                await trio.sleep(delay_s)
                delay_s = min(delay_s * 2, LONGEST_BACK_OFF_S)
            elif self._was_ever_ready:
                self._on_state(
                    "failed",
                    f"{self.failure} (the {self.name} process; tried again in {failure_delay_s:.0f} s)",
                )
                await trio.sleep(failure_delay_s)
                failure_delay_s = min(failure_delay_s * 2, LONGEST_AFTER_FAILURE_S)
            else:
                self._on_state("failed", self.failure)
                return

    def _how_it_ended(self, code: int) -> str:
        if self._ended_because is not None:
            return f"was ended: {self._ended_because}"
        if code == -signal.SIGKILL:
            return "was killed, perhaps for want of memory"
        return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the child to finish what it has in hand; kill it after `grace_s`. One that is not ready yet has
        nothing in hand and is killed at once."""
        self._stopping = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        if self._ready:
            try:
                self.send({"type": "stop"})
            except ChildGone:
                process.terminate()
            with trio.move_on_after(grace_s):
                await _wait(process)
                return
            log.warning("the %s process did not stop within %.0f s: killed", self.name, grace_s)
        process.kill()
        with trio.move_on_after(END_TIMEOUT_S):
            await _wait(process)

    async def _run_once(self) -> int:
        """One life of the child; its exit code."""
        self._ready, self._ended_because, self.failure = False, None, None
        self._tries += 1
        stream, process = self._spawn()
        self._process = process
        send_channel, receive_channel = trio.open_memory_channel[dict[str, Any]](MAX_QUEUED_MESSAGES)
        self._outgoing = send_channel
        try:
            self.send(self._configure())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, receive_channel)
                nursery.start_soon(self._limit_ready_time)
                nursery.start_soon(self._limit_log)
                await self._read(stream)
                nursery.cancel_scope.cancel()
            self._outgoing = None
            # It hung up, so it ends by itself, or else it hangs.
            with trio.move_on_after(END_TIMEOUT_S):
                await _wait(process)
            if process.poll() is None:
                self.end("it closed its channel and did not end")
            return await _wait(process)
        except BaseExceptionGroup as group:
            raise _innermost(group) from None
        finally:
            self._outgoing = None
            self._ready = False
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
                # The closed channel tells the child to go; a stuck one is not waited for.
                with trio.move_on_after(0.5 if self._stopping else END_TIMEOUT_S):
                    await _wait(process)
                if process.poll() is None:
                    process.kill()
                    with trio.move_on_after(END_TIMEOUT_S):
                        await _wait(process)

    def _spawn(self) -> tuple[trio.SocketStream, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        try:
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
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return trio.SocketStream(trio.socket.from_stdlib_socket(ours)), process

    async def _limit_ready_time(self) -> None:
        await trio.sleep(READY_TIMEOUT_S)
        if not self._ready:
            self.end(f"it was not ready within {READY_TIMEOUT_S:.0f} s")

    async def _limit_log(self) -> None:
        """What peers send makes children write: their logs must not fill the disk."""
        while True:
            try:
                await trio.to_thread.run_sync(_cut_log, self._log_path)
            except OSError as error:
                log.warning("%s could not be cut: %s", self._log_path, error)
            await trio.sleep(LOOK_AT_LOG_S)

    async def _write(
        self, stream: trio.SocketStream, queue: trio.MemoryReceiveChannel[dict[str, Any]]
    ) -> None:
        try:
            async for message in queue:
                await stream.send_all(pack_frame(message))
        except trio.BrokenResourceError:
            return  # The reader sees the same end and reports it.
        finally:
            # Who waits for room in the queue must not wait for ever.
            queue.close()

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
                    self.end(f"it sent a frame of {size} bytes")
                    return
                end = HEADER.size + size
                if len(buffer) < end:
                    break
                body = bytes(buffer[HEADER.size : end])
                del buffer[:end]
                try:
                    message = unpack_body(body)
                except ValueError as error:
                    self.end(f"it sent a message that cannot be read ({error})")
                    return
                await self._take(message)

    async def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "failed":
            self.failure = str(message["reason"])
        elif message["type"] == "ready":
            self._ready = self._was_ever_ready = True
            self._on_state("running", f"the {self.name} process is ready")
        await self._on_message(message)


async def _wait(process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        await trio.sleep(0.02)
    return process.returncode


def _innermost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception of a nursery that had only one, else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _cut_log(path: Path) -> None:
    """Keep the last `MAX_LOG_BYTES` twice at most: what is there moves to NAME.1, and the file begins anew.

    The child appends, so it goes on at the new beginning.
    """
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)

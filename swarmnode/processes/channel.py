"""The socket between a node process and its children: length-prefixed msgpack maps, never pickle.

The node keeps one end (trio, `ChildProcess` in `swarmnode.runtime.children`), the child has this blocking
one.
Closing the node's end closes the child's, so a child never outlives its node.
"""

import os
import select
import socket
import struct
import time
from typing import Any

import msgpack

CHANNEL_VARIABLE = "SWARMNODE_CHANNEL_FD"
MAX_FRAME_BYTES = 64 * 1024 * 1024
HEADER = struct.Struct(">I")


class ChannelClosed(Exception):
    """The other side is gone."""


def pack_frame(message: dict[str, Any]) -> bytes:
    """A message as it travels: four bytes of length, then msgpack."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {message.get('type')} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}"
        )
    return HEADER.pack(len(body)) + body


def unpack_body(body: bytes) -> dict[str, Any]:
    """The message of a frame's body."""
    message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("a channel message is a map with a 'type'")
    return message


class Channel:
    """The child's end. One thread reads and one thread writes; `send` is complete when it returns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    @classmethod
    def from_environment(cls) -> "Channel":
        """The channel that the node passed to this process. Raises `RuntimeError` when started by hand."""
        number = os.environ.get(CHANNEL_VARIABLE)
        if number is None:
            raise RuntimeError("this module is started by a node ('swarmnode run'), not by hand")
        return cls(socket.socket(fileno=int(number)))

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises `ChannelClosed`."""
        try:
            self._socket.sendall(pack_frame(message))
        except OSError as error:
            raise ChannelClosed("the node process is gone") from error

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, or None when none came within `timeout_s` (None waits for ever; 0 polls).

        Raises `ChannelClosed` when the node is gone.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._take_frame()
            if message is not None:
                return message
            remaining = None if limit is None else max(0.0, limit - time.monotonic())
            readable, _, _ = select.select([self._socket], [], [], remaining)
            if not readable:
                return None
            try:
                data = self._socket.recv(1 << 18)
            except OSError as error:
                raise ChannelClosed("the node process is gone") from error
            if not data:
                raise ChannelClosed("the node process is gone")
            self._buffer += data

    def _take_frame(self) -> dict[str, Any] | None:
        if len(self._buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._buffer)
        if size > MAX_FRAME_BYTES:
            raise ChannelClosed(f"the node sent a frame of {size} bytes")
        end = HEADER.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return unpack_body(body)

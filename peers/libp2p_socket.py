"""TCP sockets for libp2p: exact reads, and a guard that bounds what a stranger may send."""

import os
import sys
from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import ConnectionType, IRawConnection
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.pnet.psk_conn import PskConn

HANDSHAKE_BYTES = 16 * 1024
"""All that a peer may send before Noise has proven its key; an honest handshake takes under 1 KiB."""

FIRST_BYTE = 0x13
"""Every connection begins with the line "/multistream/1.0.0", whose length is 19."""

READ_AHEAD_BYTES = 256 * 1024
MAX_LOW_WATER_BYTES = 32 * 1024
"""What may have come before this process is woken for it."""

UNSENT_BYTES = 16 * 1024
"""What may wait unsent in the kernel: more would only delay control messages behind bulk data."""

TCP_INFO_BYTES = 232
_TCP_INFO = getattr(trio.socket, "TCP_INFO", None) if sys.platform == "linux" else None
_TCP_NOTSENT_LOWAT = getattr(trio.socket, "TCP_NOTSENT_LOWAT", None)


class HandshakeRefused(IOException):
    """The other side does not speak this protocol, or not with this private-network key."""


class PeerSocket(ReadWriteCloser):
    """A TCP stream. `read(n)` returns n bytes, fewer only at its end: frames are read in exact sizes."""

    def __init__(
        self, stream: trio.SocketStream, on_sent: "Callable[[PeerSocket, int], None] | None" = None
    ) -> None:
        """`on_sent` is told of every part that the kernel took."""
        self._stream = stream
        self._ahead = bytearray()
        self._on_sent = on_sent
        self._low_water_bytes = 1
        self.sent_bytes = 0
        if _TCP_NOTSENT_LOWAT is not None:
            stream.setsockopt(trio.socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        name = stream.socket.getpeername()
        self._remote = (str(name[0]), int(name[1]))

    async def read(self, n: int | None = None) -> bytes:
        wanted = 1 if n is None else n
        while len(self._ahead) < wanted:
            try:
                received = await self._stream.receive_some(READ_AHEAD_BYTES)
            except trio.BrokenResourceError as error:
                raise ConnectionClosedError(f"connection reset: {error}", transport="tcp") from error
            except trio.ClosedResourceError:
                received = b""
            if not received:
                wanted = len(self._ahead)
            self._ahead += received
        taken = bytes(self._ahead) if n is None else bytes(self._ahead[:n])
        del self._ahead[: len(taken)]
        return taken

    async def receive_some(self, least_bytes: int) -> bytes:
        """What is there once so much is there (if that is not very much), empty at the stream's end.

        Being woken for each packet of a large message would cost more than the message. Not together with
        `read`.
        """
        if self._ahead:
            taken, self._ahead = bytes(self._ahead), bytearray()
            return taken
        least_bytes = min(least_bytes, MAX_LOW_WATER_BYTES)
        if least_bytes != self._low_water_bytes:
            self._stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVLOWAT, least_bytes)
            self._low_water_bytes = least_bytes
        try:
            return await self._stream.receive_some(READ_AHEAD_BYTES)
        except trio.BrokenResourceError as error:
            raise ConnectionClosedError(f"connection reset: {error}", transport="tcp") from error
        except trio.ClosedResourceError:
            return b""

    async def write(self, data: bytes) -> None:
        self.sent_bytes += len(data)
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("connection closed", transport="tcp") from error

    def send_now(self, data: memoryview) -> int:
        """How much of `data` the kernel takes at once, 0 if nothing. Raises `ConnectionClosedError`."""
        try:
            sent = os.write(self._stream.socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"connection closed: {error}", transport="tcp") from error
        self.sent_bytes += sent
        if self._on_sent is not None:
            self._on_sent(self, sent)
        return sent

    async def wait_writable(self) -> None:
        """Until the kernel takes more. Raises `ConnectionClosedError`."""
        try:
            await trio.lowlevel.wait_writable(self._stream.socket.fileno())
        except (trio.ClosedResourceError, OSError) as error:
            raise ConnectionClosedError("connection closed", transport="tcp") from error

    def tcp_info(self) -> bytes | None:
        """The kernel's `struct tcp_info`, where it has one; None when the socket is closed."""
        if _TCP_INFO is None:
            return None
        try:
            return self._stream.socket.getsockopt(trio.socket.IPPROTO_TCP, _TCP_INFO, TCP_INFO_BYTES)
        except OSError:
            return None

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote


class GuardedConnection(IRawConnection):
    """A raw connection that, until `lift()`, refuses what cannot be an honest handshake.

    libp2p reads handshake lines of any announced length; here the announcement alone is refused.
    """

    def __init__(self, socket: PeerSocket, initiator: bool, private_network_key: bytes | None) -> None:
        plain = RawConnection(socket, initiator)
        self.is_initiator = initiator
        self._private = private_network_key is not None
        self._inner = plain if private_network_key is None else PskConn(plain, private_network_key.hex())
        self.socket = socket
        self._plain = plain
        self._budget: int | None = HANDSHAKE_BYTES
        self._first = True

    def private_ciphers(self) -> tuple[Callable[[bytes], bytes] | None, Callable[[bytes], bytes] | None]:
        """What the private network's key does to bytes going out and coming in, from here on."""
        if not isinstance(self._inner, PskConn):
            return None, None
        assert self._inner.write_cipher is not None and self._inner.read_cipher is not None
        return self._inner.write_cipher.encrypt, self._inner.read_cipher.decrypt

    def lift(self) -> None:
        """The peer is known: from here on the multiplexer bounds what it sends."""
        self._budget = None

    async def read(self, n: int | None = None) -> bytes:
        if self._budget is not None and n is not None and n > self._budget:
            raise HandshakeRefused("the other side announced far more than a handshake needs")
        data = await self._inner.read(n)
        if self._budget is not None:
            self._budget -= len(data)
            if self._first and data:
                self._first = False
                if data[0] != FIRST_BYTE:
                    raise HandshakeRefused(self._stranger())
        return data

    def _stranger(self) -> str:
        if self._private:
            return "the other side has another private-network key, or none"
        return "the other side does not speak libp2p, or is in a private network that needs its key"

    async def write(self, data: bytes) -> None:
        await self._inner.write(data)

    async def close(self) -> None:
        await self.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.socket.get_remote_address()

    def get_transport_addresses(self) -> list[Any]:
        return self._plain.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT

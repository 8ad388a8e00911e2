"""The encrypted link under the multiplexer: libp2p's Noise session after its handshake, with fewer copies."""

import struct
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from libp2p.abc import ISecureConn
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.security.secure_session import SecureSession

from peers.libp2p_socket import GuardedConnection

MAX_PLAINTEXT_BYTES = 65_535 - 16
"""Of one Noise message, whose length is two bytes and whose tag takes 16."""

_LENGTH = struct.Struct("!H")
_NONCE = struct.Struct("<4xQ")
Cipher = Callable[[bytes, "bytes | memoryview", None], bytes]


class NoiseLink:
    """Encrypts and decrypts whole Noise messages over the socket of a finished handshake.

    `seal` must be called in the order of sending and each result sent whole: the messages are numbered.
    """

    def __init__(self, session: ISecureConn) -> None:
        assert isinstance(session, SecureSession), "Noise is the only security that this node offers"
        guarded = session.conn.read_writer.read_write_closer  # type: ignore[attr-defined]  # Noise's
        assert isinstance(guarded, GuardedConnection)
        noise = session.conn.noise_state.noise_protocol  # type: ignore[attr-defined]
        self.socket = guarded.socket
        self._disguise, self._reveal = guarded.private_ciphers()
        self._encrypt: Cipher = noise.cipher_state_encrypt.cipher.cipher.encrypt
        self._decrypt: Cipher = noise.cipher_state_decrypt.cipher.cipher.decrypt
        self._sealed = int(noise.cipher_state_encrypt.n)
        self._opened = int(noise.cipher_state_decrypt.n)
        # What the handshake read and did not use: decrypted, and not yet.
        self._plain = session._drain(None)
        self._received = bytearray()

    def seal(self, plaintext: bytes) -> bytes:
        """One message for the wire, of at most `MAX_PLAINTEXT_BYTES`."""
        ciphertext = self._encrypt(_NONCE.pack(self._sealed), plaintext, None)
        self._sealed += 1
        message = _LENGTH.pack(len(ciphertext)) + ciphertext
        return message if self._disguise is None else self._disguise(message)

    async def receive(self) -> list[bytes]:
        """The plaintexts of all whole messages that are here, at least one; none at the end of the stream.

        Raises `ConnectionClosedError`, also when a message was tampered with.
        """
        if self._plain:
            plain, self._plain = self._plain, b""
            return [plain]
        while True:
            found = self._take_whole()
            if found:
                return found
            data = await self.socket.receive_some(self._missing_bytes())
            if not data:
                return []
            self._received += data if self._reveal is None else self._reveal(data)

    def _missing_bytes(self) -> int:
        """How much must come before there is a whole message, as far as that is known."""
        if len(self._received) < _LENGTH.size:
            return 1
        (length,) = _LENGTH.unpack_from(self._received)
        return int(length) + _LENGTH.size - len(self._received)

    def _take_whole(self) -> list[bytes]:
        received = self._received
        found: list[bytes] = []
        position = 0
        with memoryview(received) as view:
            while len(view) - position >= _LENGTH.size:
                start = position + _LENGTH.size
                end = start + _LENGTH.unpack_from(view, position)[0]
                if end > len(view):
                    break
                with view[start:end] as ciphertext:
                    try:
                        found.append(self._decrypt(_NONCE.pack(self._opened), ciphertext, None))
                    except InvalidTag:
                        raise ConnectionClosedError("a message was tampered with", transport="tcp") from None
                self._opened += 1
                position = end
        del received[:position]
        return found

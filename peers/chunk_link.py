"""One session as a download uses it: what is to be said, and chunks in the middle of coming."""

import hashlib
from collections.abc import Sequence

from peers.base import Session
from peers.chunk_frames import CANCEL, MAX_INDICES, SPARE, WANT, encode_have, encode_indices
from peers.chunk_plan import Step, Withdrawal
from peers.signal import Signal


class Arriving:
    """A chunk that comes piece by piece, hashed as it comes."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.size = 0
        """Bytes that are here, from the beginning."""
        self._digest = hashlib.sha256()

    def take(self, offset: int, piece: memoryview) -> bool:
        """Add the next piece; False if it is not the next or goes beyond the chunk."""
        end = offset + len(piece)
        if offset != self.size or end > len(self.data):
            return False
        self.data[offset:end] = piece
        self._digest.update(piece)
        self.size = end
        return True

    @property
    def is_whole(self) -> bool:
        return self.size == len(self.data)

    def digest(self) -> bytes:
        """SHA-256 of what is here."""
        return self._digest.digest()


class ChunkLink:
    """The downloader's end of a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.giving = False
        """Whether the peer, having all chunks, is to be told which are here."""
        self.changed = Signal()
        self.arriving: dict[int, Arriving] = {}
        self._to_say: list[Step] = []
        self._reported = 0

    def say(self, step: Step) -> None:
        """Send a request or withdrawal, after those before it."""
        self._to_say.append(step)
        self.changed.set()

    async def speak(self, done: Sequence[int]) -> None:
        """Send what is to be said, and to a giving peer the chunks in `done`, which only grows. Raises
        `SessionEnded`."""
        while True:
            if self.giving and self._reported < len(done):
                news = done[self._reported :][:MAX_INDICES]
                self._reported += len(news)
                await self.session.send(encode_have(news, 0))
            elif self._to_say:
                kind = _kind(self._to_say[0])
                steps = self._take_run(kind)
                await self.session.send(encode_indices(kind, [step.index for step in steps]))
            else:
                await self.changed.wait()

    def _take_run(self, kind: int) -> list[Step]:
        """What is to be said first, as far as one message can say it."""
        length = 0
        while length < min(len(self._to_say), MAX_INDICES) and _kind(self._to_say[length]) == kind:
            length += 1
        steps, self._to_say = self._to_say[:length], self._to_say[length:]
        return steps


def _kind(step: Step) -> int:
    if isinstance(step, Withdrawal):
        return CANCEL
    return SPARE if step.spare else WANT

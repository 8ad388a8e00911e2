"""What the in-memory network does to a message on one link, decided by its seed alone."""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, replace

from peers.base import PeerId


@dataclass(frozen=True)
class Link:
    """What one direction of a connection does to messages; the three faults are probabilities per message."""

    delay_s: float = 0.01
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0


@dataclass(frozen=True)
class Passage:
    """One message's way over a link."""

    delay_s: float
    arrives: tuple[bytes, ...]
    """The copies at the other end: none, one or two."""


class Links:
    """The links between all nodes.

    What happens to a message follows from the seed, the link, the bytes and how often the link has carried
    these bytes: the same in every run, however the tasks are scheduled.
    """

    def __init__(self, seed: int, default: Link) -> None:
        self.default = default
        self._seed = seed
        self._special: dict[tuple[PeerId, PeerId], Link] = {}
        self._carried: Counter[bytes] = Counter()

    def set(self, source: PeerId, target: PeerId, link: Link) -> None:
        self._special[source, target] = link

    def change_default(self, **changes: float) -> None:
        self.default = replace(self.default, **changes)

    def between(self, source: PeerId, target: PeerId) -> Link:
        return self._special.get((source, target), self.default)

    def carry(self, source: PeerId, target: PeerId, label: str, data: bytes) -> Passage:
        """What becomes of `data`, sent under the name of a protocol or topic."""
        link = self.between(source, target)
        digest = hashlib.sha256(b"%d|" % self._seed + source + target + label.encode() + b"|" + data).digest()
        self._carried[digest] += 1
        fate = random.Random(digest + self._carried[digest].to_bytes(8, "big"))
        delay_s = link.delay_s + link.jitter_s * fate.random()
        # All drawn, whatever comes of them: changing one probability leaves the other faults as they were.
        lost, doubled, spoiled = (fate.random() < p for p in (link.loss, link.duplicate, link.corrupt))
        if lost:
            return Passage(delay_s, ())
        if spoiled and data:
            place = fate.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ (1 << fate.randrange(8))]) + data[place + 1 :]
        return Passage(delay_s, (data, data) if doubled else (data,))

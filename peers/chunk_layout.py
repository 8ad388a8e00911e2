"""How a file is cut into chunks, and its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from protocol.chunks import state_hash


@dataclass(frozen=True)
class FileLayout:
    """Where each chunk of a file lies. Raises `ValueError` if the number of chunks does not fit."""

    size_bytes: int
    chunk_size: int
    chunks: Sequence[bytes]

    def __post_init__(self) -> None:
        needed = -(-self.size_bytes // self.chunk_size)
        if len(self.chunks) != needed:
            raise ValueError(
                f"{len(self.chunks)} chunk hashes for {needed} chunks of {self.chunk_size} bytes"
            )

    @cached_property
    def name(self) -> bytes:
        """The file's name between nodes."""
        return state_hash(self.size_bytes, self.chunk_size, self.chunks)

    @property
    def count(self) -> int:
        return len(self.chunks)

    def start(self, index: int) -> int:
        """Where chunk `index` begins."""
        return index * self.chunk_size

    def length(self, index: int) -> int:
        """The size of chunk `index`."""
        return min(self.chunk_size, self.size_bytes - index * self.chunk_size)

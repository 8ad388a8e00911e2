"""Finding one chunk by its hash among all that a shelf serves."""

from peers.chunk_shelf import ChunkFile, ChunkShelf


def _places(shelf: ChunkShelf, chunk: bytes) -> list[tuple[ChunkFile, int]]:
    return [
        (file, index)
        for file in shelf.files()
        for index, name in enumerate(file.layout.chunks)
        if name == chunk and file.has(index)
    ]


def serves(shelf: ChunkShelf, chunk: bytes) -> bool:
    return bool(_places(shelf, chunk))


async def read_chunk(shelf: ChunkShelf, chunk: bytes) -> bytes:
    file, index = _places(shelf, chunk)[0]
    return await file.read(index, 0, file.layout.length(index))

"""One file from peers: resumed from what is on disk, served onward chunk by chunk while it comes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from peers.base import PeerId
from peers.chunk_exchange import TransferProgress, fetch_chunks
from peers.chunk_shelf import ChunkShelf
from peers.file_assembly import StoredFile, open_assembly
from peers.swarm import Swarm


async def download_file(
    swarm: Swarm,
    shelf: ChunkShelf,
    path: Path,
    *,
    size_bytes: int,
    chunk_size: int,
    chunks: Sequence[bytes],
    providers: Callable[[], Sequence[PeerId]],
    progress: Callable[[TransferProgress], None] | None = None,
) -> None:
    """Bring `path` here; `progress` is told how far it is.

    Raises `TransferFailed` when no provider has it, `OSError` when the disk is full.
    """
    async with open_assembly(path, size_bytes, chunk_size, chunks) as assembly:
        if not assembly.complete:
            shelf.add(assembly)
            try:
                await fetch_chunks(
                    swarm,
                    assembly.layout,
                    providers,
                    assembly.keep,
                    already=set(assembly.verified),
                    held_by=assembly.held_by,
                    progress=progress,
                )
                await assembly.finish()
                # Others are fetching from here: serve on without a gap until the caller serves the file.
                shelf.add(StoredFile(path, size_bytes, chunk_size, chunks), provisional=True)
            finally:
                shelf.remove(assembly)
        await assembly.finish()

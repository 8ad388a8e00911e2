"""A file from chunks: placed, verified, resumed after a kill, served while it grows, named when whole."""

import errno
import hashlib
import os
import random

import pytest
import trio
import trio.testing

from peers.chunk_shelf import ChunkShelf
from peers.file_assembly import StoredFile, open_assembly, part_path

SIZE, CHUNK = 2_500, 1_000
CONTENT = random.Random(3).randbytes(SIZE)
CHUNKS = [CONTENT[0:1_000], CONTENT[1_000:2_000], CONTENT[2_000:2_500]]
NAMES = [hashlib.sha256(chunk).digest() for chunk in CHUNKS]


def assembly(path):
    return open_assembly(path, SIZE, CHUNK, NAMES)


async def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "model"
    async with assembly(path) as file:
        assert file.wanted == [(NAMES[0], 1_000), (NAMES[1], 1_000), (NAMES[2], 500)]
        for index in (2, 0, 1):
            assert not path.exists()
            await file.write(index, CHUNKS[index])
        assert file.complete and await file.finish() == path
        assert path.read_bytes() == CONTENT
        assert await file.read(1, 0, CHUNK) == CHUNKS[1], "and is served on under its name"
        assert await file.finish() == path, "twice does nothing"
    assert os.listdir(path.parent) == ["model"]


async def test_what_is_not_the_chunk_is_not_taken(tmp_path):
    async with assembly(tmp_path / "model") as file:
        with pytest.raises(ValueError, match="chunk 0 has another hash"):
            await file.write(0, CHUNKS[1])
        with pytest.raises(ValueError, match="chunk 2 has 500 bytes, not 1000"):
            await file.write(2, CHUNKS[1])
        assert file.verified == set()
        with pytest.raises(ValueError, match="lacks 3 of 3 chunks"):
            await file.finish()
    with pytest.raises(ValueError, match="2 chunk hashes for 3 chunks"):
        async with open_assembly(tmp_path / "model", SIZE, CHUNK, NAMES[:2]):
            pass


async def test_after_a_kill_only_what_is_right_on_disk_counts(tmp_path):
    path = tmp_path / "model"
    async with assembly(path) as file:
        await file.write(0, CHUNKS[0])
        await file.write(2, CHUNKS[2])
    with part_path(path).open("r+b") as part:
        part.seek(2_100)
        part.write(b"torn")
    async with assembly(path) as file:
        assert file.verified == {0}
        await file.write(1, CHUNKS[1])
        await file.write(2, CHUNKS[2])
        await file.finish()
    assert path.read_bytes() == CONTENT


async def test_a_part_file_of_another_size_is_no_obstacle(tmp_path):
    path = tmp_path / "model"
    for content in (CHUNKS[0] + b"short", CONTENT + b"long"):
        part_path(path).write_bytes(content)
        async with assembly(path) as file:
            assert 0 in file.verified
            assert part_path(path).stat().st_size == SIZE


async def test_a_whole_file_needs_nothing_and_a_damaged_one_is_mended(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(CONTENT)
    async with assembly(path) as file:
        assert file.complete
        await file.finish()
    path.write_bytes(CONTENT[:1_500] + b"?" + CONTENT[1_501:])
    async with assembly(path) as file:
        assert file.verified == {0, 2}
        assert not path.exists(), "a damaged file is not left under the name"
        await file.write(1, CHUNKS[1])
        await file.finish()
    assert path.read_bytes() == CONTENT


async def test_it_serves_what_it_has_and_says_what_that_is(tmp_path):
    async with assembly(tmp_path / "model") as file:
        await file.write(2, CHUNKS[2])
        await file.write(0, CHUNKS[0])
        await file.write(2, CHUNKS[2])
        assert file.arrived == [2, 0], "in the order in which they came, once each"
        assert file.has(2) and not file.has(1)
        assert await file.read(2, 450, 30) == CHUNKS[2][450:480]
        assert await file.read(2, 450, 1_000) == CHUNKS[2][450:], "not beyond the chunk"
        with pytest.raises(KeyError):
            await file.read(1, 0, 10)
    assert not file.has(2), "closed"
    with pytest.raises(KeyError):
        await file.read(2, 0, 10)


async def test_equal_chunks_have_places_of_their_own(tmp_path):
    twice = [NAMES[0], NAMES[0]]
    async with open_assembly(tmp_path / "twice", 2_000, CHUNK, twice) as file:
        await file.write(1, CHUNKS[0])
        assert file.has(1) and not file.has(0)
        await file.write(0, CHUNKS[0])
        await file.finish()
    assert (tmp_path / "twice").read_bytes() == 2 * CHUNKS[0]


async def test_closing_waits_for_reads_so_that_no_other_file_is_ever_read(tmp_path, monkeypatch):
    import peers.file_assembly as module

    entered, leave = trio.Event(), trio.Event()
    pread = module._pread

    def slow(descriptor, start, end):
        trio.from_thread.run_sync(entered.set)
        trio.from_thread.run(leave.wait)
        return pread(descriptor, start, end)

    got = []
    async with trio.open_nursery() as nursery:
        async with assembly(tmp_path / "model") as file:
            await file.write(0, CHUNKS[0])
            monkeypatch.setattr(module, "_NOWAIT", 0)
            monkeypatch.setattr(module, "_pread", slow)

            async def read():
                got.append(await file.read(0, 0, CHUNK))

            nursery.start_soon(read)
            await entered.wait()
        with (tmp_path / "secret").open("wb") as secret:
            secret.write(b"s" * 5_000)
        leave.set()
    assert got == [CHUNKS[0]]


async def test_a_full_disk_is_an_error_before_the_download(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        async with assembly(tmp_path / "model"):
            pass

    def unsupported(descriptor, offset, size):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    async with assembly(tmp_path / "model") as file:
        assert not file.complete


async def test_a_shelf_serves_the_fullest_file_of_a_name(tmp_path):
    path = tmp_path / "whole"
    path.write_bytes(CONTENT)
    shelf, whole = ChunkShelf(), StoredFile(path, SIZE, CHUNK, NAMES)
    name = whole.layout.name
    assert shelf.get(name) is None
    async with assembly(tmp_path / "part") as part:
        shelf.add(part)
        assert shelf.get(name) is part
        shelf.add(whole)
        shelf.add(whole)
        assert shelf.get(name) is whole
        shelf.remove(whole)
        assert shelf.get(name) is part
        shelf.remove(part)
    assert shelf.get(name) is None


async def test_a_provisional_file_stays_until_another_of_its_name_comes(tmp_path):
    shelf = ChunkShelf()
    first, second = (StoredFile(tmp_path / "x", SIZE, CHUNK, NAMES) for _ in range(2))
    shelf.add(first, provisional=True)
    assert shelf.get(first.layout.name) is first
    shelf.add(second)
    assert shelf.get(first.layout.name) is second
    shelf.remove(second)
    assert shelf.get(first.layout.name) is None


async def test_a_shelf_tells_of_every_chunk_that_comes(tmp_path, autojump_clock):
    shelf = ChunkShelf()
    told = []

    async def watch():
        while True:
            await shelf.changed.wait()
            told.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        async with assembly(tmp_path / "model") as file:
            shelf.add(file)
            await trio.testing.wait_all_tasks_blocked()
            await file.write(0, CHUNKS[0])
            await trio.testing.wait_all_tasks_blocked()
            shelf.remove(file)
            await file.write(1, CHUNKS[1])
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert len(told) == 3

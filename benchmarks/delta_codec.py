"""Times and memory of making and applying deltas of published versions, in a process of its own."""

import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from protocol.chunks import chunk_hashes
from protocol.delta import DeltaFile, encode_delta
from protocol.messages import Manifest
from swarmnode.runtime.rebuild import rebuild_snapshot
from trainer.files import version_directories

CHUNK_BYTES = 1024 * 1024
THREADS = (1, 2)
SAMPLE_S = 0.002


class Pair:
    """A version and the one before it. The work on them that is measured, each by a number of threads."""

    def __init__(self, older: Path, newer: Path, version: int, scratch: Path) -> None:
        self.parent, self.delta = older / "model.safetensors", scratch / "delta.bin"
        self.target = scratch / "model.safetensors"
        self.old, self.new = mapped(self.parent), mapped(newer / "model.safetensors")
        # Both files are in the page cache after this, as they are in a node that has just written them.
        chunk_hashes(self.old, CHUNK_BYTES, 2)
        self.manifest = Manifest(
            policy=bytes(32),
            version=version,
            size_bytes=len(self.new),
            chunk_size=CHUNK_BYTES,
            chunks=chunk_hashes(self.new, CHUNK_BYTES, 2),
        )

    def make_delta(self, threads: int) -> None:
        with self.delta.open("wb") as file:
            for piece in encode_delta(self.old, self.new, CHUNK_BYTES, threads):
                file.write(piece)

    def rebuild(self, threads: int) -> None:
        rebuild_snapshot(self.parent, self.delta, self.target, self.manifest, threads, flush=False)

    def rebuild_and_flush(self, threads: int) -> None:
        rebuild_snapshot(self.parent, self.delta, self.target, self.manifest, threads)

    def hash_only(self, threads: int) -> None:
        chunk_hashes(self.new, CHUNK_BYTES, threads)


WORK: dict[str, Callable[[Pair, int], None]] = {
    "make the delta": Pair.make_delta,
    "rebuild and verify": Pair.rebuild,
    "rebuild, verify, flush to disk": Pair.rebuild_and_flush,
    "SHA-256 alone": Pair.hash_only,
}


def measure(publications: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Every version against the one before it. Work and numbers of threads take turns within each repeat."""
    directories = version_directories(publications)
    times: dict[tuple[str, int], list[float]] = {(work, count): [] for work in WORK for count in THREADS}
    peaks = dict.fromkeys(WORK, 0)
    rows = []
    size_bytes = 0
    for older, newer in pairwise(sorted(directories)):
        pair = Pair(directories[older], directories[newer], newer, scratch)
        size_bytes = len(pair.new)
        for _ in range(repeats):
            for threads in THREADS:
                for name, work in WORK.items():
                    pair.target.unlink(missing_ok=True)
                    with peak_of(name, peaks):
                        started = time.perf_counter()
                        work(pair, threads)
                        times[name, threads].append(time.perf_counter() - started)
        rows.append({"version": newer, **sizes(pair.delta, size_bytes)})
        print(f"measured version {newer}: {rows[-1]['ratio']:.0f} times smaller", file=sys.stderr, flush=True)
    return {
        "snapshot_bytes": size_bytes,
        "versions": rows,
        "speeds_mb_per_s": {
            f"{name}, {threads} thread{'s' * (threads > 1)}": speed(seconds, size_bytes)
            for (name, threads), seconds in times.items()
        },
        "extra_memory_mb": {name: round(peak / 1e6, 1) for name, peak in peaks.items()},
    }


def sizes(delta: Path, size_bytes: int) -> dict[str, Any]:
    """What a delta holds and what it takes."""
    file = DeltaFile(delta.read_bytes())
    changed = sum(len(change.offsets) for index in range(file.chunk_count) for change in file.changes(index))
    delta_bytes = delta.stat().st_size
    return {
        "changed": changed,
        "changed_share": changed / (size_bytes / 2),
        "delta_bytes": delta_bytes,
        "ratio": size_bytes / delta_bytes,
        "bits_per_change": 8 * delta_bytes / max(changed, 1),
    }


def speed(seconds: list[float], size_bytes: int) -> dict[str, int]:
    """Snapshot bytes per second, in MB/s."""
    values = [size_bytes / 1e6 / each for each in seconds]
    return {
        "median": round(statistics.median(values)),
        "lowest": round(min(values)),
        "highest": round(max(values)),
        "count": len(values),
    }


def mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def peak_of(work: str, peaks: dict[str, int]) -> Iterator[None]:
    """Note the most memory of its own, beyond that at the start, that this process has inside the block."""
    before, done = own_memory(), threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            peaks[work] = max(peaks[work], own_memory() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()


def own_memory() -> int:
    """Bytes of anonymous memory in RAM: what is not a mapped file."""
    for row in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if row.startswith("RssAnon:"):
            return int(row.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")

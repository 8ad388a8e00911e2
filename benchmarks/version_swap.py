"""What it costs a worker to bring a version in: patching live weights against loading the file.

    make smollm2
    OMP_NUM_THREADS=1 python -m benchmarks.version_swap --json build/version-swap.json [--quick]

SmolLM2-135M in one process and one thread, as the rollout process does it. Two versions differ in a share of
their bfloat16 values, each by one step, as after an update of AdamW at a learning rate near 1e-6. The two
ways alternate. The rebuild of the file, which nobody waits for, is timed beside them with two threads.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.report import table, write_report
from protocol.chunks import chunk_hashes
from protocol.delta import encode_delta
from protocol.limits import DEFAULT_CHUNK_BYTES
from protocol.messages import Manifest
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.processes.rollout import PATCH_PROBE_TOKENS
from swarmnode.runtime.rebuild import rebuild_snapshot

MODEL = Path("build/smollm2")
SHARE = 0.008
PROBE = list(range(100, 164))
"""As many tokens as a learner's probe has for a prompt of a chat model."""

Times = dict[str, list[dict[str, float]]]


def main() -> None:
    arguments = _arguments()
    results: dict[str, Any] = {"share_changed": SHARE, "dtypes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("making two versions", file=sys.stderr)
        results |= _make_versions(arguments.model, folder)
        for dtype in ("float32", "bfloat16"):
            times = _measure(arguments.model, folder, dtype, 2 if arguments.quick else arguments.repeats)
            results["dtypes"][dtype] = times
    if arguments.json:
        write_report(arguments.json, "version_swap", results)
    rows = []
    for dtype, times in results["dtypes"].items():
        for step, each in times.items():
            rows.append([dtype, step, _spread(each, "cpu_s"), _spread(each, "wall_s")])
    print(table(["engine", "step", "CPU ms, median (least to most)", "ms of the clock"], rows))
    print(f"snapshot {results['snapshot_bytes'] / 1e6:.1f} MB, delta {results['delta_bytes'] / 1e6:.2f} MB")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two repeats")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--model", type=Path, default=MODEL)
    return parser.parse_args()


def _spread(times: list[dict[str, float]], key: str) -> str:
    values = [1000 * each[key] for each in times]
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _make_versions(model: Path, folder: Path) -> dict[str, int]:
    old = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {}
    for name, tensor in old.items():
        bits = tensor.view(torch.int16).clone()
        # Not of zeros: one step below zero is not a number.
        moved = (torch.rand(bits.shape, generator=generator) < SHARE) & (tensor != 0)
        up = torch.rand(bits.shape, generator=generator) < 0.5
        new[name] = torch.where(moved, bits + torch.where(up, 1, -1).to(torch.int16), bits).view(tensor.dtype)
    for version, tensors in enumerate((old, new)):
        save_file(tensors, folder / f"v{version}.safetensors", metadata={"format": "pt"})
    contents = [(folder / f"v{version}.safetensors").read_bytes() for version in (0, 1)]
    delta = b"".join(encode_delta(contents[0], contents[1], DEFAULT_CHUNK_BYTES))
    (folder / "delta.bin").write_bytes(delta)
    return {"snapshot_bytes": len(contents[0]), "delta_bytes": len(delta)}


def _measure(model: Path, folder: Path, dtype: Any, repeats: int) -> Times:
    engine = TransformersEngine(model, dtype=dtype)
    gc.collect()
    gc.freeze()  # as the rollout process does
    files = [folder / f"v{version}.safetensors" for version in (0, 1)]
    manifest = Manifest(
        policy=bytes(32),
        version=1,
        size_bytes=files[1].stat().st_size,
        chunk_size=DEFAULT_CHUNK_BYTES,
        chunks=chunk_hashes(files[1].read_bytes(), DEFAULT_CHUNK_BYTES),
    )
    engine.load(files[1], 1)
    expected = engine.probe(PROBE[:PATCH_PROBE_TOKENS])
    engine.load(files[0], 0)
    times: Times = {}

    def timed(step: str, work: Callable[[], Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = work()
        spent = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
        times.setdefault(step, []).append(spent)
        return result

    for repeat in range(repeats + 1):
        print(f"{dtype}: round {repeat} of {repeats}", file=sys.stderr)
        timed("deltas: patch", lambda: engine.patch([folder / "delta.bin"], 1))
        probe = timed("deltas: probe", lambda: engine.probe(PROBE[:PATCH_PROBE_TOKENS]))
        assert probe == expected, "patched weights are those of the file"
        timed("file: load", lambda: engine.load(files[0], 0))
        timed("file: probe", lambda: engine.probe(PROBE))
        timed(
            "behind deltas: rebuild",
            lambda: rebuild_snapshot(files[0], folder / "delta.bin", folder / "rebuilt", manifest, threads=2),
        )
    return {step: each[1:] for step, each in times.items()}  # the first round warms up


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()

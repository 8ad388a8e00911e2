"""How small and how fast deltas are, on a real GRPO run: SmolLM2-135M at learning rate 1e-6, 12 versions.

    make smollm2
    python -m benchmarks.delta --json delta.json            # about 8 minutes on 2 cores
    python -m benchmarks.delta --json delta.json --quick    # 2 versions, fewer repeats

The run is the product's: rollouts of the seeded engine on reasoning-gym tasks, the learner's step, its store.
Each version's snapshot is then compared with the one before: share of changed values, size of the delta, time
to make it and to rebuild the snapshot from it with every chunk verified, memory. The files are in the page
cache, as they are for a learner and a worker. In place of a learning rate another can be given.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.delta_codec import measure
from benchmarks.delta_run import Setting, as_record, train
from benchmarks.report import table, write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"), help="made by `make smollm2`")
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument(
        "--threads", type=int, default=2, help="of the run; the codec is measured with 1 and 2"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement of each version")
    parser.add_argument("--quick", action="store_true", help="2 versions of 2 small groups, one repeat")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} has no model: run 'make smollm2', or name a folder with --model")
    if arguments.quick:
        arguments.versions, arguments.groups, arguments.group_size, arguments.repeats = 2, 2, 4, 1
    setting = Setting(
        versions=arguments.versions,
        learning_rate=arguments.learning_rate,
        groups=arguments.groups,
        group_size=arguments.group_size,
        max_new_tokens=arguments.max_new_tokens,
        threads=arguments.threads,
        checkpoint_every=max(1, arguments.versions // 3),
    )
    with tempfile.TemporaryDirectory(prefix="delta-") as folder:
        publications, versions = train(arguments.model, Path(folder), setting)
        # The trainer's memory must not be in the figures, nor what its libraries keep.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            codec = pool.apply(measure, (publications, Path(folder), arguments.repeats))
    results = {"setting": vars(setting), "run": [as_record(each) for each in versions], "codec": codec}
    results["summary"] = summary(results)
    write_report(arguments.json, "delta", results)
    print(describe(results))
    return 0


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that decide."""
    rows, run = results["codec"]["versions"], results["run"]
    ratios = [row["ratio"] for row in rows]
    checkpoints = [each["checkpoint_s"] for each in run if each["checkpoint_s"] is not None]
    return {
        "median_ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        "median_publish_s": statistics.median(each["publish_s"] for each in run),
        "median_checkpoint_s": statistics.median(checkpoints) if checkpoints else None,
        "publish_memory_mb": max(each["publish_memory_mb"] for each in run),
    }


def describe(results: dict[str, Any]) -> str:
    """Tables for people."""
    codec, found, setting = results["codec"], results["summary"], results["setting"]
    by_version = table(
        ["version", "changed", "delta", "times smaller", "bits per change", "publish", "reward"],
        [
            [
                str(row["version"]),
                f"{100 * row['changed_share']:.3f} %",
                f"{row['delta_bytes'] / 1e6:.3f} MB",
                f"{row['ratio']:.0f}",
                f"{row['bits_per_change']:.1f}",
                f"{run['publish_s']:.2f} s",
                f"{run['reward_mean']:.3f}",
            ]
            for row, run in zip(codec["versions"], results["run"], strict=True)
        ],
    )
    by_work = table(
        ["of the snapshot's size", "median MB/s", "lowest", "highest", "times"],
        [
            [name, str(speed["median"]), str(speed["lowest"]), str(speed["highest"]), str(speed["count"])]
            for name, speed in codec["speeds_mb_per_s"].items()
        ],
    )
    checkpoint = found["median_checkpoint_s"]
    return "\n".join(
        [
            f"snapshot {codec['snapshot_bytes'] / 1e6:.1f} MB, learning rate {setting['learning_rate']:g}",
            by_version,
            f"median {found['median_ratio']:.0f} times smaller ({found['lowest_ratio']:.0f} to "
            f"{found['highest_ratio']:.0f})",
            by_work,
            "memory beyond the files: "
            + ", ".join(f"{name} {most} MB" for name, most in codec["extra_memory_mb"].items()),
            f"from the step to the published version {found['median_publish_s']:.2f} s, with at most "
            f"{found['publish_memory_mb']} MB more memory"
            + ("" if checkpoint is None else f"; a checkpoint takes {checkpoint:.1f} s after that"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

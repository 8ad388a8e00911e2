"""The train step against TRL's: tokens per second and peak memory, on the same completions.

    python -m benchmarks.train_step --json FILE [--quick] [--model DIR]

Compared is one whole update (forward, backward, gradient clipping, AdamW) of `trainer.learner.Learner` and of
TRL's `GRPOTrainer`, each in a process of its own that waits while the other one works. Both train the same
SmolLM2-135M on the same groups of 8 completions, which the model itself sampled, with the same loss (CISPO on
policy, mean over tokens), the same learning rate, the same number of threads, without gradient checkpointing,
and put as many completions into a micro-batch: 8, TRL's default. TRL's trainer runs as it is, from its data
loader to its optimizer; its `rollout_func` hands it the completions. In the first update both must find the
same loss and the same gradient norm.

"trl, head on completions" is TRL with one line changed: on a CPU it computes the last layer of prompt tokens
too, and throws it away; here it does not, as on a GPU.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import table, write_report
from benchmarks.train_step_rollouts import Rollouts, sample_rollouts, with_prompt_length
from benchmarks.train_step_side import SIDES, Side

LONG_FACTOR = 4
"""In the shape `long` prompts are this many times as long as the mean completion."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative difference of the sides' first losses and gradient norms; in bfloat16 each rounds in its
own way."""


@dataclass(frozen=True)
class Plan:
    """What one run of the benchmark measures."""

    groups: int = 2
    group_size: int = 8
    max_new_tokens: int = 96
    repeats: int = 5
    dtypes: tuple[str, ...] = ("float32",)
    threads: int = 2


QUICK = Plan(groups=1, max_new_tokens=32, repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one group of short completions, one repeat")
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"), help="made by `make smollm2`")
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--shapes", nargs="+", choices=("short", "long"), default=["short", "long"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parser.parse_args()
    plan = replace(QUICK if options.quick else Plan(), threads=options.threads)
    if options.repeats is not None:
        plan = replace(plan, repeats=options.repeats)
    if options.dtypes is not None:
        plan = replace(plan, dtypes=tuple(options.dtypes))
    progress(f"sampling {plan.groups * plan.group_size} completions from {options.model}")
    short = sample_rollouts(
        options.model, plan.groups, plan.group_size, plan.max_new_tokens, threads=plan.threads
    )
    shapes = {"short": short, "long": with_prompt_length(short, round(LONG_FACTOR * short.mean_completion))}
    cases = []
    for name in options.shapes:
        for dtype in plan.dtypes:
            progress(f"{name} prompts ({describe(shapes[name])}), {dtype}")
            measured = measure(options.model, shapes[name], dtype, plan, options.sides)
            cases.append({"shape": name, "dtype": dtype, **lengths(shapes[name]), **measured})
    print(render(cases))
    write_report(options.json, "train_step", {"plan": asdict(plan), "cases": cases})


def measure(model: Path, rollouts: Rollouts, dtype: str, plan: Plan, names: list[str]) -> dict[str, Any]:
    """One update of each side per repeat, in turns; the first, which warms up, is checked and not counted."""
    sides: dict[str, Side] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor_seconds: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.json"
        path.write_text(json.dumps(asdict(rollouts)), encoding="utf-8")
        try:
            for name in names:
                sides[name] = Side(name, model, path, dtype, plan.threads)
                first[name] = sides[name].update()
                progress(f"  {name}: first update {first[name]}")
            check_same(first, TOLERANCE[dtype])
            for _ in range(plan.repeats):
                for name in names:
                    found = sides[name].update()
                    seconds[name].append(found["seconds"])
                    processor_seconds[name].append(found["processor_seconds"])
            memory = {name: side.finish() for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.close()
    tokens = rollouts.completion_tokens
    return {
        "loss": {name: found["loss"] for name, found in first.items()},
        "grad_norm": {name: found["grad_norm"] for name, found in first.items()},
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "tokens_per_second": {
            name: {
                "median": tokens / statistics.median(found),
                "lowest": tokens / max(found),
                "highest": tokens / min(found),
            }
            for name, found in seconds.items()
        },
        "memory": memory,
    }


def check_same(first: dict[str, dict[str, float]], tolerance: float) -> None:
    """Refuse to compare sides that did not do the same."""
    for quantity in ("loss", "grad_norm"):
        values = [found[quantity] for found in first.values()]
        if max(values) - min(values) > tolerance * max(abs(value) for value in values):
            raise SystemExit(f"the sides disagree on the first update's {quantity}: {first}")


def lengths(rollouts: Rollouts) -> dict[str, Any]:
    """What the sides have to do, in tokens."""
    completions = [len(ids) for group in rollouts.groups for ids in group.completions]
    prompts = [len(group.prompt) for group in rollouts.groups]
    size = len(rollouts.groups[0].completions)
    return {
        "prompt_tokens_mean": statistics.mean(prompts),
        "completion_tokens_mean": statistics.mean(completions),
        "completion_tokens_max": max(completions),
        "padded_tokens": len(completions) * (max(prompts) + max(completions)),
        "needed_tokens": sum(prompts) + sum(completions),
        "group_size": size,
    }


def describe(rollouts: Rollouts) -> str:
    found = lengths(rollouts)
    return (
        f"prompts of {found['prompt_tokens_mean']:.0f} tokens, completions of "
        f"{found['completion_tokens_mean']:.0f} (longest {found['completion_tokens_max']})"
    )


def render(cases: list[dict[str, Any]]) -> str:
    """One line per case and side; ratios are against TRL as it is."""
    rows = []
    for case in cases:
        for name, speed in case["tokens_per_second"].items():
            memory = case["memory"][name]["peak_anonymous_mib"]
            base = case["tokens_per_second"].get("trl", speed)["median"]
            base_memory = case["memory"].get("trl", case["memory"][name])["peak_anonymous_mib"]
            rows.append(
                [
                    case["shape"],
                    case["dtype"],
                    SIDES[name],
                    f"{speed['median']:.1f} ({speed['lowest']:.1f}–{speed['highest']:.1f})",
                    f"{speed['median'] / base:.2f}",
                    f"{memory:,.0f}",
                    f"{memory / base_memory:.2f}",
                ]
            )
    header = ["prompts", "type", "side", "completion tokens/s", "× TRL", "peak memory, MiB", "× TRL"]
    return table(header, rows)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

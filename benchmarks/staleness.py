"""How much accuracy is kept when rollouts are exactly 0 to 32 versions old, by loss and correction.

    python -m benchmarks.staleness --json FILE             # all runs; each is kept, a second call goes on
    python -m benchmarks.staleness --json FILE --quick     # six short runs, to try it
    python -m benchmarks.staleness --json FILE --plot      # and draw docs/img/staleness.png

Finished runs are appended to FILE with the suffix `.runs.jsonl`, one line each; FILE itself is the summary.
One run is `benchmarks/staleness_run.py`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table, write_report
from benchmarks.staleness_run import COMMON, Setting, as_record, run
from protocol.algorithm import AlgorithmSpec
from swarmnode.presets import TINY_ALGORITHM

LAGS = (0, 1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
COLLAPSED_BELOW = 0.7
"""A run has collapsed when it ends below this share of its own best accuracy, or when the learner halted."""
BAR_LAG, BAR_SHARE = 16, 0.95
PLOT = Path(__file__).parent.parent / "docs" / "img" / "staleness.png"

OPSM = {"off_policy_mask_threshold": 0.1}
ESS = {"ess_lr_scaling": True}
VETO = {"negative_veto_threshold": 0.5}

METHODS: dict[str, dict[str, Any]] = {
    "none": {"proximal_policy": "current"},
    "cispo": {},
    "cispo+opsm": OPSM,
    "cispo+ess": ESS,
    "cispo+opsm+ess": {**OPSM, **ESS},
    "cispo+veto+ess": {**VETO, **ESS},
    "grpo": {"loss_type": "grpo"},
    "grpo+ess": {"loss_type": "grpo", **ESS},
    "gspo": {"loss_type": "gspo"},
    "m2po": {"loss_type": "grpo", "m2_threshold": 0.04},
    "decoupled_ppo": {"loss_type": "decoupled_ppo"},
    "topr": {"loss_type": "topr"},
    "gepo": {"loss_type": "gepo"},
    "oapl": {"loss_type": "oapl", "oapl_beta2": 0.3},
}
"""Fields of `AlgorithmSpec` over `benchmarks.staleness_run.COMMON`. In "none" the ratio is always 1: the
plain policy gradient. OAPL's own β₂ of 1e-3 presumes steps that are hundreds of times smaller."""

PARTS = ("cispo+opsm", "cispo+ess", "cispo+veto+ess")
PARTS_LAGS = (0, 16, 32)
"""What each part of a combination does is asked at these lags only."""

QUICK = Setting(updates=48, eval_every=16, eval_prompts=128)
QUICK_METHODS, QUICK_LAGS, QUICK_SEEDS = ("none", "grpo", "cispo"), (0, BAR_LAG), (0,)


@dataclass(frozen=True)
class Case:
    """One run of the sweep."""

    method: str
    lag: int
    seed: int


Record = dict[str, Any]
"""A line of the runs file: a case, what it was made with, and its outcome."""


def identity(case: Case, setting: Setting) -> Record:
    """What a record must say to count as this case's."""
    return {**asdict(case), "algorithm": METHODS[case.method], "setting": asdict(setting)}


def load_runs(path: Path, cases: list[Case], setting: Setting) -> dict[Case, Record]:
    """Finished runs of these cases; lines of other settings are left alone."""
    found: dict[Case, Record] = {}
    wanted = {case: identity(case, setting) for case in cases}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        record = json.loads(line)
        case = Case(record["method"], record["lag"], record["seed"])
        if case in wanted and wanted[case].items() <= record.items():
            found[case] = record
    return found


def perform(case: Case, setting: Setting) -> Record:
    """Run a case in a worker process."""
    outcome = run(METHODS[case.method], case.lag, case.seed, setting)
    return {**identity(case, setting), **as_record(outcome)}


def sweep(path: Path, cases: list[Case], setting: Setting, jobs: int) -> dict[Case, Record]:
    """Every case's record: those on file, then the others, each appended when it ends."""
    done = load_runs(path, cases, setting)
    todo = [case for case in cases if case not in done]
    print(f"{len(done)} of {len(cases)} runs are in {path}", file=sys.stderr)
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, path.open("a", encoding="utf-8") as file:
        futures = {pool.submit(perform, case, setting): case for case in todo}
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                case, record = futures[future], future.result()
                done[case] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                left_s = (time.monotonic() - started) / count * (len(todo) - count)
                print(
                    f"[{count}/{len(todo)}] {case.method}, lag {case.lag}, seed {case.seed}: best "
                    f"{record['best']:.3f}, last {record['last']:.3f}; {left_s / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def collapsed(record: Record) -> bool:
    return record["halted"] is not None or record["last"] < COLLAPSED_BELOW * record["best"]


def alarms(done: dict[Case, Record], of_collapsed: bool) -> int:
    """Runs that the default halt rules would have stopped, of those that collapsed or of the others."""
    return sum(record["alarm"] is not None and collapsed(record) == of_collapsed for record in done.values())


def summarize(done: dict[Case, Record]) -> dict[str, dict[int, dict[str, Any]]]:
    """Per method and lag: mean, lowest and highest last and best accuracy over the seeds, and collapses."""
    result: dict[str, dict[int, dict[str, Any]]] = {}
    for method, lag in sorted({(case.method, case.lag) for case in done}, key=_order):
        records = [record for case, record in done.items() if (case.method, case.lag) == (method, lag)]
        figures: dict[str, Any] = {
            "runs": len(records),
            "collapsed": sum(map(collapsed, records)),
            "alarms": sum(record["alarm"] is not None for record in records),
        }
        for name in ("best", "last"):
            values = [record[name] for record in records]
            figures[name] = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
        for name in ("logratio_rms", "clip_fraction", "processor_seconds"):
            figures[name] = statistics.fmean(record[name] for record in records)
        result.setdefault(method, {})[lag] = figures
    return result


def _order(pair: tuple[str, int]) -> tuple[int, int]:
    return list(METHODS).index(pair[0]), pair[1]


def kept_share(by_lag: dict[int, dict[str, Any]]) -> float | None:
    """Last accuracy at the bar's lag as a share of that at lag 0."""
    if 0 not in by_lag or BAR_LAG not in by_lag:
        return None
    return float(by_lag[BAR_LAG]["last"]["mean"] / by_lag[0]["last"]["mean"])


def accuracy_table(summary: dict[str, dict[int, dict[str, Any]]], name: str) -> str:
    """Means over seeds of the "last" or "best" accuracy; † once for every collapsed run."""
    lags = sorted({lag for by_lag in summary.values() for lag in by_lag})
    rows = [
        [method]
        + [
            f"{by_lag[lag][name]['mean']:.3f}{'†' * by_lag[lag]['collapsed'] if name == 'last' else ''}"
            if lag in by_lag
            else "–"
            for lag in lags
        ]
        for method, by_lag in summary.items()
    ]
    header = ["method", *(f"lag {lag}" for lag in lags)]
    if name == "last" and BAR_LAG in lags:
        header.append(f"kept at {BAR_LAG}")
        for row, by_lag in zip(rows, summary.values(), strict=True):
            kept = kept_share(by_lag)
            row.append("–" if kept is None else f"{kept:.0%}")
    return table(header, rows)


def shipped() -> str:
    """The method that the tiny model's preset takes, whatever its learning rate."""
    rate = {"learning_rate": TINY_ALGORITHM["learning_rate"]}
    preset = AlgorithmSpec(**TINY_ALGORITHM)
    for method, fields in METHODS.items():
        if AlgorithmSpec(**{**COMMON, **fields, **rate}) == preset:
            return method
    raise ValueError("no method here is what swarmnode/presets.py ships: add it to METHODS")


def verdict(summary: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """What the shipped default keeps at the bar's lag; None when it was not run there."""
    by_lag = summary.get(shipped(), {})
    kept = kept_share(by_lag)
    if kept is None:
        return None
    collapses = by_lag[BAR_LAG]["collapsed"]
    return {
        "method": shipped(),
        "lag": BAR_LAG,
        "kept": kept,
        "collapsed": collapses,
        "met": kept >= BAR_SHARE and collapses == 0,
    }


def draw(summary: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Last accuracy over lag, one panel per method: mean and range over seeds, the default's as reference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = sorted({lag for by_lag in summary.values() for lag in by_lag})
    columns = min(4, len(summary))
    rows = -(-len(summary) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.0 * columns, 2.4 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis, (method, by_lag) in zip(axes.flat, summary.items(), strict=False):
        for name, color in (("best", "tab:gray"), ("last", "tab:blue")):
            places = [lags.index(lag) for lag in by_lag]
            axis.plot(places, [each[name]["mean"] for each in by_lag.values()], color=color, label=name)
            axis.fill_between(
                places,
                [each[name]["low"] for each in by_lag.values()],
                [each[name]["high"] for each in by_lag.values()],
                color=color,
                alpha=0.2,
                linewidth=0,
            )
        axis.set_title(method, fontsize=10)
        axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(summary) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    for axis in axes[-1, :]:
        axis.set_xlabel("lag in versions")
    axes[0, 0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="three methods, lags 0 and 16, short runs")
    parser.add_argument("--plot", action="store_true", help=f"draw docs/img/{PLOT.name}")
    parser.add_argument("--learning-rate", type=float, default=Setting.learning_rate)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    setting = Setting(learning_rate=options.learning_rate)
    if options.quick:
        setting = QUICK
        options.methods, options.lags, options.seeds = QUICK_METHODS, QUICK_LAGS, QUICK_SEEDS

    cases = [
        Case(method, lag, seed)
        for seed in options.seeds
        for lag in options.lags
        for method in options.methods
        if lag in PARTS_LAGS or method not in PARTS
    ]
    started = time.monotonic()
    done = sweep(options.json.with_suffix(".runs.jsonl"), cases, setting, options.jobs)
    summary = summarize(done)
    result = verdict(summary)
    write_report(
        options.json,
        "staleness",
        {
            "setting": asdict(setting),
            "methods": {method: METHODS[method] for method in options.methods},
            "summary": summary,
            "bar": result,
            "processor_seconds": sum(record["processor_seconds"] for record in done.values()),
            "wall_seconds": time.monotonic() - started,
        },
    )
    for name in ("last", "best"):
        print(f"\n{name} accuracy on {setting.eval_prompts} held-out questions, mean of {len(options.seeds)}")
        print(accuracy_table(summary, name))
    print(f"\n† a run that collapsed: it ended below {COLLAPSED_BELOW} of its best, or its learner halted")
    print(
        f"The learner's default halt rules would have stopped {alarms(done, True)} of the "
        f"{sum(map(collapsed, done.values()))} runs that collapsed and {alarms(done, False)} of the others"
    )
    if result is not None:
        print(
            f"{result['method']}, the default, keeps {result['kept']:.1%} of its last accuracy at lag 0 with "
            f"{result['collapsed']} collapses (bar: {BAR_SHARE:.0%} with none)"
        )
    if options.plot:
        draw(summary, PLOT)


if __name__ == "__main__":
    main()

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
from benchmarks.staleness_run import Setting, as_record, run

LAGS = (0, 1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
COLLAPSED_BELOW = 0.7
"""A run has collapsed when it ends below this share of its own best accuracy, or when the learner halted."""
DEFAULT = "cispo"
BAR_LAG, BAR_SHARE = 16, 0.95
PLOT = Path(__file__).parent.parent / "docs" / "img" / "staleness.png"

METHODS: dict[str, dict[str, Any]] = {
    "none": {"proximal_policy": "current"},
    "cispo": {},
    "grpo": {"loss_type": "grpo"},
}
"""Fields of `AlgorithmSpec`, over the tiny model's preset. "none" is the plain policy gradient: its ratio is
always 1."""

QUICK = Setting(updates=48, eval_every=16, eval_prompts=128)


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
                    f"{record['best']:.3f}, last {record['last']:.3f} in {record['seconds']:.0f} s; "
                    f"{left_s / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def collapsed(record: Record) -> bool:
    return record["halted"] is not None or record["last"] < COLLAPSED_BELOW * record["best"]


def summarize(done: dict[Case, Record]) -> dict[str, dict[int, dict[str, Any]]]:
    """Per method and lag: mean, lowest and highest last and best accuracy over the seeds, and collapses."""
    result: dict[str, dict[int, dict[str, Any]]] = {}
    for method, lag in sorted({(case.method, case.lag) for case in done}, key=_order):
        records = [record for case, record in done.items() if (case.method, case.lag) == (method, lag)]
        figures: dict[str, Any] = {"runs": len(records), "collapsed": sum(map(collapsed, records))}
        for name in ("best", "last"):
            values = [record[name] for record in records]
            figures[name] = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
        for name in ("logratio_rms", "clip_fraction", "seconds"):
            figures[name] = statistics.fmean(record[name] for record in records)
        result.setdefault(method, {})[lag] = figures
    return result


def _order(pair: tuple[str, int]) -> tuple[int, int]:
    return list(METHODS).index(pair[0]), pair[1]


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
    return table(["method", *(f"lag {lag}" for lag in lags)], rows)


def verdict(summary: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """What the default keeps at the bar's lag; None when it was not run there."""
    by_lag = summary.get(DEFAULT, {})
    if 0 not in by_lag or BAR_LAG not in by_lag:
        return None
    kept = by_lag[BAR_LAG]["last"]["mean"] / by_lag[0]["last"]["mean"]
    collapses = by_lag[BAR_LAG]["collapsed"]
    return {
        "method": DEFAULT,
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
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    setting = Setting()
    if options.quick:
        setting = QUICK
        options.methods, options.lags, options.seeds = ["none", "grpo", DEFAULT], [0, BAR_LAG], [0]

    cases = [
        Case(method, lag, seed)
        for seed in options.seeds
        for lag in options.lags
        for method in options.methods
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
            "processor_seconds": sum(record["seconds"] for record in done.values()),
            "wall_seconds": time.monotonic() - started,
        },
    )
    for name in ("last", "best"):
        print(f"\n{name} accuracy on {setting.eval_prompts} held-out questions, mean of {len(options.seeds)}")
        print(accuracy_table(summary, name))
    print(f"\n† a run that collapsed: it ended below {COLLAPSED_BELOW} of its best, or its learner halted")
    if result is not None:
        print(
            f"{DEFAULT} at lag {BAR_LAG} keeps {result['kept']:.1%} of its last accuracy at lag 0 with "
            f"{result['collapsed']} collapses (bar: {BAR_SHARE:.0%} with none)"
        )
    if options.plot:
        draw(summary, PLOT)


if __name__ == "__main__":
    main()

"""The staleness benchmark: its lags are exact, and what it counts and skips."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.staleness import (
    METHODS,
    Case,
    accuracy_table,
    collapsed,
    identity,
    kept_share,
    load_runs,
    shipped,
    summarize,
)
from benchmarks.staleness_run import Setting, run
from trainer.learner import Learner, UpdateResult

TINY = Setting(updates=4, groups=2, group_size=2, learning_rate=1e-4, eval_every=2, eval_prompts=4)


def test_every_update_trains_on_the_version_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[UpdateResult] = []
    update = Learner.update

    def recorded(learner: Learner) -> UpdateResult:
        results.append(update(learner))
        return results[-1]

    monkeypatch.setattr(Learner, "update", recorded)
    outcome = run(METHODS["cispo"], lag=2, seed=0, setting=TINY)
    assert [result.staleness for result in results] == [{0: 2}, {1: 2}, {2: 2}, {2: 2}]
    assert [len(result.consumed) for result in results] == [2, 2, 2, 2]
    assert [updates for updates, _ in outcome.curve] == [0, 2, 4]
    assert outcome.halted is None


def record(best: float, last: float, halted: str | None = None) -> dict[str, Any]:
    figures = {"logratio_rms": 0.0, "clip_fraction": 0.0, "processor_seconds": 1.0}
    return {"best": best, "last": last, "halted": halted, "alarm": None, **figures}


def test_a_run_collapses_when_it_loses_three_tenths_of_its_best_or_halts() -> None:
    assert not collapsed(record(best=0.9, last=0.64))
    assert collapsed(record(best=0.9, last=0.62))
    assert collapsed(record(best=0.9, last=0.9, halted="the loss was nan"))


def test_the_summary_is_over_seeds_and_marks_collapses() -> None:
    done = {
        Case("none", 0, 0): record(0.9, 0.9),
        Case("none", 0, 1): record(0.8, 0.8),
        Case("none", 16, 0): record(0.6, 0.2),
        Case("none", 16, 1): record(0.6, 0.6),
    }
    by_lag = summarize(done)["none"]
    assert by_lag[0]["last"] == {"mean": pytest.approx(0.85), "low": 0.8, "high": 0.9}
    assert (by_lag[16]["runs"], by_lag[16]["collapsed"]) == (2, 1)
    assert kept_share(by_lag) == pytest.approx(0.4 / 0.85)
    row = accuracy_table({"none": by_lag}, "last").splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["none", "0.850", "0.400†", "47%"]


def test_runs_on_file_count_only_for_the_same_case_and_setting(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    mine, other_setting = Case("cispo", 4, 1), Case("cispo", 8, 1)
    lines = [
        {**identity(mine, TINY), **record(0.9, 0.8)},
        {**identity(other_setting, Setting()), **record(0.9, 0.8)},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = load_runs(path, [mine, other_setting], TINY)
    assert list(found) == [mine]
    assert found[mine]["last"] == 0.8
    assert load_runs(tmp_path / "none", [mine], TINY) == {}


def test_what_the_preset_ships_is_one_of_the_methods() -> None:
    assert shipped() in METHODS

"""`swarmnode plan`: its tables, its JSON, its mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.errors import UserError
from swarmnode.cli.main import app

TABLE = "name,price_per_hour,groups_per_min,region\n" + "".join(
    f"w{i},{0.1 * (1 + i):.1f},{60},{'eu' if i % 2 else 'us'}\n" for i in range(12)
)
OPTIONS = ["--groups", "100", "--train-seconds", "20", "--version-mb", "1"]


@pytest.fixture
def offers(tmp_path: Path) -> Path:
    path = tmp_path / "offers.csv"
    path.write_text(TABLE)
    return path


def test_a_plan_says_what_works_what_it_costs_and_what_else_would(offers: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(offers), *OPTIONS, "--json", str(written)])
    assert result.exit_code == 0, result.output
    for part in ("need", "capacity", "per update", "if S were", "if all links were", "active"):
        assert part in result.output
    plan = json.loads(written.read_text())
    active = [worker["name"] for worker in plan["workers"] if worker["state"] == "active"]
    assert plan["is_enough"] and len(active) >= 5 and set(active) <= {f"w{i}" for i in range(8)}
    assert plan["capacity_groups_per_s"] >= plan["need_groups_per_s"]
    assert set(plan["if_bandwidth"]) == {"0.25", "0.5", "1.0", "2.0", "4.0"}


def test_a_plan_that_cannot_be_says_what_is_in_the_way(offers: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(offers), *OPTIONS, "--budget", "0.5"])
    assert result.exit_code == 0
    assert "not enough" in result.output and "budget" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--form", "loose"], "conservative and overlapped"),
        (["--region-mbps", "eu"], "NAME=MBPS"),
        (["--region-mbps", "eu=fast"], "NAME=MBPS"),
        (["--publish-every", "9"], "these options do not fit"),
        (["--shortfall", "0"], "these options do not fit"),
        (["--json", "/nowhere/at/all.json"], "the folder does not exist"),
    ],
)
def test_mistakes_end_as_one_line(offers: Path, options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(offers), *options])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)


def test_a_plot_is_drawn(offers: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    result = CliRunner().invoke(app, ["plan", str(offers), *OPTIONS, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")

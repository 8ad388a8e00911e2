"""`swarmnode simulate`: its tables, its JSON, its mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.errors import UserError
from swarmnode.cli.main import app


def test_a_shipped_scenario_runs_by_its_name(tmp_path: Path) -> None:
    written, picture = tmp_path / "report.json", tmp_path / "report.png"
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(
        app, ["simulate", "home_gpus", "--hours", "1", "--json", str(written), "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    for part in ("learner trains", "staleness", "wasted", "of processor time"):
        assert part in result.output
    report = json.loads(written.read_text())
    assert report["scenario"] == "home_gpus" and report["simulated_s"] == 3600
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_a_swarm_runs_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nkind = "swarm"\n[run]\nbatch_groups = 2\nexternal_groups = 2\n'
        '[[nodes]]\nname = "a"\ncount = 6\ngroups_per_min = 5\n'
    )
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 0, result.output
    assert "others' groups" in result.output


def test_the_list_names_what_ships() -> None:
    result = CliRunner().invoke(app, ["simulate", "--list"])
    assert result.exit_code == 0 and "volunteers_10000" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a scenario"),
        (["nothing"], "shipped scenarios"),
        (["home_gpus", "--policy", "luck"], "plan.policy"),
        (["home_gpus", "--json", "/nowhere/at/all.json"], "the folder does not exist"),
    ],
)
def test_mistakes_end_as_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)

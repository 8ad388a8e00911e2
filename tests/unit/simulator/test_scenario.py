"""Scenario files."""

import random
from pathlib import Path

import pytest

from swarmnode.simulator.population import draw_machines
from swarmnode.simulator.scenario import (
    ScenarioError,
    load_scenario,
    parse_scenario,
    shipped_scenarios,
)

NODE = {"name": "w", "count": 3}


def test_five_scenarios_ship_and_are_sound() -> None:
    assert shipped_scenarios() == [
        *("home_gpus", "lan_cluster", "rented_200", "sapo_5000"),
        "volunteers_10000",
    ]
    sizes = {name: sum(kind.count for kind in load_scenario(name).nodes) for name in shipped_scenarios()}
    assert sizes["home_gpus"] == 8 and sizes["rented_200"] == 200
    assert sizes["sapo_5000"] == 5_000 and sizes["volunteers_10000"] == 10_000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": [NODE], "speed": 1}, "speed: unknown key"),
        ({"nodes": []}, "nodes"),
        ({"nodes": [NODE, NODE]}, "same name"),
        ({"nodes": [NODE], "warmup_s": 7200}, "warmup_s"),
        ({"nodes": [NODE], "run": {"external_groups": 4}}, "external_groups must be 0"),
        ({"nodes": [NODE], "run": {"publish_every": 9}}, "publish_every = 9"),
        ({"nodes": [NODE | {"cheat_share": 2}]}, "nodes.0.cheat_share"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario({"name": "x", **values}, "file.toml")
    assert said in str(caught.value) and "file.toml" in str(caught.value)


def test_a_missing_file_names_what_ships(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="rented_200"):
        load_scenario(tmp_path / "nothing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ScenarioError, match="not valid TOML"):
        load_scenario(broken)


def test_machines_are_drawn_as_their_class_says_and_equally_for_equal_seeds() -> None:
    kind = {
        "name": "w",
        "count": 4000,
        "groups_per_min": 6,
        "rate_spread": 0.5,
        "price_per_hour": 1.0,
        "price_spread": 0.3,
        "cheat_share": 0.25,
        "nat_share": 0.5,
        "owners": 7,
    }
    scenario = parse_scenario({"name": "x", "nodes": [kind]}, "here")
    machines = draw_machines(scenario, random.Random(1))
    assert machines == draw_machines(scenario, random.Random(1))
    assert sum(one.groups_per_s for one in machines) / 4000 == pytest.approx(0.1, rel=0.05)
    assert sum(one.price_per_hour for one in machines) / 4000 == pytest.approx(1.0, rel=0.05)
    assert sum(one.is_cheat for one in machines) / 4000 == pytest.approx(0.25, abs=0.03)
    assert sum(not one.link.serves for one in machines) / 4000 == pytest.approx(0.5, abs=0.03)
    assert len({one.owner for one in machines}) == 7
    assert len({one.key for one in machines}) == 4000

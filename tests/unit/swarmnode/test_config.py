"""Configuration: unknown keys and bad values are one line that names file, key and problem."""

from pathlib import Path

import pytest

from swarmnode.config import ConfigError, load_config, parse_config, to_toml, with_overrides
from swarmnode.presets import demo_run_section


def test_unknown_key_names_the_file_the_key_and_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[network]\nlisten_port = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: network.listen_port: unknown key; known here: listen, announce")
    assert "\n" not in text


def test_not_toml_and_missing_files_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("role = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)
    with pytest.raises(ConfigError, match="swarmnode init"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"role": "boss"}, "role"),
        ({"name": "two\nlines"}, "name"),
        ({"api": {"port": 70000}}, "api.port"),
        ({"engine": {"threads": 0}}, "engine.threads"),
        ({"run": {"mode": "sequential"}}, "run"),
        ({"run": {"max_staleness": 1, "publish_every": 4}}, "run"),
        ({"run": {"algorithm": {"loss_type": "magic"}}}, "run.algorithm.loss_type"),
    ],
)
def test_bad_values_name_their_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: {key}: "):
        parse_config(values, "here")


@pytest.mark.parametrize("preset", ["fleet", "swarm"])
def test_printed_config_reads_back_the_same(tmp_path: Path, preset: str) -> None:
    config = parse_config({"run": demo_run_section(preset), "name": "x"}, "test")
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert load_config(path) == config


def test_overrides_replace_dotted_keys_and_are_checked() -> None:
    config = with_overrides(parse_config({}, "test"), {"api.port": 0, "network.listen": None})
    assert config.api.port == 0
    with pytest.raises(ConfigError, match=r"command line: api\.port"):
        with_overrides(config, {"api.port": -1})

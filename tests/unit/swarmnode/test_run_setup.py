"""Which role a node takes: what the run needs by default, never one that would wait for ever."""

import shutil
from pathlib import Path

import pytest

from protocol.identity import Identity
from protocol.messages import Role
from swarmnode.config import ConfigError, parse_config
from swarmnode.data_directory import DataDirectory
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.presets import demo_run_section
from swarmnode.runtime.run_setup import build_spec, find_model, resolve_role

OWNER, GUEST = Identity.from_seed(b"o" * 32), Identity.from_seed(b"g" * 32)


@pytest.mark.parametrize(
    ("preset", "who", "configured", "role"),
    [
        ("fleet", OWNER, "learner", "learner"),
        ("fleet", GUEST, None, "worker"),
        ("fleet", GUEST, "worker", "worker"),
        ("fleet", GUEST, "relay", "relay"),
        ("swarm", OWNER, "peer", "peer"),
        ("swarm", GUEST, None, "peer"),
        ("swarm", GUEST, "relay", "relay"),
        ("fleet", GUEST, "learner", None),
        ("fleet", OWNER, "peer", None),
        ("swarm", GUEST, "worker", None),
        ("swarm", GUEST, "learner", None),
    ],
)
def test_roles_by_run(preset: str, who: Identity, configured: Role | None, role: Role | None) -> None:
    run = parse_config({"run": demo_run_section(preset)}, "test").run
    assert run is not None
    spec = build_spec(run, OWNER)
    if role is None:
        with pytest.raises(ConfigError, match="join as --role"):
            resolve_role(configured, spec, who)
    else:
        assert resolve_role(configured, spec, who) == role


@pytest.mark.parametrize("preset", ["fleet", "swarm"])
def test_a_run_with_an_adapter_names_its_base_models_weights(preset: str, tmp_path: Path) -> None:
    section = demo_run_section(preset) | {"adapter": {"r": 4, "target_modules": ["q_proj"]}}
    run = parse_config({"run": section}, "test").run
    assert run is not None
    spec = build_spec(run, OWNER)
    assert spec.adapter is not None and spec.adapter.r == 4
    assert [file.path for file in spec.model.weights] == ["model.safetensors"]
    # An adapter fits one base model: a folder with other weights is refused in either preset.
    directory = DataDirectory(tmp_path / "data")
    assert find_model(spec, str(TINY_MODEL_DIR), directory) == TINY_MODEL_DIR
    other = tmp_path / "other"
    shutil.copytree(TINY_MODEL_DIR, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="weights"):
        find_model(spec, str(other), directory)

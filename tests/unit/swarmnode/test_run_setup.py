"""Which role a node takes: what the run needs by default, never one that would wait for ever."""

import pytest

from protocol.identity import Identity
from protocol.messages import Role
from swarmnode.config import ConfigError, parse_config
from swarmnode.presets import demo_run_section
from swarmnode.runtime.run_setup import build_spec, resolve_role

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

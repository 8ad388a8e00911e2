"""A small run, and groups of it that a learner accepts, for the tests of every rule."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from protocol.identity import Identity
from protocol.messages import Completion, RolloutGroup, SamplingContract, prompt_hash
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task

# How long an example takes depends on what else the machine does.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

POLICY = bytes(range(32))


@pytest.fixture
def identity() -> Identity:
    return Identity.from_seed(b"\x07" * 32)


@pytest.fixture
def spec() -> RunSpec:
    return RunSpec(
        name="test",
        nonce=b"n" * 16,
        preset="fleet",
        model=BaseModelRef(name="tiny", assets=[]),
        tasks=[
            TaskSpec(environment="reasoning_gym", name="chain_sum", config={"min_terms": 2}, weight=3.0),
            TaskSpec(environment="reasoning_gym", name="spell_backward", config={}, weight=1.0),
        ],
        sampling=SamplingContract(max_new_tokens=4, group_size=2),
        max_staleness=2,
        learners=[POLICY],
    )


def completion(version: int = 5, **changes: Any) -> Completion:
    """Two tokens that ended by themselves, unless told otherwise."""
    plain = Completion.build([3, 1], [-0.5, -1.25], [(version, 2)], "stop")
    return Completion.model_validate(dict(plain) | changes)


@pytest.fixture
def make_group(spec: RunSpec, identity: Identity) -> Callable[..., RolloutGroup]:
    def make(version: int = 5, counter: int = 9, **changes: Any) -> RolloutGroup:
        group = RolloutGroup(
            task=assigned_task(spec.tasks, spec.run_id, identity.key, POLICY, version, counter),
            policy=POLICY,
            version=version,
            counter=counter,
            prompt_hash=prompt_hash([1, 2, 3]),
            sampling=spec.sampling,
            engine="transformers",
            completions=[completion(version), completion(version)],
            rewards=[0.0, 1.0],
        )
        return group.model_copy(update=changes)

    return make

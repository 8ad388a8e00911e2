"""A run on the tiny model, and honest groups of it as a worker would send them."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages import Completion, RolloutGroup, SamplingContract, prompt_hash
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task
from swarmnode.environments import Environment, build_environment
from swarmnode.environments.prompt import ModelTokenizer, encode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR

SENDER = b"\x05" * 32
POLICY = bytes(range(32))


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return RunSpec(
        name="test",
        nonce=b"n" * 16,
        preset="swarm",
        model=BaseModelRef(name="tiny", assets=[]),
        tasks=[TaskSpec(environment="reasoning_gym", name="chain_sum", config=sums)],
        sampling=SamplingContract(max_new_tokens=6, group_size=2),
    )


@pytest.fixture(scope="session")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(TINY_MODEL_DIR)


@pytest.fixture(scope="session")
def environment(spec: RunSpec) -> Environment:
    return build_environment(spec.tasks)


@pytest.fixture(scope="session")
def right_answer(spec: RunSpec, environment: Environment) -> str:
    """The sum that `make_group`'s task asks for, found by trying."""
    task = assigned_task(spec.tasks, spec.run_id, SENDER, POLICY, 5, 9)
    return next(str(n) for n in range(-9, 20) if environment.score(task, str(n)) == 1.0)


@pytest.fixture(scope="session")
def make_group(
    spec: RunSpec, tokenizer: ModelTokenizer, environment: Environment, right_answer: str
) -> Callable[..., RolloutGroup]:
    """One right and one wrong completion, both stopped; `texts`, and any field, can be given."""

    def make(texts: tuple[str, ...] = (right_answer, "77"), **changes: Any) -> RolloutGroup:
        task = assigned_task(spec.tasks, spec.run_id, SENDER, POLICY, 5, 9)
        ids = [[*encode_completion(tokenizer, text), tokenizer.eos_ids[0]] for text in texts]
        group = RolloutGroup(
            task=task,
            policy=POLICY,
            version=5,
            counter=9,
            prompt_hash=prompt_hash(render_prompt(tokenizer, environment.question(task))),
            sampling=spec.sampling,
            engine="transformers/float32",
            completions=[
                Completion.build(each, [-0.5] * len(each), [(5, len(each))], "stop", text)
                for each, text in zip(ids, texts, strict=True)
            ],
            rewards=[environment.score(task, text) for text in texts],
        )
        return group.model_copy(update=changes)

    return make

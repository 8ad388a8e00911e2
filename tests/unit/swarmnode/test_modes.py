"""`sequential` and `async` are one code path: with a staleness bound of 0 they make the same updates, bit for
bit.

Driven through the real parts of both sides: credit, engine, checks, ledger, learner. Only the run's id, from
which tasks and sampling noise follow, is held fixed, or the two runs would be asked different questions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import save_file

from protocol.algorithm import AlgorithmSpec
from protocol.envelope import open_envelope, seal
from protocol.messages import CreditRequest, SamplingContract
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import load_tokenizer
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.models.tiny_tasks import DEMO_TASKS
from swarmnode.presets import demo_run_section
from swarmnode.processes.learner import training_group, update_message
from swarmnode.processes.rollout import RolloutWorker
from swarmnode.processes.verifier import Verifier, answer
from tests.unit.swarmnode.role_parts import LEARNER, WORKER, LearnerParts
from trainer.learner import Learner
from trainer.policy import load_policy

UPDATES = 3
GROUPS = 4
TIMES = {"update_seconds"}


def spec_of(mode: str) -> RunSpec:
    section = demo_run_section("fleet", mode=mode)
    return RunSpec(
        name="modes",
        nonce=bytes(16),
        preset="fleet",
        mode=section["mode"],
        model=BaseModelRef(name="tiny", assets=[]),
        tasks=[TaskSpec(**task) for task in DEMO_TASKS],
        sampling=SamplingContract(group_size=4, max_new_tokens=section["max_new_tokens"]),
        max_staleness=0,
        local_groups=GROUPS,
        pacing_batches=section["pacing_batches"],
        algorithm=AlgorithmSpec(**section["algorithm"]),
        learners=[LEARNER.key],
    )


async def updates_of(spec: RunSpec, folder: Path, engine: TransformersEngine) -> list[Any]:
    """What every update consumed and measured, and the weights after the last."""
    environment, tokenizer = build_environment(spec.tasks), load_tokenizer(TINY_MODEL_DIR)
    learner = Learner(load_policy(TINY_MODEL_DIR), spec, LEARNER.key)
    worker = RolloutWorker(
        spec=spec,
        policy=LEARNER.key,
        node_key=WORKER.key,
        engine=engine,
        environment=environment,
        tokenizer=tokenizer,
        probe_tolerance=0.01,
        share_text=False,
    )
    verifier = Verifier(spec, environment, tokenizer)
    folder.mkdir()
    parts = LearnerParts(folder, spec, vocabulary_size=engine.vocabulary_size)
    made: list[Any] = []
    counter = 0
    async with trio.open_nursery() as nursery:
        parts.verifier.on_send = lambda message: nursery.start_soon(
            parts.role.checks.on_message, answer(verifier, message)
        )
        parts.learner.on_send = lambda message: (
            learner.add_group(training_group(message)) if message["type"] == "group" else None
        )
        await parts.up()
        while learner.updates < UPDATES:
            weights = {name: t.to(torch.bfloat16) for name, t in learner.policy.tensors().items()}
            save_file(weights, folder / "model.safetensors")
            loaded = worker.load(
                {"version": learner.version, "path": str(folder / "model.safetensors"), "probe": None}
            )
            assert loaded["type"] == "loaded", loaded
            while not learner.ready_for_update():
                request = CreditRequest(policy=LEARNER.key, version=learner.version, wanted=3)
                granted = parts.role.credit(WORKER.key, request).granted
                assert granted, "a learner that waits for groups grants credit"
                for message in worker.generate(list(range(counter, counter + granted))):
                    encoded = seal(WORKER, spec.run_id, "rollout_group", counter + 1, message["body"])
                    receipt = await parts.role.receive_local(open_envelope(encoded, run_id=spec.run_id))
                    assert receipt.accepted, receipt
                    counter += 1
            result = learner.update()
            await parts.role.on_learner_message(update_message(result, [], None))
            figures = {name: value for name, value in result.metrics.items() if name not in TIMES}
            made.append((result.consumed, result.staleness, result.dropped, figures))
    parts.store.store.close()
    assert parts.refusals == [] and counter == UPDATES * GROUPS
    return [*made, {name: tensor.clone() for name, tensor in learner.policy.tensors().items()}]


async def test_with_a_bound_of_zero_async_makes_the_updates_of_sequential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunSpec, "run_id", property(lambda self: b"r" * 32))
    engine = TransformersEngine(TINY_MODEL_DIR, max_batch_sequences=16)
    sequential = await updates_of(spec_of("sequential"), tmp_path / "sequential", engine)
    asynchronous = await updates_of(spec_of("async"), tmp_path / "async", engine)
    assert spec_of("sequential").pacing_batches != spec_of("async").pacing_batches
    assert sequential[:-1] == asynchronous[:-1]
    one, other = sequential[-1], asynchronous[-1]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    start = load_policy(TINY_MODEL_DIR).tensors()
    assert not all(torch.equal(one[name], start[name]) for name in one), "they trained"
    assert [staleness for _, staleness, _, _ in sequential[:-1]] == [{0: GROUPS}] * UPDATES

"""One training run whose rollouts are exactly `lag` versions old: the real engine and learner, no network.

Version v is published as a node publishes it (rounded to bfloat16, a safetensors file), loaded by the seeded
engine, and makes the batch of update v + lag, which then waits in the learner's buffer. So update t trains on
version max(0, t − lag): the lag ramps up, because before update `lag` no older version exists. Every method
and lag sees the same questions with the same sampling noise at update t of a seed.
"""

import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from protocol.algorithm import AlgorithmSpec
from protocol.messages import Completion, RolloutGroup, SamplingContract, prompt_hash
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task, group_seed
from swarmnode.engines.base import GroupRequest
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.environments import Environment, build_environment
from swarmnode.environments.prompt import ModelTokenizer, decode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.models.tiny_tasks import DEMO_MAX_NEW_TOKENS, DEMO_TASKS
from swarmnode.processes.evaluation import evaluate
from trainer.collapse import CollapseWatch, HaltRules
from trainer.groups import local_group
from trainer.learner import Learner, TrainingHalted
from trainer.policy import load_policy
from trainer.snapshot_file import write_snapshot

NODE_KEY = bytes(32)
COMMON: dict[str, Any] = {
    "scale_rewards": "group",
    "max_grad_norm": 1.0,
    "off_policy_mask_threshold": None,
    "ess_lr_scaling": False,
}
"""What every method starts from, said in full so that a change of the shipped default changes no method."""
TOKEN_BUDGET = 1 << 16
"""One micro-batch holds a whole batch: the tiny model's activations are small."""


@dataclass(frozen=True)
class Setting:
    """What all runs of a sweep share."""

    updates: int = 128
    groups: int = 16
    group_size: int = 8
    learning_rate: float = 6e-4
    """Twice the preset's: with that one, even no correction at all keeps most of its accuracy at lag 16."""
    eval_every: int = 16
    eval_prompts: int = 256


@dataclass(frozen=True)
class Outcome:
    """One run: accuracy on held-out questions as (updates done, accuracy), and how it ended."""

    curve: list[tuple[int, float]]
    halted: str | None
    """Why the learner refused to go on; None when it made all updates."""
    alarm: str | None
    """When the learner's default halt rules would have stopped the run, and why. Here they only watch, so
    that what would have become of it is seen."""
    logratio_rms: float
    """Mean over the updates of the root mean square of log π/μ."""
    clip_fraction: float
    entropy: float
    """Of the last update."""
    processor_seconds: float

    @property
    def best(self) -> float:
        return max(accuracy for _, accuracy in self.curve)

    @property
    def last(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True)
class _Workshop:
    """What a process builds once for all its runs."""

    engine: TransformersEngine
    environment: Environment
    tokenizer: ModelTokenizer
    tasks: list[TaskSpec]


@cache
def _workshop() -> _Workshop:
    torch.set_num_threads(1)
    disable_progress_bar()
    tasks = [TaskSpec(**task) for task in DEMO_TASKS]
    engine = TransformersEngine(TINY_MODEL_DIR, threads=1, max_batch_sequences=256)
    return _Workshop(engine, build_environment(tasks), load_tokenizer(TINY_MODEL_DIR), tasks)


def run(algorithm: dict[str, Any], lag: int, seed: int, setting: Setting) -> Outcome:
    """Train once and measure. Deterministic but for the time it takes."""
    started = time.process_time()
    torch.manual_seed(seed)
    workshop = _workshop()
    spec = _spec(workshop.tasks, algorithm, lag, setting)
    learner = Learner(
        load_policy(TINY_MODEL_DIR),
        spec,
        NODE_KEY,
        token_budget=TOKEN_BUDGET,
        seed=seed,
        halt_rules=HaltRules(min_ess=0.0, min_entropy=0.0),
    )
    watch, alarm = CollapseWatch(HaltRules()), None
    curve: list[tuple[int, float]] = []
    drift, clipped, entropy = 0.0, 0.0, 0.0
    halted = None
    with TemporaryDirectory(prefix="staleness-") as folder:
        _publish(learner, workshop.engine, Path(folder))
        for update in range(min(lag + 1, setting.updates)):
            _generate(learner, workshop, spec, seed, update)
        _measure(curve, workshop, spec, setting)
        while learner.updates < setting.updates:
            lag_due = min(learner.updates, lag)
            try:
                result = learner.update()
            except TrainingHalted as error:
                halted = str(error)
                break
            if result.staleness != {lag_due: setting.groups} or result.dropped:
                raise AssertionError(f"lag {lag_due} was due, the learner consumed {result.staleness}")
            reason = watch.observe(result.version - 1, result.metrics)
            alarm = alarm or (reason and f"update {result.version}: {reason}")
            drift += result.metrics["logratio_rms"]
            clipped += result.metrics["clip_fraction"]
            entropy = result.metrics["entropy"]
            _publish(learner, workshop.engine, Path(folder))
            if learner.updates + lag < setting.updates:
                _generate(learner, workshop, spec, seed, learner.updates + lag)
            if learner.updates % setting.eval_every == 0 or learner.updates == setting.updates:
                _measure(curve, workshop, spec, setting)
    if curve[-1][0] != learner.updates:
        _measure(curve, workshop, spec, setting)
    done = max(learner.updates, 1)
    return Outcome(curve, halted, alarm, drift / done, clipped / done, entropy, time.process_time() - started)


def as_record(outcome: Outcome) -> dict[str, Any]:
    """A run's line in the file of runs."""
    return {**asdict(outcome), "best": outcome.best, "last": outcome.last}


def _spec(tasks: list[TaskSpec], algorithm: dict[str, Any], lag: int, setting: Setting) -> RunSpec:
    return RunSpec(
        name="staleness",
        nonce=bytes(16),
        preset="fleet",
        learners=[NODE_KEY],
        model=BaseModelRef(name="tiny", assets=[]),
        tasks=tasks,
        sampling=SamplingContract(max_new_tokens=DEMO_MAX_NEW_TOKENS, group_size=setting.group_size),
        max_staleness=lag,
        local_groups=setting.groups,
        algorithm=AlgorithmSpec(**{**COMMON, "learning_rate": setting.learning_rate, **algorithm}),
    )


def _publish(learner: Learner, engine: TransformersEngine, folder: Path) -> None:
    """Hand the learner's weights to the engine, as workers get them."""
    path = folder / "model.safetensors"
    write_snapshot(path, learner.policy.tensors())
    engine.load(path, learner.version)


def _generate(learner: Learner, workshop: _Workshop, spec: RunSpec, seed: int, update: int) -> None:
    """The batch that `update` will consume, from the version that the engine has now."""
    version = workshop.engine.version
    assert version is not None
    # Names of tasks and noise: those of a run would differ from method to method.
    run_id = seed.to_bytes(32, "big")
    names = [(run_id, NODE_KEY, NODE_KEY, update, place) for place in range(spec.local_groups)]
    tasks = [assigned_task(workshop.tasks, *name) for name in names]
    prompts = [render_prompt(workshop.tokenizer, workshop.environment.question(task)) for task in tasks]
    requests = [
        GroupRequest(prompt, group_seed(*name), spec.sampling.group_size)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    found = workshop.engine.generate(
        requests, temperature=spec.sampling.temperature, max_new_tokens=spec.sampling.max_new_tokens
    )
    for place, (task, prompt, completions) in enumerate(zip(tasks, prompts, found, strict=True)):
        rewards = [
            float(workshop.environment.score(task, decode_completion(workshop.tokenizer, each.token_ids)))
            for each in completions
        ]
        group = RolloutGroup(
            task=task,
            policy=NODE_KEY,
            version=version,
            counter=place,
            prompt_hash=prompt_hash(prompt),
            sampling=spec.sampling,
            engine=workshop.engine.name,
            completions=[
                Completion.build(each.token_ids, each.logprobs, each.version_runs, each.finish)
                for each in completions
            ],
            rewards=rewards,
        )
        name = update.to_bytes(8, "big") + place.to_bytes(8, "big")
        learner.add_group(local_group(name, group, prompt, rewards))


def _measure(curve: list[tuple[int, float]], workshop: _Workshop, spec: RunSpec, setting: Setting) -> None:
    """Score the version that the engine has now on the held-out questions."""
    engine = workshop.engine
    assert engine.version is not None
    result = evaluate(
        engine,
        workshop.environment,
        workshop.tokenizer,
        spec,
        count=setting.eval_prompts,
        batch_size=engine.max_batch_sequences,
    )
    assert result is not None
    curve.append((engine.version, result.accuracy))

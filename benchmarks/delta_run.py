"""A real GRPO run that publishes as a learner does: rollouts by the engine, rewards by the environment, steps
by the learner, files by its store."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.delta_codec import peak_of
from protocol.messages import Completion, RolloutGroup, SamplingContract, group_id, prompt_hash
from protocol.run_spec import AlgorithmSpec, BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task, group_seed
from swarmnode.engines.base import GroupRequest
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.environments import Environment, build_environment
from swarmnode.environments.prompt import ModelTokenizer, decode_completion, load_tokenizer, render_prompt
from trainer.groups import TrainingGroup, local_group
from trainer.learner import Learner
from trainer.policy import load_policy
from trainer.store import LearnerStore

POLICY = bytes(32)
TASKS = [
    TaskSpec(
        environment="reasoning_gym",
        name="chain_sum",
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
]
MAX_ROUNDS = 4
"""Batches that are made for one update until a group has unequal rewards: without one nothing changes."""


@dataclass(frozen=True)
class Setting:
    versions: int
    """Updates, each published."""
    learning_rate: float
    groups: int
    group_size: int
    max_new_tokens: int
    threads: int
    checkpoint_every: int
    seed: int = 0


@dataclass(frozen=True)
class Version:
    """What the run says of one published version."""

    version: int
    generate_s: float
    update_s: float
    publish_s: float
    publish_memory_mb: float
    """Most memory that publishing took for a while: the probe's included."""
    checkpoint_s: float | None
    reward_mean: float
    informative_groups: int
    grad_norm: float
    learning_rate: float


def train(model: Path, folder: Path, setting: Setting) -> tuple[Path, list[Version]]:
    """Make `setting.versions` updates; returns the folder of the published versions, and what each took."""
    torch.manual_seed(setting.seed)
    torch.set_num_threads(setting.threads)
    spec = RunSpec(
        name="delta",
        nonce=bytes(16),
        preset="fleet",
        learners=[POLICY],
        model=BaseModelRef(name=model.name, assets=[]),
        tasks=TASKS,
        sampling=SamplingContract(max_new_tokens=setting.max_new_tokens, group_size=setting.group_size),
        # So that no published version is deleted before it is measured.
        max_staleness=setting.versions,
        local_groups=setting.groups,
        partial_credit=True,
        algorithm=AlgorithmSpec(loss_type="grpo", learning_rate=setting.learning_rate),
    )
    rollouts = Rollouts(model, spec, setting.threads)
    learner = Learner(load_policy(model), spec, POLICY, seed=setting.seed)
    store = LearnerStore(
        folder,
        learner,
        rollouts.probe_tokens(),
        checkpoint_keep=1,
        checkpoint_every=setting.checkpoint_every,
    )
    publication = store.resume()
    versions = []
    for _ in range(setting.versions):
        peaks = {"publish": 0}
        started = time.perf_counter()
        rollouts.engine.load(publication.path, publication.version)
        groups = rollouts.batch(learner.version)
        for group in groups:
            learner.add_group(group)
        generated = time.perf_counter()
        result = learner.update()
        updated = time.perf_counter()
        with peak_of("publish", peaks):
            published = store.publish(must=True)
        assert published is not None
        publication = published
        done = time.perf_counter()
        wrote = store.checkpoint()
        version = Version(
            version=learner.version,
            generate_s=generated - started,
            update_s=updated - generated,
            publish_s=done - updated,
            publish_memory_mb=round(peaks["publish"] / 1e6, 1),
            checkpoint_s=time.perf_counter() - done if wrote else None,
            reward_mean=result.metrics["reward_mean"],
            informative_groups=sum(group.is_informative for group in groups),
            grad_norm=result.metrics["grad_norm"],
            learning_rate=result.metrics["learning_rate"],
        )
        versions.append(version)
        print(f"version {version.version}: {describe(version)}", file=sys.stderr, flush=True)
    return store.publications, versions


def describe(version: Version) -> str:
    checkpoint = "" if version.checkpoint_s is None else f", checkpoint {version.checkpoint_s:.1f} s"
    return (
        f"generate {version.generate_s:.1f} s, update {version.update_s:.1f} s, publish "
        f"{version.publish_s:.2f} s{checkpoint}; reward {version.reward_mean:.3f}, "
        f"{version.informative_groups} groups teach, gradient {version.grad_norm:.3g}"
    )


def as_record(version: Version) -> dict[str, Any]:
    return asdict(version)


class Rollouts:
    """The worker's side: questions of the run, answered by the seeded engine, scored by the environment."""

    def __init__(self, model: Path, spec: RunSpec, threads: int) -> None:
        self._spec = spec
        self._tokenizer: ModelTokenizer = load_tokenizer(model)
        self._environment: Environment = build_environment(spec.tasks, spec.partial_credit)
        self.engine = TransformersEngine(model, dtype="bfloat16", threads=threads)
        self._counter = 0

    def probe_tokens(self) -> list[int]:
        task = assigned_task(self._spec.tasks, self._spec.run_id, POLICY, POLICY, 0, 0)
        return render_prompt(self._tokenizer, self._environment.question(task))[:64]

    def batch(self, version: int) -> list[TrainingGroup]:
        """The groups of one update, of which at least one teaches something."""
        for _ in range(MAX_ROUNDS):
            groups = self._groups(version)
            if any(group.is_informative for group in groups):
                return groups
        raise RuntimeError(f"no group of {MAX_ROUNDS} batches has unequal rewards: raise --groups")

    def _groups(self, version: int) -> list[TrainingGroup]:
        spec = self._spec
        counters = range(self._counter, self._counter + spec.local_groups)
        self._counter += spec.local_groups
        names = [(spec.run_id, POLICY, POLICY, version, counter) for counter in counters]
        tasks = [assigned_task(spec.tasks, *name) for name in names]
        prompts = [render_prompt(self._tokenizer, self._environment.question(task)) for task in tasks]
        found = self.engine.generate(
            [
                GroupRequest(prompt, group_seed(*name), spec.sampling.group_size)
                for prompt, name in zip(prompts, names, strict=True)
            ],
            temperature=spec.sampling.temperature,
            max_new_tokens=spec.sampling.max_new_tokens,
        )
        groups = []
        for counter, task, prompt, completions in zip(counters, tasks, prompts, found, strict=True):
            rewards = [
                float(self._environment.score(task, decode_completion(self._tokenizer, each.token_ids)))
                for each in completions
            ]
            group = RolloutGroup(
                task=task,
                policy=POLICY,
                version=version,
                counter=counter,
                prompt_hash=prompt_hash(prompt),
                sampling=spec.sampling,
                engine=self.engine.name,
                completions=[
                    Completion.build(each.token_ids, each.logprobs, each.version_runs, each.finish)
                    for each in completions
                ],
                rewards=rewards,
            )
            groups.append(local_group(group_id(POLICY, group.encode()), group, prompt, rewards))
        return groups

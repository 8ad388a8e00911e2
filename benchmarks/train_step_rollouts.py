"""Completions to train on: the model's own answers to short questions, and the same after longer prompts."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from protocol.tasks import TaskSpec, held_out_tasks
from swarmnode.engines.base import GroupRequest
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import load_tokenizer, render_prompt

TASK = TaskSpec(environment="reasoning_gym", name="chain_sum", config={"min_terms": 2, "max_terms": 4})


@dataclass(frozen=True)
class RolloutsGroup:
    """A prompt, its completions, and made-up rewards: half of them right."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


@dataclass(frozen=True)
class Rollouts:
    groups: list[RolloutsGroup]

    @property
    def completion_tokens(self) -> int:
        return sum(len(ids) for group in self.groups for ids in group.completions)

    @property
    def mean_completion(self) -> float:
        return statistics.mean(len(ids) for group in self.groups for ids in group.completions)


def sample_rollouts(
    model: Path, groups: int, group_size: int, max_new_tokens: int, *, threads: int
) -> Rollouts:
    """Seeded: the same every time on one kind of machine."""
    tokenizer, environment = load_tokenizer(model), build_environment([TASK])
    engine = TransformersEngine(model, dtype="bfloat16", threads=threads)
    engine.load(model / "model.safetensors", 0)
    prompts = [
        render_prompt(tokenizer, environment.question(task)) for task in held_out_tasks([TASK], groups)
    ]
    requests = [GroupRequest(prompt, seed, group_size) for seed, prompt in enumerate(prompts)]
    found = engine.generate(requests, temperature=1.0, max_new_tokens=max_new_tokens)
    rewards = [float(index < group_size // 2) for index in range(group_size)]
    return Rollouts(
        [
            RolloutsGroup(prompt, [each.token_ids for each in completions], rewards)
            for prompt, completions in zip(prompts, found, strict=True)
        ]
    )


def with_prompt_length(rollouts: Rollouts, length: int) -> Rollouts:
    """The same with every prompt repeated or cut to `length` tokens: only their length costs anything."""
    return Rollouts(
        [
            RolloutsGroup(
                (group.prompt * (length // len(group.prompt) + 1))[-length:], group.completions, group.rewards
            )
            for group in rollouts.groups
        ]
    )


def read_rollouts(path: Path) -> Rollouts:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Rollouts([RolloutsGroup(**group) for group in content["groups"]])

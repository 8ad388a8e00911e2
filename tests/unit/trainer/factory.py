"""Small models, runs and groups to train on."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.messages import Completion, RolloutGroup, SamplingContract, prompt_hash
from protocol.run_spec import AlgorithmSpec, BaseModelRef, RunSpec
from protocol.tasks import TaskRef, TaskSpec
from trainer.groups import TrainingGroup, local_group
from trainer.learner import Learner
from trainer.policy import Policy

VOCABULARY = 24
POLICY_ID = bytes(range(32))
TASK = TaskSpec(
    environment="reasoning_gym", name="chain_sum", config={"min_terms": 2, "max_terms": 2, "max_digits": 1}
)


def tiny_model(seed: int = 0, *, tied: bool = True, rounded: bool = False) -> LlamaForCausalLM:
    """A random Llama with 24 tokens. `rounded`: its weights are bfloat16 values."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.2,
            tie_word_embeddings=tied,
        )
    )
    if rounded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def save_model(folder: Path, model: LlamaForCausalLM | None = None) -> Path:
    (model or tiny_model()).save_pretrained(folder)
    return folder


def run_spec(**changes: Any) -> RunSpec:
    """Two groups of four per update, staleness bound 2."""
    algorithm = AlgorithmSpec(learning_rate=1e-2, **changes.pop("algorithm", {}))
    fields: dict[str, Any] = {
        "name": "test",
        "nonce": bytes(16),
        "preset": "swarm",
        "model": BaseModelRef(name="tiny", assets=[], chunk_size=4096),
        "tasks": [TASK],
        "sampling": SamplingContract(group_size=4, max_new_tokens=8),
        "max_staleness": 2,
        "local_groups": 2,
        "algorithm": algorithm,
    }
    return RunSpec(**{**fields, **changes})


def learner(spec: RunSpec | None = None, *, model_seed: int = 0, **settings: Any) -> Learner:
    return Learner(Policy(tiny_model(model_seed)), spec or run_spec(), POLICY_ID, **settings)


def rollout_group(
    number: int,
    *,
    version: int = 0,
    rewards: list[float] | None = None,
    vocabulary: int = VOCABULARY,
    prompt_ids: list[int] | None = None,
    spans: int = 1,
) -> tuple[RolloutGroup, list[int]]:
    """A group with random tokens and log-probs, the same for the same number, and its prompt.

    Its weights changed in flight `spans` − 1 times: after the first token, after the second, …
    """
    rng = np.random.default_rng(number)
    rewards = rewards if rewards is not None else [1.0, 0.0, 0.0, 1.0]
    prompt = prompt_ids or rng.integers(0, vocabulary, size=int(rng.integers(2, 12))).tolist()
    completions = []
    for _ in rewards:
        count = int(rng.integers(1, 9))
        completions.append(
            Completion.build(
                rng.integers(0, vocabulary, size=count).tolist(),
                (-rng.uniform(1.0, 5.0, size=count)).tolist(),
                version_runs(version, count, spans),
                "length" if count == 8 else "stop",
            )
        )
    group = RolloutGroup(
        task=TaskRef(environment="reasoning_gym", config_hash=TASK.config_hash, seed=number),
        policy=POLICY_ID,
        version=version,
        counter=number,
        prompt_hash=prompt_hash(prompt),
        sampling=SamplingContract(group_size=len(rewards), max_new_tokens=8),
        engine="test",
        completions=completions,
        rewards=rewards,
    )
    return group, prompt


def version_runs(version: int, count: int, spans: int) -> list[tuple[int, int]]:
    """One token of each version but the last."""
    runs = [(version + place, 1) for place in range(min(spans, count))]
    return [*runs[:-1], (runs[-1][0], count - len(runs) + 1)]


def group_name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def training_group(number: int, **changes: Any) -> TrainingGroup:
    group, prompt = rollout_group(number, **changes)
    return local_group(group_name(number), group, prompt, group.rewards)

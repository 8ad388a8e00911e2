"""Loss and gradients equal those of TRL's GRPOTrainer, under the same names for the same options.

One fixed batch of stale groups goes through a learner, in several micro-batches, and through TRL's
`compute_loss`. float32, a random model of two layers; what differs is the order of sums.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from protocol.messages import SamplingContract
from tests.unit.trainer.factory import POLICY_ID, group_name, rollout_group, run_spec, tiny_model
from trainer.groups import TrainingGroup, local_group
from trainer.learner import Learner
from trainer.policy import Policy

MAX_NEW_TOKENS = 8
GROUP_SIZE = 4
TEMPERATURE = 0.8
REWARDS = ([1.0, 0.0, 0.0, 1.0], [0.25, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0])


def behavior_model() -> torch.nn.Module:
    """The policy of the groups: the learner's, some noise away."""
    model = tiny_model(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def logprobs_of(model: torch.nn.Module, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
    with torch.no_grad():
        distribution = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
    places = range(len(prompt), ids.shape[1])
    return np.float32([distribution[place - 1, ids[0, place]] for place in places])


@pytest.fixture(scope="module")
def groups() -> list[TrainingGroup]:
    behavior = behavior_model()
    made = []
    for number, rewards in enumerate(REWARDS):
        message, prompt = rollout_group(number, rewards=rewards)
        group = local_group(group_name(number), message, prompt, rewards)
        logprobs = tuple(logprobs_of(behavior, group.prompt_ids, tokens) for tokens in group.completions)
        made.append(TrainingGroup(**{**vars(group), "behavior_logprobs": logprobs}))
    return made


def trl_inputs(groups: list[TrainingGroup], scale_rewards: str) -> dict[str, torch.Tensor]:
    """The batch as TRL collates it: prompts padded on the left, completions on the right."""
    rows = [(group, index) for group in groups for index in range(GROUP_SIZE)]
    width = max(len(group.prompt_ids) for group, _ in rows)
    prompts, prompt_mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    completions, mask = torch.zeros(2, len(rows), MAX_NEW_TOKENS, dtype=torch.long)
    old = torch.zeros(len(rows), MAX_NEW_TOKENS)
    for row, (group, index) in enumerate(rows):
        tokens, length = group.completions[index], len(group.prompt_ids)
        prompts[row, width - length :] = torch.from_numpy(group.prompt_ids)
        prompt_mask[row, width - length :] = 1
        completions[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
        assert group.behavior_logprobs is not None
        old[row, : len(tokens)] = torch.from_numpy(group.behavior_logprobs[index])
    rewards = torch.tensor([group.rewards for group in groups])
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (rewards.std() + 1e-4)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }


def trl_trainer(folder: Path, **options: Any) -> Any:
    # Imported here: that takes seconds, which whoever runs other tests of this folder should not wait.
    import datasets
    import trl
    from transformers import AutoTokenizer

    from swarmnode.models import TINY_MODEL_DIR

    beta = options.pop("beta", 0.0)
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(REWARDS) * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=TEMPERATURE,
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=tiny_model(0),
        reward_funcs=lambda **_: [0.0] * GROUP_SIZE,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "1"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(TINY_MODEL_DIR),
    )
    trainer.beta = beta  # Not by its arguments: it would look for the base model on a hub.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ours(
    groups: list[TrainingGroup], options: dict[str, Any], token_budget: int
) -> tuple[float, dict[str, torch.Tensor]]:
    spec = run_spec(
        local_groups=len(groups),
        algorithm=options,
        sampling=SamplingContract(
            group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE
        ),
    )
    reference = Policy(tiny_model(7)) if options.get("beta") else None
    one = Learner(Policy(tiny_model(0)), spec, POLICY_ID, token_budget=token_budget, reference=reference)
    for group in groups:
        one.add_group(group)
    kept: dict[str, torch.Tensor] = {}
    clip = one.optimizer.clip_gradients

    def keep() -> float:
        kept.update(gradients_of(one.policy.model))
        return clip()

    one.optimizer.clip_gradients = keep  # type: ignore[method-assign]
    return one.update().metrics["loss"], kept


def theirs(
    folder: Path, groups: list[TrainingGroup], options: dict[str, Any], extra: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = trl_trainer(folder, **options)
    inputs: dict[str, Any] = trl_inputs(groups, trainer.scale_rewards) | extra
    if options.get("beta"):
        inputs["ref_per_token_logps"] = torch.zeros_like(inputs["old_per_token_logps"])
        for row in range(len(inputs["advantages"])):
            group, index = groups[row // GROUP_SIZE], row % GROUP_SIZE
            tokens = group.completions[index]
            values = logprobs_of(tiny_model(7), group.prompt_ids, tokens)
            inputs["ref_per_token_logps"][row, : len(tokens)] = torch.from_numpy(values)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), gradients_of(trainer.model)


def assert_equal(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-5)
    assert one[1].keys() == other[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in other[1].values())
    assert largest > 1e-3, "the batch must push"
    for name, gradient in one[1].items():
        torch.testing.assert_close(
            gradient, other[1][name], rtol=1e-4, atol=1e-5 * max(1.0, largest), msg=name
        )


CASES: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "scale_rewards": "batch", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss_type": "grpo", "delta": 1.5},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "dapo", "epsilon_high": 0.28, "off_policy_mask_threshold": 0.02},
    {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.4},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1},
    {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_loss_and_gradients_are_trls(
    groups: list[TrainingGroup], options: dict[str, Any], tmp_path: Path
) -> None:
    reference = theirs(tmp_path, groups, options, {})
    for token_budget in (10_000, 30):
        assert_equal(ours(groups, options, token_budget), reference)


def test_gspo_is_trls_grpo_at_the_sequence_level(groups: list[TrainingGroup], tmp_path: Path) -> None:
    bounds = {"epsilon": 0.02, "epsilon_high": 0.03}
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence", **bounds}
    reference = theirs(tmp_path, groups, options, {})
    assert_equal(ours(groups, {"loss_type": "gspo", **bounds}, 30), reference)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_sampling_is_trls_against_its_inference_engine(
    groups: list[TrainingGroup], mode: str, tmp_path: Path
) -> None:
    """TRL recomputes the old log-probs when it trains, so that its own ratio is 1, and weights by what they
    differ from the engine's: our `proximal_policy` "current"."""
    low, high = (0.3, 2.0) if mode.startswith("sequence") else (0.8, 1.25)
    bounds = {"importance_sampling_clip_min": low, "importance_sampling_clip_max": high}
    options = {"loss_type": "dapo", "proximal_policy": "current", "importance_sampling_mode": mode, **bounds}
    inputs = trl_inputs(groups, "group")
    policy, mask = tiny_model(0), inputs["completion_mask"]
    current = torch.zeros_like(inputs["old_per_token_logps"])
    for row in range(len(current)):
        group, tokens = groups[row // GROUP_SIZE], groups[row // GROUP_SIZE].completions[row % GROUP_SIZE]
        current[row, : len(tokens)] = torch.from_numpy(logprobs_of(policy, group.prompt_ids, tokens))
    difference = (current - inputs["old_per_token_logps"]) * mask
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    weight = (
        ratio.clamp(low, high) if mode.endswith("truncate") else ratio * (ratio.clamp(low, high) == ratio)
    )
    assert 0 < float(((weight != ratio) * mask).float().mean()) < 1, "some are cut, some are not"

    trainer = trl_trainer(tmp_path, loss_type="dapo", epsilon_high=0.28)
    trainer.use_vllm = True  # The branch that reads the weights; no engine is started.
    inputs.pop("old_per_token_logps")
    loss = trainer.compute_loss(trainer.model, inputs | {"importance_sampling_ratio": weight})
    loss.backward()
    reference = float(loss.detach()), gradients_of(trainer.model)
    assert_equal(ours(groups, cast(dict[str, Any], options), 30), reference)

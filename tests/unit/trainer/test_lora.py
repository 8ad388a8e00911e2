"""Adapters: the model plus (alpha / r) · B·A in the chosen layers; nothing else is trained, kept or sent."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.adapter import AdapterSpec
from protocol.run_spec import BaseModelRef, RunSpec, WeightsFile
from tests.unit.trainer.factory import POLICY_ID, run_spec, save_model, tiny_model, training_group
from tests.unit.trainer.test_policy import uneven_batch
from trainer.checkpoint import load_newest, write_checkpoint
from trainer.learner import Learner
from trainer.lora import adapter_tensors
from trainer.policy import BasePolicy, Policy, PolicyLoadError, load_policy

SPEC = AdapterSpec(r=3, alpha=4.5, target_modules=["q_proj", "v_proj", "mlp.down_proj"])


def adapter_run(**changes: object) -> RunSpec:
    weights = WeightsFile(path="model.safetensors", size_bytes=1, chunks=[bytes(32)])
    return run_spec(
        adapter=SPEC,
        model=BaseModelRef(name="tiny", assets=[], weights=[weights], chunk_size=4096),
        local_groups=1,
        **changes,
    )


def adapted(folder: Path, seed: int = 0) -> Policy:
    return load_policy(save_model(folder), adapter=SPEC, seed=seed)


def with_random_b(policy: Policy) -> Policy:
    """As after some training: B is no longer 0."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in policy.tensors().items():
        if name.endswith("lora_B.weight"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return policy


def test_a_new_adapter_changes_nothing_and_follows_from_its_seed(tmp_path: Path) -> None:
    batch = uneven_batch()
    expected = Policy(tiny_model()).token_logprobs(batch, 1.0).logprobs_BT
    policy = adapted(tmp_path)
    assert torch.equal(policy.token_logprobs(batch, 1.0).logprobs_BT, expected)
    again, other = adapted(tmp_path), adapted(tmp_path, seed=1)
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in policy.tensors().items())
    assert not all(torch.equal(other.tensors()[name], tensor) for name, tensor in policy.tensors().items())


def test_what_is_trained_are_the_matrices_of_the_chosen_layers(tmp_path: Path) -> None:
    policy = adapted(tmp_path)
    expected = {}
    for layer in range(2):
        for name, inputs, outputs in (
            ("self_attn.q_proj", 16, 16),
            ("self_attn.v_proj", 16, 8),
            ("mlp.down_proj", 32, 16),
        ):
            expected[f"model.layers.{layer}.{name}.lora_A.weight"] = (3, inputs)
            expected[f"model.layers.{layer}.{name}.lora_B.weight"] = (outputs, 3)
    assert {name: tuple(tensor.shape) for name, tensor in policy.tensors().items()} == expected
    assert {id(p) for p in policy.model.parameters() if p.requires_grad} == {
        id(p) for p in adapter_tensors(policy.model).values()
    }


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_adapted_model_is_the_model_with_the_product_added_to_its_weights(
    tmp_path: Path, share_prompts: bool
) -> None:
    policy, batch = with_random_b(adapted(tmp_path)), uneven_batch()
    policy.share_prompts = share_prompts
    merged = tiny_model()
    tensors = policy.tensors()
    with torch.no_grad():
        for name, matrix in list(tensors.items()):
            if name.endswith("lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                product = tensors[f"{layer}.lora_B.weight"] @ matrix
                merged.get_parameter(f"{layer}.weight").add_(4.5 / 3 * product)
    expected = Policy(merged).token_logprobs(batch, 0.7)
    actual = policy.token_logprobs(batch, 0.7)
    torch.testing.assert_close(actual.logprobs_BT, expected.logprobs_BT, rtol=1e-5, atol=1e-5)
    # d loss / d A = (alpha / r) · Bᵀ · d loss / d W, and the same for B.
    actual.logprobs_BT.sum().backward()
    expected.logprobs_BT.sum().backward()
    layer = "model.layers.1.mlp.down_proj"
    gradient = merged.get_parameter(f"{layer}.weight").grad
    assert gradient is not None
    live = adapter_tensors(policy.model)
    a, b = live[f"{layer}.lora_A.weight"], live[f"{layer}.lora_B.weight"]
    torch.testing.assert_close(a.grad, 1.5 * b.detach().T @ gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.grad, 1.5 * gradient @ a.detach().T, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)


def test_updates_train_the_adapter_and_leave_the_base_model(tmp_path: Path) -> None:
    learner = Learner(adapted(tmp_path), adapter_run(), POLICY_ID)
    before = {name: p.detach().clone() for name, p in learner.policy.model.named_parameters()}
    for number in range(3):
        learner.add_group(training_group(number, version=number))
        assert learner.update().metrics["grad_norm"] > 0
    for name, parameter in learner.policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_a_learner_resumes_with_its_adapter_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight = Learner(adapted(tmp_path / "model"), adapter_run(), POLICY_ID)
    straight.add_group(training_group(0))
    straight.update()
    write_checkpoint(tmp_path / "checkpoints", straight.checkpoint(), keep=1)
    checkpoint = load_newest(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.model.keys() == straight.policy.tensors().keys()
    resumed = Learner(adapted(tmp_path / "model", seed=5), adapter_run(), POLICY_ID)
    resumed.restore(checkpoint)
    for each in (straight, resumed):
        each.add_group(training_group(1, version=1))
        each.update()
    for name, tensor in straight.policy.tensors().items():
        assert torch.equal(resumed.policy.tensors()[name], tensor), name


def test_the_base_model_is_there_without_a_copy(tmp_path: Path) -> None:
    policy, batch = with_random_b(adapted(tmp_path)), uneven_batch()
    expected = Policy(tiny_model()).token_logprobs(batch, 1.0).logprobs_BT
    before = policy.token_logprobs(batch, 1.0).logprobs_BT
    assert torch.equal(BasePolicy(policy).token_logprobs(batch, 1.0).logprobs_BT, expected)
    assert torch.equal(policy.token_logprobs(batch, 1.0).logprobs_BT, before)
    assert not torch.allclose(before, expected)


def test_the_probe_rounds_the_adapter_and_not_its_base(tmp_path: Path) -> None:
    policy = with_random_b(adapted(tmp_path))
    tokens = [1, 5, 2, 7]
    rounded = with_random_b(adapted(tmp_path))
    for tensor in rounded.tensors().values():
        tensor.copy_(tensor.bfloat16().float())
    with policy.rounded_to_bfloat16():
        assert policy.sequence_logprobs(tokens) == rounded.sequence_logprobs(tokens)
    assert policy.sequence_logprobs(tokens) != rounded.sequence_logprobs(tokens)


def test_in_bfloat16_the_base_is_kept_in_it_and_the_adapter_in_float32(tmp_path: Path) -> None:
    exact = with_random_b(adapted(tmp_path))
    policy = with_random_b(load_policy(tmp_path, adapter=SPEC, dtype="bfloat16"))
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    batch = uneven_batch()
    rough = policy.token_logprobs(batch, 1.0).logprobs_BT
    difference = (rough - exact.token_logprobs(batch, 1.0).logprobs_BT).detach() * batch.mask_BT
    assert 0 < float(difference.abs().max()) < 0.3
    rough.sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in adapter_tensors(policy.model).values()
    )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("c_attn", r"no linear layer c_attn; it has down_proj, .*q_proj"),
        ("lm_head", "lm_head is lm_head, which can have no adapter"),
        ("embed_tokens", "can have no adapter"),
        ("mlp", "can have no adapter"),
    ],
)
def test_layers_that_can_have_no_adapter_are_named(tmp_path: Path, target: str, says: str) -> None:
    with pytest.raises(PolicyLoadError, match=says):
        load_policy(save_model(tmp_path), adapter=AdapterSpec(target_modules=[target]))


def test_the_random_state_of_the_process_is_not_touched(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    save_model(tmp_path, tiny_model())
    torch.manual_seed(3)
    load_policy(tmp_path, adapter=SPEC)
    assert np.float32(torch.rand(1)) == np.float32(expected)

"""Log-probs of completions: equal to the definition, however prompts are shared, padded and batched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from tests.unit.trainer.factory import VOCABULARY, save_model, tiny_model
from trainer.batching import MicroBatch, PromptRows, TrainingRow, collate
from trainer.policy import Policy, PolicyLoadError, load_policy
from trainer.shared_prompts import can_share_prompts, longest_exact


def uneven_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    groups = []
    for prompt, lengths in ((2, [1, 6]), (9, [3]), (5, [4, 2, 1])):
        rows = tuple(TrainingRow(rng.integers(0, VOCABULARY, size=n), None, 0.0) for n in lengths)
        groups.append(PromptRows(rng.integers(0, VOCABULARY, size=prompt), rows))
    return collate(groups)


def one_by_one(
    model: PreTrainedModel, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: log-probs and entropies of each row alone, without padding, masks or caches."""
    logprobs, entropies = torch.zeros_like(batch.mask_BT), torch.zeros_like(batch.mask_BT)
    for row, prompt_index in enumerate(batch.row_prompts_B.tolist()):
        prompt = batch.prompt_ids_PL[prompt_index, : batch.prompt_lengths_P[prompt_index]]
        count = int(batch.mask_BT[row].sum())
        ids = torch.cat([prompt, batch.completion_ids_BT[row, :count]])
        distribution = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)
        for place in range(count):
            at = len(prompt) + place
            logprobs[row, place] = distribution[at - 1, ids[at]]
            entropies[row, place] = -(distribution[at - 1].exp() * distribution[at - 1]).sum()
    return logprobs, entropies


def sliding_window_model() -> MistralForCausalLM:
    torch.manual_seed(1)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=4,
            initializer_range=0.2,
        )
    )


def absolute_positions_model() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2
        )
    )


@pytest.mark.parametrize("make", [tiny_model, sliding_window_model, absolute_positions_model])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropies_and_gradients_are_those_of_each_row_alone(
    make: type[PreTrainedModel], temperature: float
) -> None:
    model = make().eval()
    batch = uneven_batch()
    expected, entropies = one_by_one(model, batch, temperature)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for share_prompts in {False, Policy(model).share_prompts}:
        model.zero_grad()
        result = Policy(model, share_prompts=share_prompts).token_logprobs(batch, temperature)
        torch.testing.assert_close(result.logprobs_BT * batch.mask_BT, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result.entropy_BT * batch.mask_BT, entropies, rtol=1e-5, atol=1e-5)
        (result.logprobs_BT * batch.mask_BT).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_the_shared_prompt_forward_is_the_plain_one_to_1e_5(group_size: int) -> None:
    """Log-probs, entropies, and the gradients of a mean loss, in float32."""
    rng = np.random.default_rng(1)
    groups = [
        PromptRows(
            rng.integers(0, VOCABULARY, size=40),
            tuple(
                TrainingRow(rng.integers(0, VOCABULARY, size=int(n)), None, 0.0)
                for n in rng.integers(1, 12, size=group_size)
            ),
        )
        for _ in range(3)
    ]
    batch = collate(groups)
    advantages_B1 = torch.from_numpy(rng.normal(size=(3 * group_size, 1)).astype(np.float32))
    found = []
    for share_prompts in (False, True):
        model = tiny_model()
        result = Policy(model, share_prompts=share_prompts).token_logprobs(batch, 1.0)
        loss = -(result.logprobs_BT * advantages_B1 * batch.mask_BT).sum() / batch.mask_BT.sum()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((result.logprobs_BT.detach(), result.entropy_BT, loss.detach(), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_prompts_are_shared_where_the_architecture_allows_it() -> None:
    assert Policy(tiny_model()).share_prompts
    assert Policy(absolute_positions_model()).share_prompts


def test_prompts_are_shared_only_up_to_the_length_of_a_sliding_window() -> None:
    config = sliding_window_model().config
    assert not can_share_prompts(config, uneven_batch())  # 9 + 6 tokens, a window of 4
    config.sliding_window = 15
    assert can_share_prompts(config, uneven_batch())
    assert longest_exact(tiny_model().config) == float("inf")


class MixesNeighbours(LlamaForCausalLM):
    """Adds to each token half of the one before it, as some architectures do: not what packing expects."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda _module, _inputs, x: x + 0.5 * nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        )


class ScalesLogits(LlamaForCausalLM):
    """Does something to its logits that its configuration does not tell."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def test_prompts_are_not_shared_by_a_model_that_comes_out_different(caplog: pytest.LogCaptureFixture) -> None:
    model = MixesNeighbours(tiny_model().config)
    policy = Policy(model)
    assert not policy.share_prompts and model.config._attn_implementation == "sdpa"
    assert "computed once per completion" in caplog.text
    batch = uneven_batch()
    expected, _ = one_by_one(model, batch, 1.0)
    actual = policy.token_logprobs(batch, 1.0).logprobs_BT * batch.mask_BT
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_a_last_layer_of_its_own_computes_its_own_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ScalesLogits(tiny_model().config).eval()
    batch = uneven_batch()
    expected, entropies = one_by_one(model, batch, 0.6)
    result = Policy(model).token_logprobs(batch, 0.6)
    torch.testing.assert_close(result.logprobs_BT * batch.mask_BT, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy_BT * batch.mask_BT, entropies, rtol=1e-5, atol=1e-5)
    assert "logits are computed all at once" in caplog.text


def capped_logits_model() -> Gemma2ForCausalLM:
    torch.manual_seed(3)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=64,
            attn_logit_softcapping=None,
            final_logit_softcapping=0.5,
            initializer_range=0.2,
        )
    )


def biased_head_model() -> PhiForCausalLM:
    torch.manual_seed(4)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.2,
        )
    )
    nn.init.normal_(model.lm_head.bias)
    return model


@pytest.mark.parametrize("make", [capped_logits_model, biased_head_model])
def test_caps_and_biases_of_the_last_layer_are_known(make: type[PreTrainedModel]) -> None:
    model = make().eval()
    policy = Policy(model)
    assert policy.share_prompts
    batch = uneven_batch()
    expected, entropies = one_by_one(model, batch, 0.8)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    result = policy.token_logprobs(batch, 0.8)
    torch.testing.assert_close(result.logprobs_BT * batch.mask_BT, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy_BT * batch.mask_BT, entropies, rtol=1e-5, atol=1e-5)
    result.logprobs_BT.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-4)


def test_attention_that_is_capped_is_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    config = capped_logits_model().config
    config.attn_logit_softcapping = 2.0
    assert not Policy(Gemma2ForCausalLM(config)).share_prompts
    assert "attention" in caplog.text


@pytest.mark.parametrize("share_prompts", [True, False])
def test_prompts_and_completions_of_one_token_work(share_prompts: bool) -> None:
    model = tiny_model()
    rows = (TrainingRow(np.array([4, 5]), None, 0.0), TrainingRow(np.array([6]), None, 0.0))
    batch = collate([PromptRows(np.array([3]), rows), PromptRows(np.array([7, 8]), rows[1:])])
    expected, _ = one_by_one(model, batch, 1.0)
    actual = Policy(model, share_prompts=share_prompts).token_logprobs(batch, 1.0).logprobs_BT
    torch.testing.assert_close(actual * batch.mask_BT, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_of_one_token_completions_only_works() -> None:
    model = tiny_model()
    rows = (TrainingRow(np.array([4]), None, 0.0), TrainingRow(np.array([6]), None, 0.0))
    batch = collate([PromptRows(np.array([3, 1, 2]), rows)])
    expected, _ = one_by_one(model, batch, 1.0)
    actual = Policy(model, share_prompts=True).token_logprobs(batch, 1.0).logprobs_BT
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_checkpointed_layers_give_the_same_gradients_and_keep_less(share_prompts: bool) -> None:
    batch = uneven_batch()
    gradients, kept = [], []
    for checkpoint in (False, True):
        model = tiny_model()
        policy = Policy(model, share_prompts=share_prompts, checkpoint_layers=checkpoint)
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs = policy.token_logprobs(batch, 1.0).logprobs_BT
        kept.append(sum(sizes))
        (logprobs * batch.mask_BT).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert not any(module.training for module in model.modules() if isinstance(module, nn.Dropout))
    assert kept[1] < kept[0] / 2
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)


def test_a_model_that_cannot_checkpoint_says_so() -> None:
    model = tiny_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(PolicyLoadError, match="gradient_checkpointing = false"):
        Policy(model, checkpoint_layers=True)


def test_bfloat16_computes_near_float32_and_keeps_float32_weights() -> None:
    model = tiny_model()
    batch = uneven_batch()
    exact = Policy(model).token_logprobs(batch, 1.0).logprobs_BT * batch.mask_BT
    errors = []
    for share_prompts in (True, False):
        for fp32_head in (True, False):
            policy = Policy(model, autocast=True, share_prompts=share_prompts, fp32_head=fp32_head)
            assert policy.share_prompts is share_prompts
            rough = policy.token_logprobs(batch, 1.0).logprobs_BT * batch.mask_BT
            assert rough.dtype == torch.float32
            assert 0 < float((rough - exact).detach().abs().max()) < 0.2
            errors.append(float(((rough - exact).detach() ** 2).mean()))
            (rough.sum()).backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
            assert {tensor.dtype for tensor in policy.tensors().values()} == {torch.float32}
    # A last layer in float32 takes away the rounding of the logits.
    assert errors[0] < errors[1] and errors[2] < errors[3]


def test_tied_tensors_are_listed_once_and_what_was_listed_loads_back() -> None:
    policy, other = Policy(tiny_model(0)), Policy(tiny_model(1))
    assert "lm_head.weight" not in policy.tensors()
    assert "lm_head.weight" in Policy(tiny_model(tied=False)).tensors()
    other.load_tensors(policy.tensors())
    assert all(torch.equal(other.tensors()[name], value) for name, value in policy.tensors().items())
    with pytest.raises(PolicyLoadError, match="not of this model"):
        Policy(tiny_model(tied=False)).load_tensors(policy.tensors())


@pytest.mark.parametrize("tied", [True, False])
def test_the_probe_sees_rounded_weights_and_leaves_the_masters_alone(tied: bool) -> None:
    model = tiny_model(tied=tied)
    policy = Policy(model)
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    tokens = [1, 5, 2, 7, 7]
    rounded_model = tiny_model(tied=tied, rounded=True)
    expected = rounded_model(torch.tensor([tokens])).logits[0].log_softmax(-1).detach()
    with policy.rounded_to_bfloat16():
        actual = policy.sequence_logprobs(tokens)
    assert actual == pytest.approx([float(expected[i, t]) for i, t in enumerate(tokens[1:])], abs=1e-6)
    assert actual != policy.sequence_logprobs(tokens)
    assert all(torch.equal(policy.tensors()[name], value) for name, value in before.items())


def test_masters_come_back_when_the_computation_inside_fails() -> None:
    policy = Policy(tiny_model())
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    with pytest.raises(IndexError), policy.rounded_to_bfloat16():
        policy.sequence_logprobs([0, VOCABULARY + 1])
    assert all(torch.equal(policy.tensors()[name], value) for name, value in before.items())


def test_a_saved_model_loads_in_float32(tmp_path: Path) -> None:
    model = tiny_model(rounded=True)
    save_model(tmp_path, model.to(torch.bfloat16))
    policy = load_policy(tmp_path)
    assert {tensor.dtype for tensor in policy.tensors().values()} == {torch.float32}
    assert all(
        torch.equal(policy.tensors()[name], value.float()) for name, value in Policy(model).tensors().items()
    )


def _no_folder(folder: Path) -> Path:
    return folder / "nothing"


def _no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def _truncated(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def _tensor_missing(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def _pickle_only(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    "damage", [_no_folder, _no_weights, _truncated, _tensor_missing, _broken_config, _pickle_only]
)
def test_an_unusable_folder_is_refused_in_one_line_that_names_it(tmp_path: Path, damage: object) -> None:
    folder = damage(save_model(tmp_path))  # type: ignore[operator]
    with pytest.raises(PolicyLoadError) as caught:
        load_policy(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float16"), ("no-such-device", "float32")])
def test_an_unusable_device_or_type_is_named(tmp_path: Path, device: str, dtype: str) -> None:
    with pytest.raises(PolicyLoadError, match=r"float16|no-such-device"):
        load_policy(save_model(tmp_path), device=device, dtype=dtype)

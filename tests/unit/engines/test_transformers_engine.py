"""What the engine samples, and that it is the same whatever shares the batch."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from protocol.noise import gumbel_noise
from swarmnode.engines import memory
from swarmnode.engines.base import GroupRequest, SampledCompletion
from swarmnode.engines.memory import NotEnoughMemory
from swarmnode.engines.transformers_engine import EngineError, TransformersEngine, pays_to_drop
from swarmnode.environments.prompt import load_tokenizer
from swarmnode.models import TINY_MODEL_DIR
from tests.unit.engines.conftest import EOS, VOCABULARY

GROUP_SIZE = 4


def make_engine(
    folder: Path, max_batch_sequences: int = 64, eos_ids: tuple[int, ...] = EOS
) -> TransformersEngine:
    engine = TransformersEngine(folder, max_batch_sequences=max_batch_sequences, eos_ids=eos_ids)
    engine.load(folder / "model.safetensors", 7)
    return engine


def mixed_requests(count: int = 6) -> list[GroupRequest]:
    """Prompts of one to forty tokens, one of them twice as two groups."""
    chooser = random.Random(3)
    lengths = [1, 40, 17, 17, 5, 33][:count]
    prompts = [[chooser.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    prompts[3:4] = [prompts[2]] if count > 3 else []
    return [GroupRequest(prompt, chooser.getrandbits(64), GROUP_SIZE) for prompt in prompts]


def assert_same(one: list[SampledCompletion], other: list[SampledCompletion]) -> None:
    assert [completion.token_ids for completion in one] == [completion.token_ids for completion in other]
    for a, b in zip(one, other, strict=True):
        assert a.finish == b.finish
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def assert_sampled_from(
    folder: Path, request: GroupRequest, found: list[SampledCompletion], temperature: float
) -> None:
    """Every token is the argmax of a plain forward pass plus the protocol's noise, with its log-prob."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for index, completion in enumerate(found):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
        scores = logits / temperature
        own = torch.log_softmax(scores, dim=-1)
        assert len(completion.logprobs) == len(completion.token_ids)
        for position, token in enumerate(completion.token_ids):
            noise = gumbel_noise(request.group_seed, index, position, scores.shape[1])
            assert int(np.argmax(scores[position].numpy() + noise)) == token
            assert completion.logprobs[position] == pytest.approx(float(own[position, token]), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(llama_dir: Path, temperature: float) -> None:
    requests = mixed_requests()
    groups = make_engine(llama_dir).generate(requests, temperature=temperature, max_new_tokens=24)
    for request, found in zip(requests, groups, strict=True):
        assert_sampled_from(llama_dir, request, found, temperature)


@pytest.mark.parametrize("max_batch_sequences", [64, 10, 3, 1])
def test_a_group_does_not_depend_on_its_batch(llama_dir: Path, max_batch_sequences: int) -> None:
    requests = mixed_requests()
    engine = make_engine(llama_dir, max_batch_sequences)
    together = engine.generate(requests, temperature=1.0, max_new_tokens=24)
    alone = make_engine(llama_dir)
    for request, found in zip(requests, together, strict=True):
        assert_same(found, alone.generate([request], temperature=1.0, max_new_tokens=24)[0])


def test_completions_end_at_the_first_end_token_or_at_the_limit(llama_dir: Path) -> None:
    groups = make_engine(llama_dir).generate(mixed_requests(), temperature=1.0, max_new_tokens=24)
    completions = [completion for group in groups for completion in group]
    assert {completion.finish for completion in completions} == {"stop", "length"}
    for completion in completions:
        ends = [position for position, token in enumerate(completion.token_ids) if token in EOS]
        if completion.finish == "stop":
            assert ends == [len(completion.token_ids) - 1]
        else:
            assert ends == [] and len(completion.token_ids) == 24
        assert completion.version_runs == [(7, len(completion.token_ids))]
        assert all(logprob <= 0 for logprob in completion.logprobs)
    assert {completion.token_ids[-1] for completion in completions if completion.finish == "stop"} == set(EOS)


@pytest.mark.parametrize(
    ("finished", "alive", "steps", "pays"),
    [(0, 64, 1000, False), (8, 56, 1000, False), (16, 48, 1000, True), (16, 48, 1, False), (32, 32, 1, True)],
)
def test_finished_rows_are_dropped_when_the_steps_left_pay_for_the_copy(
    finished: int, alive: int, steps: int, pays: bool
) -> None:
    assert pays_to_drop(finished, alive, steps) is pays


def test_the_same_prompt_in_two_groups_gives_different_completions(llama_dir: Path) -> None:
    requests = mixed_requests()
    assert requests[2].prompt_ids == requests[3].prompt_ids
    groups = make_engine(llama_dir).generate(requests, temperature=1.0, max_new_tokens=24)
    all_tokens = [tuple(completion.token_ids) for group in groups[2:4] for completion in group]
    assert len(set(all_tokens)) == len(all_tokens)


def test_end_tokens_are_by_default_those_of_the_folder() -> None:
    engine = TransformersEngine(TINY_MODEL_DIR)
    engine.load(TINY_MODEL_DIR / "model.safetensors", 0)
    tokenizer = load_tokenizer(TINY_MODEL_DIR)
    request = GroupRequest(tokenizer.tokenizer.encode("3 + 4 =\n").ids, 1, 32)
    (group,) = engine.generate([request], temperature=1.0, max_new_tokens=12)
    stopped = [completion for completion in group if completion.finish == "stop"]
    assert stopped
    assert {completion.token_ids[-1] for completion in stopped} <= set(tokenizer.eos_ids)


def test_models_with_sliding_windows_decode_the_same_way(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    assert len(set(config.layer_types)) == 2
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    requests = mixed_requests()
    groups = make_engine(tmp_path).generate(requests, temperature=1.0, max_new_tokens=16)
    for request, found in zip(requests, groups, strict=True):
        assert_sampled_from(tmp_path, request, found, 1.0)


def test_bfloat16_samples_the_same_in_any_order_of_requests(llama_dir: Path) -> None:
    engine = TransformersEngine(llama_dir, dtype="bfloat16", eos_ids=EOS)
    engine.load(llama_dir / "model.safetensors", 0)
    assert engine.name == "transformers/bfloat16"
    requests = mixed_requests()
    forward = engine.generate(requests, temperature=1.0, max_new_tokens=8)
    backward = engine.generate(requests[::-1], temperature=1.0, max_new_tokens=8)[::-1]
    assert [c.token_ids for group in forward for c in group] == [
        c.token_ids for group in backward for c in group
    ]


def test_probe_gives_the_logprobs_of_a_plain_forward_pass(llama_dir: Path) -> None:
    ids = [1, 17, 99, 3, 100, 0, 42]
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    expected = [float(torch.log_softmax(logits[i], dim=-1)[ids[i + 1]]) for i in range(len(ids) - 1)]
    assert make_engine(llama_dir).probe(ids) == pytest.approx(expected, abs=1e-5)


def test_nothing_is_generated_before_a_version_is_loaded(llama_dir: Path) -> None:
    engine = TransformersEngine(llama_dir, eos_ids=EOS)
    assert engine.version is None
    with pytest.raises(EngineError, match="no version is loaded"):
        engine.generate(mixed_requests(1), temperature=1.0, max_new_tokens=2)


def test_an_empty_prompt_is_refused(llama_dir: Path) -> None:
    with pytest.raises(EngineError, match="prompt has no tokens"):
        make_engine(llama_dir).generate([GroupRequest([], 1, 2)], temperature=1.0, max_new_tokens=2)


def test_a_batch_that_would_not_fit_is_refused_with_advice(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama_dir)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1_000_000)
    with pytest.raises(
        NotEnoughMemory, match=r"lower engine\.max_batch_sequences \(one takes about \d+ MiB\)"
    ):
        engine.generate([GroupRequest([1] * 200, 1, 64)], temperature=1.0, max_new_tokens=4_000)


def test_a_model_that_would_not_fit_is_refused_with_advice(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1_000)
    with pytest.raises(NotEnoughMemory, match=r'use engine\.dtype = "bfloat16"'):
        TransformersEngine(llama_dir, eos_ids=EOS)


def test_logits_that_are_not_finite_are_an_error(llama_dir: Path) -> None:
    engine = make_engine(llama_dir)
    with torch.no_grad():
        engine._model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="version 7 gives logits that are not finite"):
        engine.generate(mixed_requests(1), temperature=1.0, max_new_tokens=2)


def test_code_in_a_model_folder_is_never_run(llama_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_dir, folder)
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\n"
    (folder / "configuration_evil.py").write_text(code)
    (folder / "modeling_evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"config\.json cannot be used"):
        TransformersEngine(folder, eos_ids=EOS)
    assert not ran.exists()


def test_a_missing_device_is_named_and_not_replaced(llama_dir: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(EngineError, match=r'engine\.device = "cuda" cannot be used'):
        TransformersEngine(llama_dir, device="cuda", eos_ids=EOS)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"is not a model folder: it has no config\.json"):
        TransformersEngine(tmp_path, eos_ids=EOS)


def test_weights_are_swapped_in_place_and_change_what_is_sampled(llama_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(llama_dir)
    before = engine.generate(mixed_requests(), temperature=1.0, max_new_tokens=8)
    weights = load_file(llama_dir / "model.safetensors")
    changed = {name: tensor.flip(0).contiguous() for name, tensor in weights.items()}
    save_file(changed, tmp_path / "model.safetensors")
    engine.load(tmp_path / "model.safetensors", 8)
    assert engine.version == 8
    after = engine.generate(mixed_requests(), temperature=1.0, max_new_tokens=8)
    assert [c.token_ids for group in after for c in group] != [c.token_ids for group in before for c in group]
    assert {run for group in after for c in group for run in c.version_runs} <= {(8, n) for n in range(1, 9)}
    engine.load(llama_dir / "model.safetensors", 9)
    again = engine.generate(mixed_requests(), temperature=1.0, max_new_tokens=8)
    assert [c.token_ids for group in again for c in group] == [c.token_ids for group in before for c in group]

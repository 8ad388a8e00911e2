"""The model that ships with the package: its files, its format, and that it knows its tasks only half."""

from pathlib import Path

import pytest

from protocol.limits import TRAIN_SEED_LIMIT
from protocol.tasks import TaskRef, TaskSpec
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR, ModelNotFound, resolve_model
from swarmnode.models.tiny_tasks import DEMO_MAX_NEW_TOKENS, DEMO_TASKS

TASKS = [TaskSpec(**task) for task in DEMO_TASKS]


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in TINY_MODEL_DIR.iterdir()}
    assert names == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in TINY_MODEL_DIR.iterdir()) < 4_000_000


def test_transformers_loads_it_as_bf16_and_it_computes() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_DIR)
    tokenizer = load_tokenizer(TINY_MODEL_DIR)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == 865_920
    assert model.config.vocab_size == tokenizer.vocab_size == 100
    assert (model.config.eos_token_id,) == tokenizer.eos_ids
    assert model.config.pad_token_id == tokenizer.pad_id
    logits = model(torch.tensor([render_prompt(tokenizer, "Calculate 7 * 3.")])).logits
    assert logits.shape == (1, 18, 100)
    assert bool(torch.isfinite(logits).all())


def test_sampling_is_right_a_quarter_to_a_third_of_the_time_and_rarely_in_another_format() -> None:
    """The bar that the demo starts from, at temperature 1 on held-out seeds."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_DIR, dtype=torch.float32)
    tokenizer = load_tokenizer(TINY_MODEL_DIR)
    environment = build_environment(TASKS)
    generator = torch.Generator().manual_seed(0)
    scores: list[float] = []
    ended = 0
    for task in TASKS:
        refs = [
            TaskRef(environment=task.environment, config_hash=task.config_hash, seed=TRAIN_SEED_LIMIT + i)
            for i in range(96)
        ]
        prompts = [render_prompt(tokenizer, environment.question(ref)) for ref in refs]
        longest = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = (ids != tokenizer.pad_id).long()
        with torch.no_grad():
            for _ in range(DEMO_MAX_NEW_TOKENS):
                position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
                logits = model(ids, attention_mask=mask, position_ids=position_ids).logits[:, -1]
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
                ids, mask = torch.cat([ids, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
        for ref, row in zip(refs, ids[:, longest:].tolist(), strict=True):
            finished = tokenizer.eos_ids[0] in row
            ended += finished
            end = row.index(tokenizer.eos_ids[0]) if finished else len(row)
            scores.append(environment.score(ref, tokenizer.tokenizer.decode(row[:end])))
    assert 0.22 <= sum(scores) / len(scores) <= 0.40
    assert ended / len(scores) >= 0.95


def test_questions_of_the_demo_are_short() -> None:
    tokenizer, environment = load_tokenizer(TINY_MODEL_DIR), build_environment(TASKS)
    for task in TASKS:
        for seed in range(50):
            ref = TaskRef(environment=task.environment, config_hash=task.config_hash, seed=seed)
            assert len(render_prompt(tokenizer, environment.question(ref))) <= 80


def test_a_model_is_the_tiny_one_or_a_folder(tmp_path: Path) -> None:
    assert resolve_model("tiny") == TINY_MODEL_DIR
    assert resolve_model(str(TINY_MODEL_DIR)) == TINY_MODEL_DIR
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFound, match=r"no \.safetensors file"):
        resolve_model(tmp_path)
    for name in ("/no/such/folder", "nothing", "a/b/c", "../x"):
        with pytest.raises(ModelNotFound, match="neither"):
            resolve_model(name)


def test_a_hub_id_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="not on the hub") as caught:
        resolve_model("some-owner/some-model")
    assert "\n" not in str(caught.value)

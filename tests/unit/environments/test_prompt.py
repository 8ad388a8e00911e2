"""Prompts and completions as token ids, the same as transformers makes them but without torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.environments.prompt import (
    TokenizerError,
    decode_completion,
    encode_completion,
    load_tokenizer,
    render_prompt,
)
from swarmnode.models import TINY_MODEL_DIR

QUESTIONS = ["Calculate 7 * 3.", "", "two\nlines", "ünïcode 東京\ttab", "<eos><bos>", "{{ bos_token }}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's folder without its weights, to change."""
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        shutil.copy(TINY_MODEL_DIR / name, tmp_path / name)
    return tmp_path


def test_prompts_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(TINY_MODEL_DIR), load_tokenizer(TINY_MODEL_DIR)
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert render_prompt(ours, question) == expected


def test_a_chat_template_of_many_turns_and_functions_renders_as_in_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(
        """{%- if tools is defined and tools %}{{ raise_exception("no tools") }}{% endif %}
        {%- for message in messages %}
            {%- if loop.first and message['role'] != 'system' %}{{ 'system: help\n' }}{% endif %}
            {{- message['role'] + ': ' + message['content'] | trim + eos_token }}
        {% endfor %}
        {%- if add_generation_prompt %}{{ 'assistant:' }}{{ {"a": "é<"} | tojson }}{% endif %}""",
        encoding="utf-8",
    )
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    expected = theirs.apply_chat_template([{"role": "user", "content": " hi "}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert render_prompt(ours, " hi ") == expected


def test_without_a_template_the_prompt_is_the_question_and_a_newline(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    assert render_prompt(tokenizer, "ab") == tokenizer.tokenizer.encode("ab\n").ids


def test_a_template_in_the_tokenizer_config_counts(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "{{ messages[0]['content'] }}!"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert decode_completion(tokenizer, render_prompt(tokenizer, "ab")) == "ab!"


def test_a_template_can_neither_reach_python_nor_see_the_date(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TokenizerError, match="chat template fails"):
        render_prompt(load_tokenizer(folder), "ab")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %B %Y') }}")
    tokenizer = load_tokenizer(folder)
    assert decode_completion(tokenizer, render_prompt(tokenizer, "")) == "01 January 2025"


def test_completions_round_trip_and_special_tokens_stay_text() -> None:
    tokenizer = load_tokenizer(TINY_MODEL_DIR)
    text = "".join(chr(code) for code in range(32, 127)) + "\n<eos> <pad>"
    ids = encode_completion(tokenizer, text)
    assert len(ids) == len(text)
    assert not set(ids) & {0, 1, 2, 3}
    assert decode_completion(tokenizer, ids) == text
    assert decode_completion(tokenizer, [*ids, *tokenizer.eos_ids]) == text


def test_ids_that_the_tokenizer_lacks_stand_for_nothing() -> None:
    tokenizer = load_tokenizer(TINY_MODEL_DIR)
    assert decode_completion(tokenizer, [-1, 10**12, *encode_completion(tokenizer, "4"), 100]) == "4"


def test_every_end_token_of_the_model_ends_a_completion(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_tokenizer(folder).eos_ids == (7, 2, 9)


def test_broken_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        load_tokenizer(folder)


def test_environments_and_prompts_import_no_torch() -> None:
    program = (
        "import sys; import swarmnode.environments.prompt;"
        "from swarmnode.environments import build_environment;"
        "from protocol.tasks import TaskSpec; before = 'reasoning_gym' in sys.modules;"
        "build_environment([TaskSpec(environment='reasoning_gym', name='chain_sum')]);"
        "print(before, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.split() == ["False", "False", "False"]

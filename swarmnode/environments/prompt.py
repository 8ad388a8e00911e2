"""From a question to token ids and back, without torch: a model folder's tokenizer and its chat template.

`transformers` has the same in `AutoTokenizer`, but imports torch with it, which the verifier does without.
Every node must render the same ids for a question: a test compares the two.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_TEMPLATE_DATE = datetime(2025, 1, 1)


class TokenizerError(ValueError):
    """A model folder whose tokenizer or chat template cannot be used."""


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer of one model folder. `eos_ids` end a completion; `pad_id` only fills batches."""

    tokenizer: Tokenizer
    literal: Tokenizer
    """The same, reading the names of special tokens in a text as ordinary characters."""
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Names as templates use them: "bos_token", "eos_token", …"""
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)


def load_tokenizer(model_dir: Path | str) -> ModelTokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`, …). Raises `TokenizerError`."""
    folder = Path(model_dir)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{path} does not exist: write one with "
            f"`AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})`"
        )
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer, literal = Tokenizer.from_str(text), Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
    for each in (tokenizer, literal):
        each.no_padding()
        each.no_truncation()
    literal.encode_special_tokens = True

    config = _json(folder / "tokenizer_config.json")
    special = {
        name: token for name, value in config.items() if (token := _token_text(name, value)) is not None
    }
    eos_ids = _eos_ids(folder, tokenizer, special)
    pad_id = tokenizer.token_to_id(special["pad_token"]) if "pad_token" in special else None
    return ModelTokenizer(
        tokenizer=tokenizer,
        literal=literal,
        chat_template=_chat_template(folder, config),
        special_tokens=special,
        eos_ids=eos_ids,
        pad_id=eos_ids[0] if pad_id is None else pad_id,
    )


def render_prompt(tokenizer: ModelTokenizer, question: str) -> list[int]:
    """The ids that a completion continues: the chat template's, or those of question and newline."""
    if tokenizer.chat_template is None:
        return list(tokenizer.tokenizer.encode(question + "\n").ids)
    try:
        text = _compiled(tokenizer.chat_template).render(
            messages=[{"role": "user", "content": question}],
            add_generation_prompt=True,
            **tokenizer.special_tokens,
        )
    except TemplateError as error:
        raise TokenizerError(f"the model's chat template fails on a single question: {error}") from error
    return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)


def decode_completion(tokenizer: ModelTokenizer, ids: Sequence[int]) -> str:
    """The text of sampled ids, without special tokens. Ids that the tokenizer lacks stand for nothing."""
    size = tokenizer.vocab_size
    return str(tokenizer.tokenizer.decode([i for i in ids if 0 <= i < size], skip_special_tokens=True))


def encode_completion(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """The ids of a completion's text, without an end token; no text can smuggle in a special token."""
    return list(tokenizer.literal.encode(text, add_special_tokens=False).ids)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _token_text(name: str, value: Any) -> str | None:
    """The text of a token of tokenizer_config.json, which is a string or {"content": string}."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Every id that ends a completion: generation config's, model config's, and tokenizer's."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    found += [] if own is None else [own]
    if not found:
        raise TokenizerError(f"{folder} names no end token: set eos_token_id in generation_config.json")
    return tuple(dict.fromkeys(found))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


@lru_cache(maxsize=8)
def _compiled(chat_template: str) -> Template:
    # Compiling takes about a millisecond, thirty times as long as rendering one question.
    return _environment().from_string(chat_template)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: sandboxed, blocks trimmed, three functions."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(pattern: str) -> str:
        # Templates that tell the model today's date would give every day, and so every node, its own prompt.
        return _TEMPLATE_DATE.strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment

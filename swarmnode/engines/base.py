"""The contract of a rollout engine: exact about what it sampled, swaps weights in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class GroupRequest:
    """Generate `group_size` completions of one prompt with the noise of `group_seed` (`protocol.noise`)."""

    prompt_ids: list[int]
    group_seed: int
    group_size: int


@dataclass(frozen=True)
class SampledCompletion:
    """Tokens (the end-of-text token included when sampled), their behavior log-probs, and versions as
    (version, count) runs."""

    token_ids: list[int]
    logprobs: list[float]
    version_runs: list[tuple[int, int]]
    finish: Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine cannot be built or cannot generate. One line that says what to do."""


class LoadError(Exception):
    """A version could not be loaded; the engine still has the old weights."""


class Engine(Protocol):
    """Generates groups from one set of weights at a time."""

    name: str
    """Back end and dtype, such as `transformers/float32`."""

    @property
    def version(self) -> int | None:
        """The loaded version; None before the first `load`."""
        ...

    def load(self, path: Path, version: int) -> None:
        """Replace the weights by those of a safetensors file. Raises `LoadError` and keeps the old ones."""
        ...

    def patch(self, deltas: Sequence[Path], version: int) -> None:
        """Turn the loaded version into `version` by deltas (`protocol.delta`), the first made for the loaded
        one and each other for the one before it. Raises `LoadError` and keeps the old weights."""
        ...

    @property
    def patch_obstacle(self) -> str | None:
        """Why no delta can be applied to what is loaded; None when it can."""
        ...

    def generate(
        self, requests: list[GroupRequest], *, temperature: float, max_new_tokens: int
    ) -> list[list[SampledCompletion]]:
        """One list of completions per request, in order. token = argmax(logits / temperature + noise)."""
        ...

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-prob (temperature 1) of each token after the first given those before it; length
        len(token_ids) - 1."""
        ...

"""Low-rank adapters: a run may train a small addition to some layers and leave the base model as it is."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from protocol.base import Message

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+){0,15}$", max_length=256)]

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of a Llama-like decoder layer."""


class AdapterSpec(Message):
    """LoRA (arXiv 2106.09685): W·x becomes W·x + (alpha / r) · B·A·x, with A [r, in] and B [out, r].

    Only A and B are trained and published. There is no dropout: it would make the ratio at zero lag differ
    from 1.
    """

    r: Annotated[int, Field(ge=1, le=4096)] = 16
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    target_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=256)] = Field(
        default_factory=lambda: list(DEFAULT_TARGETS)
    )
    """Linear layers, by the end of their names."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("two target_modules are the same")
        return self

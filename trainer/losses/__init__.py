"""Losses by the name that a run gives them (`loss_type`)."""

from trainer.losses.base import LossFunction, LossTerms
from trainer.losses.cispo import cispo
from trainer.losses.grpo import grpo

LOSSES: dict[str, LossFunction] = {"cispo": cispo, "grpo": grpo}

__all__ = ["LOSSES", "LossFunction", "LossTerms", "cispo", "grpo"]

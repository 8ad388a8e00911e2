"""Losses by the name that a run gives them (`loss_type`)."""

from trainer.losses.base import LossFunction, LossTerms, TokenBatch
from trainer.losses.cispo import cispo
from trainer.losses.dapo import dapo
from trainer.losses.decoupled_ppo import decoupled_ppo
from trainer.losses.dr_grpo import dr_grpo
from trainer.losses.gepo import gepo
from trainer.losses.grpo import grpo
from trainer.losses.gspo import gspo
from trainer.losses.oapl import oapl
from trainer.losses.topr import topr

LOSSES: dict[str, LossFunction] = {
    "cispo": cispo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "decoupled_ppo": decoupled_ppo,
    "topr": topr,
    "gepo": gepo,
    "oapl": oapl,
}

__all__ = ["LOSSES", "LossFunction", "LossTerms", "TokenBatch"]

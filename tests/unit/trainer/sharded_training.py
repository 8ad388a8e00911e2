"""What `test_sharded_policy.py` runs with torchrun: a learner at rank 0, followers at the others.

Arguments: a model folder, a folder for results. Writes what each run of `RUNS` came to.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from protocol.adapter import AdapterSpec
from tests.unit.trainer.factory import POLICY_ID, run_spec, training_group
from trainer.distributed import Processes
from trainer.learner import Learner
from trainer.policy import Policy
from trainer.sharded_policy import follow, load_sharded_policy


@dataclass(frozen=True)
class Run:
    """How a learner is made; `budget` says into how many micro-batches an update is cut. With one completion
    in each, one of two processes has nothing of its own to do."""

    settings: dict[str, Any]
    budget: int = 30


RUNS = {
    "full": Run({}),
    "whole batches": Run({}, budget=10_000),
    "one by one, checkpointed": Run({"checkpoint_layers": True}, budget=1),
    "adapter": Run({"adapter": AdapterSpec(r=3, target_modules=["q_proj", "down_proj"])}),
}
UPDATES = 4


def train(policy: Policy, budget: int) -> tuple[Learner, dict[str, Any]]:
    """A few updates, a checkpoint put back amid them, a probe of the rounded weights."""
    learner = Learner(policy, run_spec(algorithm={"beta": 0.0}), POLICY_ID, token_budget=budget)
    figures: list[dict[str, float]] = []
    for update in range(UPDATES):
        for number in range(2):
            learner.add_group(training_group(10 * update + number, version=update))
        figures.append({k: v for k, v in learner.update().metrics.items() if k != "update_seconds"})
        if update == 1:
            kept = learner.checkpoint()
            model = {name: tensor.clone() for name, tensor in kept.model.items()}
            optimizer = {name: tensor.clone() for name, tensor in kept.optimizer.items()}
            learner.policy.load_tensors({name: torch.zeros_like(t) for name, t in model.items()})
            learner.policy.load_tensors(model)
            learner.optimizer.load_tensors(optimizer)
    with policy.rounded_to_bfloat16():
        probe = policy.sequence_logprobs([1, 5, 2, 7])
    return learner, {"figures": figures, "probe": probe, "after": policy.sequence_logprobs([1, 5, 2, 7])}


def main() -> None:
    torch.set_num_threads(1)
    model, results = Path(sys.argv[1]), Path(sys.argv[2])
    processes = Processes("cpu")
    for name, run in RUNS.items():
        if not processes.leads:
            follow(processes)
            continue
        policy = load_sharded_policy(processes, model, **run.settings)
        learner, found = train(policy, run.budget)
        (results / f"{name}.json").write_text(json.dumps(found))
        save_file(learner.policy.tensors(), results / f"{name}.safetensors")
        policy.close()
    processes.leave()


if __name__ == "__main__":
    main()

"""Two processes over gloo make the updates that one makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.trainer.factory import save_model
from tests.unit.trainer.sharded_training import RUNS, UPDATES, train
from trainer.batching import MicroBatch, PromptRows, TrainingRow, collate
from trainer.policy import load_policy
from trainer.sharded_policy import rows_of_process, select_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what two processes made of it."""
    model, results = save_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, "-m", "tests.unit.trainer.sharded_training", str(model), str(results)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return model, results


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_updates_of_one(folders: tuple[Path, Path], name: str) -> None:
    model, results = folders
    learner, expected = train(load_policy(model, **RUNS[name].settings), RUNS[name].budget)
    found = json.loads((results / f"{name}.json").read_text())
    assert len(found["figures"]) == UPDATES
    for one, two in zip(expected["figures"], found["figures"], strict=True):
        assert one.keys() == two.keys()
        for figure, value in one.items():
            assert two[figure] == pytest.approx(value, rel=1e-4, abs=1e-5), figure
    assert found["probe"] == pytest.approx(expected["probe"], abs=0.02)
    assert found["after"] == pytest.approx(expected["after"], abs=1e-4)
    assert found["probe"] != found["after"]
    weights = load_file(results / f"{name}.safetensors")
    own = learner.policy.tensors()
    assert weights.keys() == own.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=2e-4, msg=key)


def batch_of(shapes: list[tuple[int, list[int]]]) -> MicroBatch:
    return collate(
        [
            PromptRows(np.arange(prompt), tuple(TrainingRow(np.arange(n), None, float(n)) for n in counts))
            for prompt, counts in shapes
        ]
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_rows_are_shared_out_by_their_work(count: int) -> None:
    batch = batch_of([(10, [5, 5, 5, 5]), (40, [9]), (2, [1, 1])])
    slices = [rows_of_process(batch, rank, count) for rank in range(count)]
    assert [row for each in slices for row in range(each.start, each.stop)] == list(range(7))
    if count == 2:
        # 4 × (5 + 2.5) = 30 against 49 + 4: nearest to the half.
        assert slices == [slice(0, 4), slice(4, 7)]


def test_some_rows_of_a_batch_are_the_batch_of_these_rows() -> None:
    batch = batch_of([(3, [2, 4]), (5, [1]), (4, [3, 3])])
    part = select_rows(batch, slice(1, 4))
    assert part.prompt_lengths_P.tolist() == [3, 5, 4]
    assert part.row_prompts_B.tolist() == [0, 1, 2]
    assert part.advantages_B.tolist() == [4.0, 1.0, 3.0]
    assert part.completion_ids_BT.tolist() == batch.completion_ids_BT[1:4].tolist()
    last = select_rows(batch, slice(4, 5))
    assert last.prompt_ids_PL[0, :4].tolist() == [0, 1, 2, 3] and last.row_prompts_B.tolist() == [0]

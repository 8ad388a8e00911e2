"""Checkpoints: what was written comes back, the newest complete one wins, damage is named and passed over."""

import logging
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.factory import learner, training_group
from trainer.checkpoint import Checkpoint, CheckpointError, load_newest, write_checkpoint
from trainer.learner import Learner

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def advance(one: Learner, updates: int) -> None:
    for _ in range(updates):
        for number in range(2):
            one.add_group(training_group(100 * one.version + number, version=one.version))
        one.update()


def write_versions(folder: Path, count: int, keep: int = 9) -> Learner:
    one = learner()
    for _ in range(count):
        advance(one, 1)
        write_checkpoint(folder, one.checkpoint(), keep)
    return one


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.state == other.state
    for mine, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_comes_back_as_it_was_and_without_pickle(tmp_path: Path) -> None:
    one = learner()
    one.eval_before, one.elapsed_s = 0.25, 12.5
    advance(one, 2)
    path = write_checkpoint(tmp_path, one.checkpoint(), keep=3)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert_same(loaded, one.checkpoint())
    assert loaded.state.consumed.keys() == {1, 2} and loaded.optimizer
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)


def test_without_checkpoints_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "absent") is None


def test_the_newest_is_by_number_and_old_ones_go(tmp_path: Path) -> None:
    write_versions(tmp_path, 11, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v10", "v11", "v9"]
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.state.version == 11


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["gone", "short", "altered"])
def test_a_damaged_newest_is_passed_over_with_a_warning(
    tmp_path: Path, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_versions(tmp_path, 2)
    damage(tmp_path / "v2" / file, how)
    with caplog.at_level(logging.WARNING):
        loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.state.version == 1
    (record,) = caplog.records
    assert str(tmp_path / "v2") in record.getMessage()


def test_when_all_are_damaged_the_error_says_what_to_do(tmp_path: Path) -> None:
    write_versions(tmp_path, 2)
    for version in (1, 2):
        damage(tmp_path / f"v{version}" / "model.safetensors", "altered")
    with pytest.raises(CheckpointError) as caught:
        load_newest(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message and "restore" in message and "delete" in message and "\n" not in message


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "short":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)

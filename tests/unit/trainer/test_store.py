"""Order on disk: whenever the process dies, the next one resumes at a version that exists, and numbers never
repeat."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.run_spec import RunSpec
from tests.unit.trainer.factory import POLICY_ID, learner, run_spec, training_group
from trainer.checkpoint import CheckpointError
from trainer.collapse import HaltRules
from trainer.learner import Learner, TrainingHalted
from trainer.publication import hash_of, read_publication, snapshot
from trainer.store import LearnerStore


def store_of(folder: Path, one: Learner, keep: int = 3) -> LearnerStore:
    return LearnerStore(folder, one, [1, 2, 3, 4], checkpoint_keep=keep)


def train(one: Learner) -> None:
    for number in range(2):
        one.add_group(training_group(100 * one.version + number, version=one.version))
    one.update()


def started(folder: Path, versions: int, spec: RunSpec | None = None) -> tuple[Learner, LearnerStore]:
    one = learner(spec)
    store = store_of(folder, one)
    store.resume()
    for _ in range(versions):
        train(one)
        store.commit()
    return one, store


def weights_of(one: Learner) -> bytes:
    return hash_of(snapshot(one.policy.tensors()), one.spec.model.chunk_size)


def same_weights(one: Learner, two: Learner) -> bool:
    mine, others = one.policy.tensors(), two.policy.tensors()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def publications(store: LearnerStore) -> list[str]:
    return sorted(path.name for path in store.publications.iterdir())


def test_a_fresh_learner_publishes_version_zero_with_a_probe(tmp_path: Path) -> None:
    one, store = started(tmp_path, 0)
    publication = read_publication(store.publications / "v0")
    assert store.publications == tmp_path / "policies" / POLICY_ID.hex()[:16]
    assert publication.version == 0
    assert publication.state_hash == weights_of(one)
    with torch.no_grad():
        for tensor in one.policy.tensors().values():
            tensor.copy_(tensor.to(torch.bfloat16))
    assert publication.probe.logprobs == pytest.approx(
        one.policy.sequence_logprobs(publication.probe.tokens), abs=1e-6
    )


def test_resuming_takes_the_published_version_as_it_is(tmp_path: Path) -> None:
    one, store = started(tmp_path, 2)
    before = (store.publications / "v2" / "model.safetensors").stat().st_mtime_ns
    other = learner(model_seed=7)
    publication = store_of(tmp_path, other).resume()
    assert (other.version, publication.version) == (2, 2)
    assert publication.path.stat().st_mtime_ns == before
    assert same_weights(other, one)


@pytest.mark.parametrize("damage", ["missing", "flipped", "half-written"])
def test_a_publication_that_is_not_whole_is_made_again_bit_for_bit(tmp_path: Path, damage: str) -> None:
    _, store = started(tmp_path, 1)
    directory = store.publications / "v1"
    before = (directory / "model.safetensors").read_bytes()
    if damage == "missing":
        shutil.rmtree(directory)
    elif damage == "flipped":
        (directory / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    else:
        directory.rename(store.publications / ".v1.tmp")
    publication = store_of(tmp_path, learner()).resume()
    assert publication.version == 1
    assert publication.path.read_bytes() == before
    assert publications(store) == ["v0", "v1"]


def test_a_version_whose_checkpoint_is_lost_keeps_its_number_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, store = started(tmp_path, 3)
    (store.checkpoints / "v3" / "model.safetensors").write_bytes(b"damaged")
    lost = read_publication(store.publications / "v3")
    older = read_publication(store.publications / "v2")
    other = learner()
    publication = store_of(tmp_path, other).resume()
    assert (other.version, publication.version) == (4, 4)
    assert publication.state_hash == older.state_hash != lost.state_hash
    assert set(other.consumed) == {1, 2}, "what only the lost version consumed may be trained on again"
    assert "version 3 was published but cannot be resumed from" in caplog.text
    # And that is where a second restart goes on.
    third = learner()
    assert store_of(tmp_path, third).resume() == publication
    train(third)
    assert third.version == 5


def test_without_any_checkpoint_numbers_go_on_after_what_was_published(tmp_path: Path) -> None:
    _, store = started(tmp_path, 2)
    shutil.rmtree(store.checkpoints)
    other = learner()
    assert store_of(tmp_path, other).resume().version == 3
    assert other.updates == 0


def test_checkpoints_of_another_run_are_not_resumed(tmp_path: Path) -> None:
    started(tmp_path, 1)
    with pytest.raises(CheckpointError, match="another run"):
        store_of(tmp_path, learner(run_spec(name="other"))).resume()


def test_every_kth_version_is_published_and_any_when_it_must_be(tmp_path: Path) -> None:
    one, store = started(tmp_path, 0, run_spec(publish_every=3, max_staleness=9))
    published = []
    for version in range(1, 6):
        train(one)
        publication = store.commit(must_publish=version == 5)
        published.append(publication and publication.version)
    assert published == [None, None, 3, None, 5]
    train(one)
    assert store.commit() is None
    # A restart publishes what it resumes, so that workers can have it.
    assert store_of(tmp_path, learner(run_spec(publish_every=3, max_staleness=9))).resume().version == 6


def test_old_versions_go_when_no_group_may_come_from_them_any_more(tmp_path: Path) -> None:
    _, store = started(tmp_path, 6)  # the staleness bound is 2
    assert publications(store) == ["v3", "v4", "v5", "v6"]
    assert sorted(path.name for path in store.checkpoints.iterdir()) == ["v4", "v5", "v6"]


class Crash(BaseException):
    """The process dies here."""


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[int]:
    """Let the `step`-th call that changes the disk be the last: nothing after it happens, no clean-up."""
    done = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if done[0] >= step:
                raise Crash
            done[0] += 1
            return function(*args, **kwargs)

        return call

    for name in ("rename", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "mkdir", counted(Path.mkdir))
    monkeypatch.setattr(Path, "write_text", counted(Path.write_text))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    return done


def test_a_crash_at_any_step_of_a_commit_resumes_at_the_old_or_the_new_version(tmp_path: Path) -> None:
    started(tmp_path / "before", 4)
    step, outcomes = 0, []
    while True:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "before", folder)
        one = learner()
        store = store_of(folder, one)
        store.resume()
        train(one)
        with pytest.MonkeyPatch.context() as patch:
            done = crash_at(patch, step)
            try:
                store.commit()
                finished = done[0] < step
            except Crash:
                finished = False
        other = learner()
        resumed = store_of(folder, other)
        publication = resumed.resume()
        assert publication.version == other.version in (4, 5)
        assert publication.state_hash == weights_of(other)
        assert max(other.consumed) == other.version
        if other.version == 5:
            assert same_weights(other, one)
        hidden = [*resumed.checkpoints.glob(".*"), *resumed.publications.glob(".*")]
        assert hidden == [], "what a crash left half-written is cleared away"
        train(other)
        resumed.commit()
        outcomes.append(other.version - 1)
        shutil.rmtree(folder)
        if finished:
            break
        step += 1
    assert outcomes == sorted(outcomes) and set(outcomes) == {4, 5} and step > 15


def test_after_a_collapse_the_last_good_version_is_published_again_under_a_new_number(tmp_path: Path) -> None:
    """Entropy is below an absurd floor from version 2 on; five bad updates later training stops at 6."""
    one = learner(halt_rules=HaltRules(halt_after=5))
    store = store_of(tmp_path, one, keep=1)
    store.resume()
    for _ in range(2):
        train(one)
        store.commit()
    good, optimizer = weights_of(one), {n: t.clone() for n, t in one.optimizer.tensors().items()}
    # The update from version 2 measured it well above both floors; what comes after does not.
    train(one)
    store.commit()
    one._watch.rules = HaltRules(min_entropy=100.0, halt_after=5)
    for _ in range(4):
        train(one)
        store.commit()
    assert one.last_good_version == 2 and one.version == 7
    with pytest.raises(TrainingHalted, match="version 2 is the last good one") as caught:
        train(one)
    assert "entropy was below 100 for 5 updates" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.last_good == 2 and one.version == 7
    publication = store.publish_last_good(caught.value.last_good)
    assert publication is not None
    assert (publication.version, publication.state_hash) == (8, good)
    assert weights_of(one) == good and one.version == 8
    assert all(torch.equal(optimizer[name], value) for name, value in one.optimizer.tensors().items())
    # Whoever starts it again goes on from there, and counts anew.
    again = learner(model_seed=3)
    assert store_of(tmp_path, again).resume().version == 8
    assert weights_of(again) == good and again.last_good_version == 8


def test_a_halt_publishes_the_newest_version_if_that_is_good_and_not_out_yet(tmp_path: Path) -> None:
    one = learner(run_spec(publish_every=3))
    store = store_of(tmp_path, one)
    store.resume()
    train(one)
    assert store.commit() is None
    publication = store.publish_last_good(1)
    assert publication is not None and publication.version == 1
    assert store.publish_last_good(1) is None
    # A version whose checkpoint is gone cannot come back.
    assert store.publish_last_good(77) is None and one.version == 1

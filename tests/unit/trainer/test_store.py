"""Order on disk: whenever the process dies, the next one resumes at a version that exists, and numbers never
repeat."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.chunks import chunk_ranges, state_hash
from protocol.delta import DeltaFile
from protocol.run_spec import RunSpec
from tests.unit.trainer.factory import POLICY_ID, learner, run_spec, training_group
from trainer.checkpoint import CheckpointError
from trainer.collapse import HaltRules
from trainer.learner import Learner, TrainingHalted
from trainer.publication import Publication, PublishedDelta, read_publication
from trainer.snapshot_file import snapshot_chunks
from trainer.store import LearnerStore


def store_of(folder: Path, one: Learner, keep: int = 3, every: int = 1) -> LearnerStore:
    return LearnerStore(folder, one, [1, 2, 3, 4], checkpoint_keep=keep, checkpoint_every=every)


def commit(store: LearnerStore, *, must: bool = False) -> Publication | None:
    """What follows an update."""
    publication = store.publish(must=must)
    store.checkpoint()
    return publication


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
        commit(store)
    return one, store


def weights_of(one: Learner) -> bytes:
    """The state hash that the learner's weights would be published under."""
    chunk_size = one.spec.model.chunk_size
    size, chunks = snapshot_chunks(one.policy.tensors(), chunk_size)
    return state_hash(size, chunk_size, chunks)


def nudge(one: Learner) -> None:
    """Change a few weights, as a small learning rate would."""
    tensor = next(iter(one.policy.tensors().values()))
    with torch.no_grad():
        tensor.view(-1)[:3] += 0.5


def patched(parent: Publication, delta: PublishedDelta) -> bytes:
    """The snapshot that a delta makes of its parent's."""
    file, data = DeltaFile(delta.path.read_bytes()), bytearray(parent.path.read_bytes())
    for index, (start, end) in enumerate(chunk_ranges(len(data), file.chunk_size)):
        file.apply(index, memoryview(data)[start:end])
    return bytes(data)


def checkpoints(store: LearnerStore) -> list[str]:
    return sorted(path.name for path in store.checkpoints.iterdir())


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
        publication = commit(store, must=version == 5)
        published.append(publication and publication.version)
    assert published == [None, None, 3, None, 5]
    train(one)
    assert commit(store) is None
    # A restart publishes what it resumes, so that workers can have it.
    assert store_of(tmp_path, learner(run_spec(publish_every=3, max_staleness=9))).resume().version == 6


def test_old_versions_go_when_no_group_may_come_from_them_any_more(tmp_path: Path) -> None:
    _, store = started(tmp_path, 6)  # the staleness bound is 2
    assert publications(store) == ["v3", "v4", "v5", "v6"]
    assert checkpoints(store) == ["v4", "v5", "v6"]


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


def test_a_crash_at_any_step_of_a_commit_resumes_at_a_version_that_no_one_has_otherwise(
    tmp_path: Path,
) -> None:
    before, _ = started(tmp_path / "before", 4)
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
                commit(store)
                finished = done[0] < step
            except Crash:
                finished = False
        other = learner()
        resumed = store_of(folder, other)
        publication = resumed.resume()
        assert publication.version == other.version in (4, 5, 6)
        assert publication.state_hash == weights_of(other)
        # Under its own number, or under one above that which others may have by now.
        assert same_weights(other, one if other.version == 5 else before)
        assert max(other.consumed) == (5 if other.version == 5 else 4)
        if other.version > 4:
            assert read_publication(resumed.publications / "v5").state_hash == weights_of(one)
        hidden = [*resumed.checkpoints.glob(".*"), *resumed.publications.glob(".*")]
        assert hidden == [], "what a crash left half-written is cleared away"
        outcomes.append(other.version)
        train(other)
        commit(resumed)
        shutil.rmtree(folder)
        if finished:
            break
        step += 1
    # First nothing has happened; then the version is out and its checkpoint is not written; then it is.
    assert list(dict.fromkeys(outcomes)) == [4, 6, 5] and step > 15


def test_updates_after_the_last_checkpoint_are_made_again_under_new_numbers(tmp_path: Path) -> None:
    one = learner()
    store = store_of(tmp_path, one, every=3)
    store.resume()
    saved = None
    for version in range(1, 6):
        train(one)
        commit(store)
        if version == 3:
            saved = {name: tensor.clone() for name, tensor in one.policy.tensors().items()}
    assert checkpoints(store) == ["v0", "v3"]
    lost = [read_publication(store.publications / f"v{version}") for version in (4, 5)]
    other = learner(model_seed=5)
    resumed = store_of(tmp_path, other, every=3)
    publication = resumed.resume()
    assert publication.version == other.version == 6
    assert saved is not None and all(torch.equal(saved[n], t) for n, t in other.policy.tensors().items())
    assert set(other.consumed) == {1, 2, 3} and other.updates == 3
    assert [read_publication(store.publications / f"v{version}") for version in (4, 5)] == lost
    train(other)
    commit(resumed)
    assert set(other.consumed) == {1, 2, 3, 7}
    assert checkpoints(store) == ["v0", "v3", "v6"]


def test_an_orderly_stop_checkpoints_whatever_the_interval(tmp_path: Path) -> None:
    one = learner()
    store = store_of(tmp_path, one, every=100)
    store.resume()
    train(one)
    commit(store)
    assert checkpoints(store) == ["v0"]
    assert store.checkpoint(must=True) and not store.checkpoint(must=True)
    assert checkpoints(store) == ["v0", "v1"]
    other = learner()
    assert store_of(tmp_path, other).resume().version == 1


def test_numbers_go_on_after_those_that_the_node_has_given_out(tmp_path: Path) -> None:
    """The machine stopped before a published directory was on disk; the node's ledger has its number."""
    _, store = started(tmp_path, 2)
    other = learner()
    publication = store_of(tmp_path, other).resume(newest_known=5)
    assert publication.version == other.version == 6
    assert publication.delta is None or publication.delta.parent == 2
    assert checkpoints(store) == ["v1", "v2", "v6"]
    # An older number is no news.
    assert store_of(tmp_path, learner()).resume(newest_known=3).version == 6


def test_versions_are_published_with_deltas_from_the_one_before(tmp_path: Path) -> None:
    one = learner()
    store = store_of(tmp_path, one)
    assert store.resume().delta is None
    versions = []
    for _ in range(3):
        nudge(one)
        one.version += 1
        versions.append(commit(store))
    for version, publication in enumerate(versions, start=1):
        assert publication is not None and publication.delta is not None
        parent = read_publication(store.publications / f"v{version - 1}")
        assert (publication.delta.parent, publication.delta.parent_state) == (version - 1, parent.state_hash)
        assert patched(parent, publication.delta) == publication.path.read_bytes()
        assert read_publication(store.publications / f"v{version}") == publication
    # So is what a restart publishes: version 5 is version 3's weights again, told from version 4.
    nudge(one)
    one.version += 1
    lost = store.publish()
    assert lost is not None and lost.version == 4
    again = store_of(tmp_path, learner()).resume()
    assert again.version == 5 and again.delta is not None and again.delta.parent == 4
    assert versions[2] is not None and again.state_hash == versions[2].state_hash
    assert patched(lost, again.delta) == versions[2].path.read_bytes()


def test_after_a_collapse_the_last_good_version_is_published_again_under_a_new_number(tmp_path: Path) -> None:
    """Entropy is below an absurd floor from version 2 on; five bad updates later training stops at 6."""
    one = learner(halt_rules=HaltRules(halt_after=5))
    store = store_of(tmp_path, one, keep=1)
    store.resume()
    for _ in range(2):
        train(one)
        commit(store)
    good, optimizer = weights_of(one), {n: t.clone() for n, t in one.optimizer.tensors().items()}
    # The update from version 2 measured it well above both floors; what comes after does not.
    train(one)
    commit(store)
    one._watch.rules = HaltRules(min_entropy=100.0, halt_after=5)
    for _ in range(4):
        train(one)
        commit(store)
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
    assert commit(store) is None
    publication = store.publish_last_good(1)
    assert publication is not None and publication.version == 1
    assert store.publish_last_good(1) is None
    # A version whose checkpoint is gone cannot come back.
    shutil.rmtree(store.checkpoints)
    assert store.publish_last_good(0) is None and one.version == 1


def test_a_halt_goes_back_to_the_last_checkpoint_when_the_good_version_has_none(tmp_path: Path) -> None:
    one = learner()
    store = store_of(tmp_path, one, keep=1, every=2)
    store.resume()
    weights = {}
    for _ in range(5):
        train(one)
        commit(store)
        weights[one.version] = weights_of(one)
        if one.version == 3:
            one._watch.rules = HaltRules(min_entropy=100.0, halt_after=100)
    # Version 2 was measured by the third update, and found good; the fourth found version 3 bad.
    assert one.last_good_version == 2
    assert checkpoints(store) == ["v2", "v4"], "what a halt goes back to is kept"
    publication = store.publish_last_good(3)
    assert publication is not None
    assert (publication.version, publication.state_hash) == (6, weights[2])
    assert weights_of(one) == weights[2]
    assert store_of(tmp_path, learner()).resume() == publication

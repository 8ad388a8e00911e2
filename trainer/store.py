"""Where a learner's versions live on disk, and in which order they get there: publication first, then
checkpoint.

    <data_dir>/policies/<policy>/v<n>/       what it gives to others
    <data_dir>/checkpoints/<policy>/v<n>/    what the learner itself resumes from, each `checkpoint_every`-th

Workers have a version before its checkpoint, which takes longer, is written. So published versions may be
newer than what can be resumed from. The learner then goes on from older weights, but never under an older
number: workers already hold the weights that a published number stands for.
"""

import logging
from pathlib import Path

from protocol.chunks import state_hash
from trainer.checkpoint import CheckpointError, load_newest, load_newest_up_to, write_checkpoint
from trainer.files import remove_leftovers, version_directories
from trainer.learner import Learner
from trainer.publication import (
    ProbeResult,
    Publication,
    PublicationError,
    flush_publication,
    publish,
    published_versions,
    read_publication,
)
from trainer.snapshot_file import snapshot_chunks

log = logging.getLogger(__name__)


class LearnerStore:
    """Checkpoints and publications of one policy. One process at a time may use it."""

    def __init__(
        self,
        data_dir: Path,
        learner: Learner,
        probe_tokens: list[int],
        *,
        checkpoint_keep: int,
        checkpoint_every: int = 1,
    ) -> None:
        name = learner.policy_id.hex()[:16]
        self.checkpoints = data_dir / "checkpoints" / name
        self.publications = data_dir / "policies" / name
        self._learner = learner
        self._probe_tokens = probe_tokens
        self._checkpoint_keep = checkpoint_keep
        self._checkpoint_every = checkpoint_every
        self._published: Publication | None = None
        self._flushed: int | None = None
        """The last version whose publication is on disk to stay."""
        self._checkpointed: int | None = None

    def resume(self, newest_known: int | None = None) -> Publication:
        """Bring the learner to its newest checkpoint, or leave it fresh; then its version is published and
        checkpointed.

        `newest_known` is the newest version that others may have, as far as the node knows. Raises
        `CheckpointError` when there are only damaged checkpoints, or those of another run.
        """
        for folder in (self.checkpoints, self.publications):
            remove_leftovers(folder)
        learner = self._learner
        checkpoint = load_newest(self.checkpoints)
        if checkpoint is not None:
            if checkpoint.state.run_id != learner.spec.run_id:
                raise CheckpointError(
                    f"the checkpoints in {self.checkpoints} are of another run "
                    f"({checkpoint.state.run_id.hex()[:12]}): give this run a data directory of its own"
                )
            learner.restore(checkpoint)
            self._checkpointed = learner.version
        newest = max(published_versions(self.publications), default=-1)
        if newest_known is not None:
            newest = max(newest, newest_known)
        existing = self._read(learner.version)
        if newest > learner.version or (existing is not None and existing.state_hash != self._state_hash()):
            log.warning(
                "version %d was published but cannot be resumed from: the weights of version %d become "
                "version %d, and groups of later updates wait again",
                max(newest, learner.version),
                learner.version,
                max(newest, learner.version) + 1,
            )
            learner.version = max(newest, learner.version) + 1
            existing = None
        if existing is None:
            self._published = self._newest_before(learner.version)
            existing = self._publish()
        self._published = existing
        self.checkpoint(must=True)
        return existing

    def publish(self, *, must: bool = False) -> Publication | None:
        """Publish the learner's version when `publish_every` versions have passed, or if it must be."""
        learner, last = self._learner, self._published
        if last is not None and not must and learner.version - last.version < learner.spec.publish_every:
            return None
        self._published = self._publish()
        return self._published

    def checkpoint(self, *, must: bool = False) -> bool:
        """Make the learner's version durable when `checkpoint_every` versions have passed, or if it must be.
        Returns whether it wrote a checkpoint."""
        learner = self._learner
        if self._published is not None and self._published.version != self._flushed:
            flush_publication(self._published)
            self._flushed = self._published.version
        if self._checkpointed is not None:
            passed = learner.version - self._checkpointed
            if passed == 0 or (passed < self._checkpoint_every and not must):
                return False
        write_checkpoint(self.checkpoints, learner.checkpoint(), self._checkpoints_to_keep())
        self._checkpointed = learner.version
        return True

    def publish_last_good(self, version: int) -> Publication | None:
        """After a halt: make `version`, or the last checkpoint before it, the newest published one.

        Its weights get a new number if others came after it. None when it is the newest already, or when no
        checkpoint is left: then nothing changes.
        """
        learner = self._learner
        publication = None
        if version == learner.version:
            if self._published is None or self._published.version != version:
                publication = self.publish(must=True)
        else:
            checkpoint = load_newest_up_to(self.checkpoints, version)
            if checkpoint is None:
                return None
            learner.roll_back(checkpoint)
            publication = self.publish(must=True)
        self.checkpoint(must=True)
        return publication

    def _checkpoints_to_keep(self) -> int:
        """How many of the newest: what a collapse would be rolled back to is among them."""
        known = [*version_directories(self.checkpoints), self._learner.version]
        good = max((version for version in known if version <= self._learner.last_good_version), default=0)
        return max(self._checkpoint_keep, sum(version >= good for version in known))

    def _publish(self) -> Publication:
        return publish(
            self.publications,
            self._learner.version,
            self._learner.policy.tensors(),
            self._probe,
            chunk_size=self._learner.spec.model.chunk_size,
            keep=self._learner.spec.max_staleness + 2,
            parent=self._published,
        )

    def _probe(self) -> ProbeResult:
        policy = self._learner.policy
        with policy.rounded_to_bfloat16():
            return ProbeResult(self._probe_tokens, policy.sequence_logprobs(self._probe_tokens))

    def _newest_before(self, version: int) -> Publication | None:
        """The newest version below `version` that a delta can start from."""
        older = (number for number in reversed(published_versions(self.publications)) if number < version)
        return next(filter(None, map(self._read, older)), None)

    def _read(self, version: int) -> Publication | None:
        directory = published_versions(self.publications).get(version)
        if directory is None:
            return None
        try:
            return read_publication(directory)
        except PublicationError as error:
            log.warning("%s", error)
            return None

    def _state_hash(self) -> bytes:
        chunk_size = self._learner.spec.model.chunk_size
        size_bytes, chunks = snapshot_chunks(self._learner.policy.tensors(), chunk_size)
        return state_hash(size_bytes, chunk_size, chunks)

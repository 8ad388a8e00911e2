"""Where a learner's versions live on disk, and in which order they get there: checkpoint first, then
publication.

    <data_dir>/checkpoints/<policy>/v<n>/    what the learner itself resumes from
    <data_dir>/policies/<policy>/v<n>/       what it gives to others

So a published version can always be resumed from. If its checkpoint is damaged all the same, the learner goes
back to an older one, but never to an older number: workers already hold the weights that the old number
stands for.
"""

import logging
from pathlib import Path

from trainer.checkpoint import CheckpointError, load_newest, load_version, write_checkpoint
from trainer.files import remove_leftovers
from trainer.learner import Learner
from trainer.publication import (
    ProbeResult,
    Publication,
    PublicationError,
    hash_of,
    publish,
    published_versions,
    read_publication,
    snapshot,
)

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
    ) -> None:
        name = learner.policy_id.hex()[:16]
        self.checkpoints = data_dir / "checkpoints" / name
        self.publications = data_dir / "policies" / name
        self._learner = learner
        self._probe_tokens = probe_tokens
        self._checkpoint_keep = checkpoint_keep
        self._published: int | None = None

    def resume(self) -> Publication:
        """Bring the learner to its newest checkpoint, or leave it fresh; then its version is checkpointed and
        published.

        Raises `CheckpointError` when there are only damaged checkpoints, or those of another run.
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
        existing = self._existing(learner.version)
        newest = max(published_versions(self.publications), default=-1)
        weights_differ = existing is not None and existing.state_hash != self._state_hash()
        if newest > learner.version or weights_differ:
            log.warning(
                "version %d was published but cannot be resumed from: older weights become version %d",
                max(newest, learner.version),
                max(newest, learner.version) + 1,
            )
            learner.version = max(newest, learner.version) + 1
            existing, checkpoint = None, None
        if checkpoint is None:
            self._write_checkpoint()
        if existing is None:
            existing = self._publish()
        self._published = existing.version
        return existing

    def commit(self, *, must_publish: bool = False) -> Publication | None:
        """Make the learner's version durable; publish it when `publish_every` versions have passed, or if it
        must be."""
        learner = self._learner
        self._write_checkpoint()
        due = self._published is None or learner.version - self._published >= learner.spec.publish_every
        if not due and not must_publish:
            return None
        publication = self._publish()
        self._published = publication.version
        return publication

    def publish_last_good(self, version: int) -> Publication | None:
        """After a halt: make `version` the newest published one. Its weights get a new number if others came
        after it. None when that is so already, or when its checkpoint is gone: then nothing changes."""
        learner = self._learner
        if version == learner.version:
            return None if self._published == version else self.commit(must_publish=True)
        checkpoint = load_version(self.checkpoints, version)
        if checkpoint is None:
            return None
        learner.roll_back(checkpoint)
        return self.commit(must_publish=True)

    def _write_checkpoint(self) -> None:
        """What a collapse would be rolled back to is kept, however many newer ones there are."""
        learner = self._learner
        keep = max(self._checkpoint_keep, learner.version - learner.last_good_version + 1)
        write_checkpoint(self.checkpoints, learner.checkpoint(), keep)

    def _publish(self) -> Publication:
        return publish(
            self.publications,
            self._learner.version,
            snapshot(self._learner.policy.tensors()),
            self._probe,
            chunk_size=self._learner.spec.model.chunk_size,
            keep=self._learner.spec.max_staleness + 2,
        )

    def _probe(self) -> ProbeResult:
        policy = self._learner.policy
        with policy.rounded_to_bfloat16():
            return ProbeResult(self._probe_tokens, policy.sequence_logprobs(self._probe_tokens))

    def _existing(self, version: int) -> Publication | None:
        directory = published_versions(self.publications).get(version)
        if directory is None:
            return None
        try:
            return read_publication(directory)
        except PublicationError as error:
            log.warning("%s: publishing version %d again", error, version)
            return None

    def _state_hash(self) -> bytes:
        return hash_of(snapshot(self._learner.policy.tensors()), self._learner.spec.model.chunk_size)

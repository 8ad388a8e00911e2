"""Follows a policy's published versions: hears of a new one, fetches its manifest and chunks, verifies,
hands it over."""

import logging
import random
from collections.abc import Callable
from pathlib import Path

import trio

from peers.base import PeerId, TransportError
from peers.chunk_exchange import TransferFailed
from peers.swarm import Swarm
from protocol.base import Message
from protocol.envelope import Envelope, open_envelope
from protocol.messages import Manifest, ManifestRequest, SignedReply
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from swarmnode.runtime.download import download_file
from swarmnode.runtime.version_store import (
    WEIGHTS_NAME,
    StoredVersion,
    VersionStore,
    file_chunk_hashes,
    version_directory,
)

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Gossip is lossy: look for a newer version this often even when nothing is heard."""
MANIFEST_TIMEOUT_S = 10.0
MAX_ASKED = 3
"""Peers asked for the newest manifest at a time."""


def serve_manifests(swarm: Swarm, versions: VersionStore) -> None:
    """Answer manifest requests from what is on disk."""

    async def handle(sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, ManifestRequest)
        stored = versions.get(message.policy, message.version)
        if stored is None:
            raise Refused(RefusalReason.NOT_FOUND, "no such version is held here")
        return "signed_reply", SignedReply(envelope=stored.envelope.encoded)

    swarm.serve("manifest_request", handle)


class WeightFollower:
    """Keeps the newest version of one policy on disk.

    Promises: a version is handed over only when its manifest is signed by the policy's learner, every chunk
    has its hash; versions only move forward; a failed download changes
    nothing.
    """

    def __init__(
        self,
        *,
        policy: bytes,
        spec: RunSpec,
        swarm: Swarm,
        versions: VersionStore,
        policies_path: Path,
        holders: Callable[[int | None], list[PeerId]],
        on_version: Callable[[StoredVersion], None],
        on_event: Callable[[str, str], None],
        on_refusal: Callable[[bytes, RefusalReason, str], None],
    ) -> None:
        self.newest_heard: int | None = None
        self._policy = policy
        self._spec = spec
        self._swarm = swarm
        self._versions = versions
        self._policies_path = policies_path
        self._holders = holders
        self._on_version = on_version
        self._on_event = on_event
        self._on_refusal = on_refusal
        self._news = trio.Event()
        self._random = random.Random()

    def heard_of(self, version: int) -> None:
        """Somebody says that `version` exists; it is believed only once its manifest is seen."""
        if self.newest_heard is None or version > self.newest_heard:
            self.newest_heard = version
            self._news.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        held = self._versions.get(self._policy, None)
        while held is not None:
            if await self._is_intact(held.weights_path, held.manifest):
                self._on_version(held)
                break
            self._on_event("warning", f"version {held.manifest.version} on disk is damaged: fetched anew")
            self._versions.discard(held)
            held = self._versions.get(self._policy, None)
        while True:
            with trio.move_on_after(POLL_S):
                await self._news.wait()
            self._news = trio.Event()
            try:
                await self._catch_up()
            except TransferFailed as error:
                self._on_event("warning", f"a version could not be fetched and will be tried again: {error}")
            except OSError as error:
                self._on_event("error", f"cannot write weights below {self._policies_path}: {error}")

    async def _catch_up(self) -> None:
        found = await self._newest_manifest()
        if found is None:
            return
        manifest, envelope = found
        held = self._versions.versions(self._policy)
        if held and manifest.version <= held[-1]:
            return
        directory = version_directory(self._policies_path, self._policy, manifest.version)
        path = directory / WEIGHTS_NAME
        if not await self._download(manifest, path):
            return
        if not await self._is_intact(path, manifest):
            path.unlink(missing_ok=True)
            self._on_event("error", f"version {manifest.version} was damaged on this disk: fetched anew")
            return
        stored = self._versions.add(manifest, envelope, path)
        await trio.to_thread.run_sync(self._versions.save_manifest, stored)
        await self._versions.retain(self._policy, self._spec.max_staleness + 2)
        self._on_version(stored)

    async def _download(self, manifest: Manifest, path: Path) -> bool:
        """Fetch a version; False when it is given up because newer ones have made it useless meanwhile."""
        failure: Exception | None = None
        done = False
        newest = max(self.newest_heard or 0, manifest.version)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_too_old, newest, nursery.cancel_scope)
            try:
                await download_file(
                    self._swarm,
                    self._versions.shelf,
                    path,
                    size_bytes=manifest.size_bytes,
                    chunk_size=manifest.chunk_size,
                    chunks=manifest.chunks,
                    providers=lambda: self._holders(manifest.version),
                )
                done = True
            except (TransferFailed, OSError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if (self.newest_heard or 0) > newest:
            self._news.set()
        if failure is not None:
            # Raised here and not inside: a nursery would wrap it in a group.
            raise failure
        return done

    async def _cancel_when_too_old(self, newest: int, scope: trio.CancelScope) -> None:
        """When so many versions came meanwhile, its learner soon deletes the one that is being fetched, and
        groups of it would be refused as too stale."""
        while (self.newest_heard or 0) - newest <= self._spec.max_staleness:
            await self._news.wait()
            self._news = trio.Event()
        log.info(
            "a download is given up: version %s exists, it was %d when it began", self.newest_heard, newest
        )
        scope.cancel()

    async def _is_intact(self, path: Path, manifest: Manifest) -> bool:
        try:
            found = await trio.to_thread.run_sync(file_chunk_hashes, path, manifest.chunk_size)
        except OSError as error:
            log.warning("%s: %s", path, error)
            return False
        return found == manifest.chunks

    async def _newest_manifest(self) -> tuple[Manifest, Envelope] | None:
        best: tuple[Manifest, Envelope] | None = None
        for peer in self._whom_to_ask():
            try:
                reply = await self._swarm.call(
                    peer,
                    ManifestRequest(policy=self._policy),
                    timeout_s=MANIFEST_TIMEOUT_S,
                    expect=SignedReply,
                )
                envelope = open_envelope(reply.envelope, run_id=self._spec.run_id)
                if envelope.kind != "manifest" or envelope.sender != self._policy:
                    raise Refused(
                        RefusalReason.NOT_A_LEARNER, "a manifest not signed by the policy's learner"
                    )
                manifest = Manifest.decode(envelope.body)
                if manifest.policy != self._policy or not self._spec.may_publish(envelope.sender):
                    raise Refused(
                        RefusalReason.NOT_A_LEARNER, "a manifest of a policy that its signer does not train"
                    )
            except TransportError as error:
                log.debug("no manifest from %s: %s", peer.hex()[:12], error)
                continue
            except Refused as refused:
                if refused.reason is not RefusalReason.NOT_FOUND:
                    self._on_refusal(peer, refused.reason, refused.detail)
                continue
            if best is None or manifest.version > best[0].version:
                best = (manifest, envelope)
            if self.newest_heard is not None and manifest.version >= self.newest_heard:
                break
        return best

    def _whom_to_ask(self) -> list[PeerId]:
        """The learner first; others in random order, for some may say they hold what they do not."""
        peers = self._holders(self.newest_heard) or self._holders(None)
        learner = [peer for peer in peers if peer == self._policy]
        others = [peer for peer in peers if peer != self._policy]
        return [*learner, *self._random.sample(others, len(others))][:MAX_ASKED]

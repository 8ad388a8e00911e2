"""The signed manifests of one policy: answered from disk, asked of peers, remembered for a while."""

import logging
import random
from collections.abc import Callable, Mapping

from peers.base import PeerId, TransportError
from peers.swarm import Swarm
from protocol.base import Message
from protocol.envelope import Envelope, open_envelope
from protocol.messages import Manifest, ManifestRequest, SignedReply
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from swarmnode.runtime.version_store import VersionStore
from swarmnode.runtime.weight_plan import VersionFacts

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
MAX_ASKED = 3
"""Peers asked for a manifest at a time."""

Holders = Callable[[int | None], list[PeerId]]
"""Connected peers that say they hold something of a version (None: of any), the learner in any case."""


def serve_manifests(swarm: Swarm, versions: VersionStore) -> None:
    """Answer manifest requests from what is on disk."""

    async def handle(sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, ManifestRequest)
        stored = versions.get(message.policy, message.version)
        if stored is None:
            raise Refused(RefusalReason.NOT_FOUND, "no such version is held here")
        return "signed_reply", SignedReply(envelope=stored.envelope.encoded)

    swarm.serve("manifest_request", handle)


class ManifestBook:
    """Asks for manifests and believes only those that the policy's learner signed."""

    def __init__(
        self,
        *,
        policy: bytes,
        spec: RunSpec,
        swarm: Swarm,
        holders: Holders,
        on_refusal: Callable[[bytes, RefusalReason, str], None],
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._swarm = swarm
        self._holders = holders
        self._on_refusal = on_refusal
        self._random = random.Random()
        self._known: dict[int, tuple[Manifest, Envelope]] = {}
        self._facts: dict[int, VersionFacts] = {}

    @property
    def newest(self) -> int | None:
        """The newest version whose manifest was seen."""
        return max(self._known, default=None)

    @property
    def facts(self) -> Mapping[int, VersionFacts]:
        """What is known of each version."""
        return self._facts

    def get(self, version: int) -> tuple[Manifest, Envelope]:
        """A manifest that is known."""
        return self._known[version]

    def add(self, manifest: Manifest, envelope: Envelope) -> None:
        """Remember a verified manifest; of the oldest ones the files are gone everywhere, so they go too."""
        self._known[manifest.version] = manifest, envelope
        self._facts[manifest.version] = VersionFacts.of(manifest)
        for version in sorted(self._known)[: -(self._spec.max_staleness + 2)]:
            del self._known[version], self._facts[version]

    async def ask(self, version: int | None, newest_heard: int | None = None) -> int | None:
        """Ask for one version, or for the newest (that of `newest_heard`, if it is given, is taken at once).

        What is found is remembered; its number is returned.
        """
        best: tuple[Manifest, Envelope] | None = None
        wanted = newest_heard if version is None else version
        for peer in self._whom_to_ask(wanted):
            found = await self._ask_one(peer, version)
            if found is not None and (best is None or found[0].version > best[0].version):
                best = found
                if wanted is not None and found[0].version >= wanted:
                    break
        if best is None:
            return None
        manifest, envelope = best
        if manifest.version not in self._known:
            self.add(manifest, envelope)
        return manifest.version

    async def _ask_one(self, peer: PeerId, version: int | None) -> tuple[Manifest, Envelope] | None:
        try:
            request = ManifestRequest(policy=self._policy, version=version)
            reply = await self._swarm.call(peer, request, timeout_s=TIMEOUT_S, expect=SignedReply)
            envelope = open_envelope(reply.envelope, run_id=self._spec.run_id)
            if envelope.kind != "manifest" or envelope.sender != self._policy:
                raise Refused(RefusalReason.NOT_A_LEARNER, "a manifest not signed by the policy's learner")
            manifest = Manifest.decode(envelope.body)
            if manifest.policy != self._policy or not self._spec.may_publish(envelope.sender):
                raise Refused(
                    RefusalReason.NOT_A_LEARNER, "a manifest of a policy that its signer does not train"
                )
            if version is not None and manifest.version != version:
                raise Refused(RefusalReason.MALFORMED, f"asked for version {version}, got {manifest.version}")
        except TransportError as error:
            log.debug("no manifest from %s: %s", peer.hex()[:12], error)
        except Refused as refused:
            if refused.reason is not RefusalReason.NOT_FOUND:
                self._on_refusal(peer, refused.reason, refused.detail)
        else:
            return manifest, envelope
        return None

    def _whom_to_ask(self, version: int | None) -> list[PeerId]:
        """The learner first; others in random order, for some may say they hold what they do not."""
        peers = self._holders(version) or self._holders(None)
        learner = [peer for peer in peers if peer == self._policy]
        others = [peer for peer in peers if peer != self._policy]
        return [*learner, *self._random.sample(others, len(others))][:MAX_ASKED]

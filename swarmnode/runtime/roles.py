"""What a role needs running: which child processes and services, wired to each other and to the network."""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from peers.base import PeerId, TransportError
from protocol.chunks import chunk_hash
from protocol.identity import NodeKey, node_name
from protocol.messages import ManifestAnnouncement, PolicyProgress, Presence, Receipt, RolloutGroup
from protocol.refusals import Refused
from swarmnode.runtime.children import ChildProcess, ChildState
from swarmnode.runtime.curves import CurvesOfOthers
from swarmnode.runtime.learner_links import LocalLearner, RemoteLearner
from swarmnode.runtime.learner_role import LearnerRole
from swarmnode.runtime.run_setup import vocabulary_size
from swarmnode.runtime.sharing import Sharing
from swarmnode.runtime.version_store import StoredVersion
from swarmnode.runtime.weight_follower import WeightFollower
from swarmnode.runtime.worker_role import WorkerRole

if TYPE_CHECKING:
    from swarmnode.runtime.node import Node

log = logging.getLogger(__name__)

LAST_RECEIPTS_S = 1.5
"""How long a stopping worker waits for the receipts of its last groups; unsent ones stay on disk."""
VERIFIER_GRACE_S = 1.0
"""It is stopped last, and what it has in hand comes again."""
ANNOUNCE_TIMEOUT_S = 5.0
MAX_SERVED = 16
"""Versions that a node tells others it holds: they are in every presence message."""


class Roles:
    """The running parts of a node. Built by `build_roles`; `start` needs a nursery that outlives them."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self.learner: LearnerRole | None = None
        self.worker: WorkerRole | None = None
        self.follower: WeightFollower | None = None
        self.sharing: Sharing | None = None
        self.policy: bytes | None = None
        self.failure: str | None = None
        self._children: list[ChildProcess] = []
        self._failed = trio.Event()
        self._was_ready: set[str] = set()
        self.nursery: trio.Nursery

    # Wiring

    def add_learner(self) -> LearnerRole:
        """This node trains its own policy."""
        node = self._node
        assert node.model_path is not None
        learner = LearnerRole(
            spec=node.spec,
            identity=node.identity,
            vocabulary_size=vocabulary_size(node.model_path),
            store=node.store,
            versions=node.versions,
            next_sequence=node.next_sequence,
            on_published=self._on_published,
            on_event=node.journal.event,
            on_metric=lambda name, version, value: node.journal.point(name, node.name, version, value),
            on_refusal=node.count_refusal,
        )
        last = node.journal.last_own("accuracy")
        if last is not None and last["version"] > 0:
            learner.status.eval_after = last["value"]
        settings = node.config.learner
        learner.learner_process = self._child(
            "learner",
            configure=lambda: {
                "type": "configure",
                "spec": node.spec.encode(),
                "policy": learner.policy,
                "model_dir": str(node.model_path),
                "data_dir": str(node.directory.root),
                "newest_published": learner.newest_published,
                "settings": settings.model_dump(),
            },
            on_message=learner.on_learner_message,
            on_down=learner.on_learner_down,
            threads=settings.threads,
        )
        learner.checks.process = self._child(
            "verifier",
            configure=lambda: {
                "type": "configure",
                "spec": node.spec.encode(),
                "model_dir": str(node.model_path),
            },
            on_message=learner.checks.on_message,
            on_down=lambda failed: learner.checks.on_down(),
            threads=1,
        )
        node.swarm.serve("credit_request", learner.handle_credit)
        node.swarm.serve("group_push", learner.handle_push)
        self.learner = learner
        self.policy = learner.policy
        return learner

    def add_worker(self, policy: bytes, link: RemoteLearner | LocalLearner) -> WorkerRole:
        """This node generates rollouts for `policy`."""
        node = self._node
        worker = WorkerRole(
            policy=policy,
            run_id=node.spec.run_id,
            identity=node.identity,
            link=link,
            store=node.store,
            next_sequence=node.next_sequence,
            groups_in_hand=node.config.engine.groups_in_hand,
            on_event=node.journal.event,
            on_accepted=self._on_accepted if node.spec.external_groups else None,
        )
        engine = node.config.engine.model_dump(exclude={"groups_in_hand"})
        worker.process = self._child(
            "rollout",
            configure=lambda: {
                "type": "configure",
                "spec": node.spec.encode(),
                "run_id": node.spec.run_id,
                "policy": policy,
                "node_key": bytes(node.identity.key),
                "model_dir": str(node.model_path),
                "engine": engine,
                "share_text": node.spec.external_groups > 0,
            },
            on_message=worker.on_message,
            on_down=lambda failed: worker.on_process_down(),
            threads=node.config.engine.threads,
        )
        self.worker = worker
        self.policy = policy
        return worker

    def add_follower(self, policy: bytes) -> None:
        """This node keeps the newest version of `policy` on disk, for its engine and for others."""
        node = self._node
        self.follower = WeightFollower(
            policy=policy,
            spec=node.spec,
            swarm=node.swarm,
            versions=node.versions,
            policies_path=node.directory.policies_path,
            holders=partial(self._holders, policy),
            providers=node.discovery.connected,
            on_version=self._on_version,
            on_withdrawn=self._on_withdrawn,
            on_event=node.journal.event,
            on_refusal=node.count_refusal,
        )
        self.policy = policy
        node.discovery.require(policy)  # type: ignore[arg-type]

    def add_sharing(self, learner: LearnerRole) -> None:
        """This node and others learn from each other's groups."""
        node = self._node
        self.sharing = Sharing(
            swarm=node.swarm,
            store=node.store,
            learner=learner,
            external_groups=node.spec.external_groups,
            config=node.config.sharing,
            on_refusal=node.count_refusal,
            seed=node.config.learner.seed,
        )

    def _child(
        self,
        name: str,
        *,
        configure: Callable[[], dict[str, Any]],
        on_message: Callable[[dict[str, Any]], Awaitable[None]],
        on_down: Callable[[str | None], None],
        threads: int,
    ) -> ChildProcess:
        node = self._node

        def on_state(state: ChildState, text: str) -> None:
            if state == "running":
                self._was_ready.add(name)
            else:
                on_down(text if state == "failed" else None)
            node.journal.event({"running": "info", "restarting": "warning"}.get(state, "error"), text)
            if state == "failed" and name not in self._was_ready:
                self.failure = text
                self._failed.set()

        child = ChildProcess(
            name,
            f"swarmnode.processes.{name}",
            configure=configure,
            on_message=on_message,
            on_state=on_state,
            log_path=node.directory.logs_path / f"{name}.log",
            threads=threads,
        )
        self._children.append(child)
        return child

    # Lifecycle

    async def start(self, nursery: trio.Nursery) -> None:
        """Start children and services in `nursery`."""
        node = self._node
        self.nursery = nursery
        if self.learner is not None:
            await self.learner.start()
            node.supervise(nursery, "credit of lost workers", self._watch_connections)
        if self.worker is not None:
            await self.worker.start()
        for child in self._children:
            node.supervise(nursery, f"{child.name} process", child.run)
        if self.worker is not None:
            node.supervise(nursery, "worker", self.worker.run)
        if self.follower is not None:
            node.supervise(nursery, "weights", self.follower.run)
            node.supervise(nursery, "announcements of versions", self._hear_manifests)
        if self.sharing is not None:
            node.supervise(nursery, "announcements of groups", self.sharing.listen)
            node.supervise(nursery, "external groups", self.sharing.pull)
        node.supervise(nursery, "presence", self._hear_presence)

    async def failed_or(self, stop: trio.Event) -> None:
        """Wait until `stop`, or until a child failed at its first start (`failure` says why)."""
        async with trio.open_nursery() as nursery:

            async def wait_failed() -> None:
                await self._failed.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait_failed)
            await stop.wait()
            nursery.cancel_scope.cancel()

    async def stop(self) -> None:
        """Finish or give back what is in hand; children end."""
        worker = self.worker
        if worker is not None:
            worker.begin_stop()
        async with trio.open_nursery() as nursery:
            for child in self._children:
                if child.name != "verifier":
                    nursery.start_soon(child.stop)
        if worker is not None:
            with trio.move_on_after(LAST_RECEIPTS_S):
                while worker.in_outbox and (self.learner is not None or self._learner_is_connected()):
                    await trio.sleep(0.05)
        for child in self._children:
            if child.name == "verifier":
                await child.stop(VERIFIER_GRACE_S)

    def _learner_is_connected(self) -> bool:
        return self.policy is not None and PeerId(self.policy) in self._node.transport.connected_peers()

    def child_pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.pid for child in self._children if child.pid is not None]

    # Versions

    async def _on_published(self, stored: StoredVersion) -> None:
        if self.worker is not None:
            self.worker.offer_version(stored)
        manifest = stored.manifest
        try:
            with trio.move_on_after(ANNOUNCE_TIMEOUT_S):
                await self._node.swarm.announce(
                    ManifestAnnouncement(
                        policy=manifest.policy,
                        version=manifest.version,
                        manifest=chunk_hash(stored.envelope.encoded),
                    )
                )
        except (TransportError, Refused) as error:
            log.info("version %d was not announced: %s", manifest.version, error)

    def _on_version(self, stored: StoredVersion) -> None:
        if self.worker is not None:
            self.worker.offer_version(stored)

    def _on_withdrawn(self, versions: Sequence[int]) -> None:
        if self.worker is not None:
            self.worker.withdraw_versions(versions)

    def _on_accepted(self, envelope: bytes, group: RolloutGroup, receipt: Receipt) -> None:
        if self.sharing is not None:
            self.nursery.start_soon(self.sharing.share, envelope, group, receipt)

    def _holders(self, policy: bytes, version: int | None) -> list[PeerId]:
        """Connected peers that say they hold something of a version; the learner of the policy comes first in
        any case."""
        holders: list[PeerId] = []
        for peer in self._node.discovery.connected():
            member = self._node.discovery.member(NodeKey(peer))
            if member is None:
                continue
            progress = next((one for one in member.hello.policies if one.policy == policy), None)
            serves = progress is not None and (version is None or version in progress.served_versions)
            if peer == policy:
                holders.insert(0, peer)
            elif serves:
                holders.append(peer)
        return holders

    async def _watch_connections(self) -> None:
        """A worker that is gone will not bring what it was granted, so others may."""
        transport = self._node.transport
        async for event in transport.events():
            if self.learner is not None and event.peer not in transport.connected_peers():
                self.learner.forget_worker(event.peer)

    async def _hear_manifests(self) -> None:
        async for author, message in self._node.swarm.announcements("manifest_announcement"):
            assert isinstance(message, ManifestAnnouncement)
            if self.follower is not None and author == self.policy == message.policy:
                self.follower.heard_of(message.version)

    async def _hear_presence(self) -> None:
        node = self._node
        curves = CurvesOfOthers(
            node.journal,
            own_name=node.name,
            is_plotted=lambda author: author == self.policy or node.discovery.is_connected(NodeKey(author)),
            name_of=node.name_of,
        )
        async for author, message in node.swarm.announcements("presence"):
            assert isinstance(message, Presence)
            for progress in message.policies:
                # Only the learner knows what exists: others may claim any number.
                if self.follower is not None and author == self.policy == progress.policy:
                    self.follower.heard_of(progress.version)
            curves.heard(author, message)

    # What others see

    def progress(self) -> list[PolicyProgress]:
        """What this node holds of its policy."""
        if self.policy is None:
            return []
        served = self._node.versions.versions(self.policy)[-MAX_SERVED:]
        version = self.version
        if version is None:
            return []
        return [PolicyProgress(policy=self.policy, version=version, served_versions=served)]

    @property
    def version(self) -> int | None:
        """The version trained (learner), loaded (worker) or held (relay)."""
        if self.learner is not None:
            return self.learner.status.version
        if self.worker is not None:
            return self.worker.loaded_version
        held = self._node.versions.complete(self.policy) if self.policy is not None else []
        return held[-1].version if held else None

    def figures(self) -> dict[str, Any]:
        """The measured part of a presence message."""
        values: dict[str, Any] = {"refused": sum(self._node.refused.values())}
        if self.learner is not None:
            status = self.learner.status
            accuracy = status.eval_after if status.eval_after is not None else status.eval_before
            values |= {
                "updates": status.updates,
                "accepted": sum(self.learner.accepted_from.values()),
                "reward": _finite(status.metrics.get("reward_mean")),
                "accuracy": _finite(accuracy),
            }
        if self.worker is not None:
            receipts = self.worker.receipts
            values |= {
                "groups_per_min": self.worker.group_rate.per_second() * 60,
                "tokens_per_s": self.worker.token_rate.per_second(),
                "accepted": receipts["accepted"],
                "refused": sum(receipts.values()) - receipts["accepted"],
            }
        return values


def _finite(value: float | None) -> float | None:
    """What a message may carry."""
    return value if value is not None and math.isfinite(value) else None


def build_roles(node: "Node") -> Roles:
    """The parts that the node's role and its run's preset call for."""
    roles = Roles(node)
    role = node.role
    policy = node.spec.learners[0] if node.spec.learners else bytes(node.identity.key)
    if role == "learner":
        roles.add_learner()
    elif role == "peer":
        learner = roles.add_learner()
        roles.add_worker(learner.policy, LocalLearner(learner))
        if node.spec.external_groups:
            roles.add_sharing(learner)
    elif role == "worker":
        roles.add_worker(policy, RemoteLearner(node.swarm, policy))
        roles.add_follower(policy)
    elif node.spec.learners:
        roles.add_follower(policy)
    log.info("role %s for policy %s", role, node_name(policy))
    return roles

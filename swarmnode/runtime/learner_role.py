"""The learner's side of a node: receive, check and record groups, pace workers, sign and announce what is
trained."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from peers.base import PeerId
from protocol.admission import check_group
from protocol.base import Message
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity, node_name
from protocol.messages import (
    Credit,
    CreditRequest,
    Delta,
    GroupPush,
    Manifest,
    Probe,
    Receipt,
    RolloutGroup,
    group_id,
)
from protocol.pacing import PacingState, grant_credit
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from protocol.staleness import oldest_version
from swarmnode.runtime.children import ChildGone, ChildProcess
from swarmnode.runtime.credit_book import CreditBook
from swarmnode.runtime.group_checks import GroupChecks
from swarmnode.runtime.learner_status import LearnerStatus
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.runtime.version_store import StoredVersion, VersionStore

log = logging.getLogger(__name__)

RETRY_AFTER_S = 0.25
THREAD_BYTES = 256 * 1024
"""Pushed groups from this size on are opened in a thread: hashing and decoding them takes milliseconds."""


class LearnerRole:
    """Owns the ledger's intake and the learner process's messages.

    Promises: a receipt that says accepted is sent only after the ledger has the group on disk; a group is
    recorded once however often it is sent; the learner process sees each waiting group once per start of that
    process. `start` comes first.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        identity: Identity,
        vocabulary_size: int,
        store: StoreThread,
        versions: VersionStore,
        next_sequence: Callable[[], int],
        on_published: Callable[[StoredVersion], Awaitable[None]],
        on_event: Callable[[str, str], None],
        on_metric: Callable[[str, int, float], None],
        on_refusal: Callable[[bytes, RefusalReason, str], None],
    ) -> None:
        self.policy = bytes(identity.key)
        self.status = LearnerStatus()
        self.accepted_from: Counter[bytes] = Counter()
        self.checks = GroupChecks(spec.run_id)
        self.learner_process: ChildProcess | None = None
        self.newest_published: int | None = None
        """The highest version number that others may have. It never stands for other weights."""
        self._spec = spec
        self.run_id = spec.run_id
        self._identity = identity
        self._vocabulary_size = vocabulary_size
        self._store = store
        self._versions = versions
        self._next_sequence = next_sequence
        self._on_published = on_published
        self._on_event = on_event
        self._on_metric = on_metric
        self._on_refusal = on_refusal
        self._credits = CreditBook()
        self._waiting: dict[str, set[bytes]] = {"local": set(), "external": set()}
        """What the ledger has as accepted, by source, whether or not a learner process runs."""
        self._handed_over: set[bytes] = set()
        """Those of them that the learner process of now has been sent."""
        self._takes_groups = False
        self._counts_are_known = False
        self._missed_some = False
        self._told_to_finish = False

    async def start(self) -> None:
        """Take from the ledger what earlier starts did."""
        self.accepted_from.update(await self._store.run(lambda store: store.accepted_by_sender()))
        self.status.published_versions = await self._store.run(lambda store: store.published_versions())
        self.newest_published = await self._store.run(lambda store: store.newest_published())
        await self._count_from_ledger()

    async def _count_from_ledger(self) -> None:
        updates, staleness = await self._store.run(lambda store: (store.updates(), store.staleness()))
        self.status.count_from_ledger(updates, staleness)

    @property
    def waiting_local(self) -> int:
        """Accepted groups of this policy that are not consumed yet."""
        return len(self._waiting["local"])

    @property
    def waiting_external(self) -> int:
        """Accepted groups of other policies that are not consumed yet."""
        return len(self._waiting["external"])

    @property
    def is_up(self) -> bool:
        """Whether a learner process takes groups now."""
        return self._counts_are_known

    # Credit

    def credit(self, worker: bytes, request: CreditRequest) -> Credit:
        """Answer a worker's request for credit."""
        status = self.status
        if request.policy != self.policy:
            raise Refused(RefusalReason.UNKNOWN_POLICY, f"this node trains {node_name(self.policy)}")
        if status.version is None or not self._counts_are_known:
            return Credit(granted=0, version=0, retry_after_s=1.0, reason="the learner process is starting")
        if status.final:
            return Credit(
                granted=0, version=status.version, retry_after_s=5.0, reason="training has finished"
            )
        if status.halted is not None:
            return Credit(granted=0, version=status.version, retry_after_s=5.0, reason="training has halted")
        now = trio.current_time()
        state = PacingState(
            version=status.version,
            published_version=status.version,
            batch_groups=self._spec.local_groups,
            # Groups in check count as outstanding until they wait.
            waiting=self.waiting_local,
            outstanding=self._credits.outstanding(now),
            max_staleness=self._spec.max_staleness,
            pacing_batches=self._spec.pacing_batches,
        )
        room = self._credits.room(worker, now)
        grant = grant_credit(state, request.version, min(request.wanted, room))
        reason = grant.reason
        if grant.count:
            self._credits.grant(worker, grant.count, now)
        elif room == 0:
            reason = "no more is granted to this node before some of its groups come"
        return Credit(granted=grant.count, version=status.version, retry_after_s=RETRY_AFTER_S, reason=reason)

    def forget_worker(self, worker: bytes) -> None:
        """A worker's connection is gone: its credit can be granted to others."""
        self._credits.forget_grants(worker)

    # Intake

    async def handle_credit(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, CreditRequest)
        return "credit", self.credit(sender, message)

    async def handle_push(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, GroupPush)
        opening = partial(open_envelope, message.envelope, run_id=self.run_id)
        large = len(message.envelope) >= THREAD_BYTES
        envelope = await trio.to_thread.run_sync(opening) if large else opening()
        if envelope.sender != sender:
            raise Refused(RefusalReason.WRONG_SENDER, "a worker pushes its own groups only")
        return "receipt", await self.receive_local(envelope)

    async def receive_local(self, envelope: Envelope) -> Receipt:
        """Check and record a group of this node's policy; the receipt is the verdict."""
        if envelope.kind != "rollout_group":
            raise Refused(RefusalReason.WRONG_KIND, f"expected rollout_group, got {envelope.kind}")
        group_name = group_id(envelope.sender, envelope.body)
        known = await self._store.run(lambda store: store.verdict(group_name))
        if known is not None:
            return Receipt(group=group_name, accepted=known.accepted, reason=known.reason, duplicate=True)
        try:
            await self._admit(group_name, envelope, source="local")
        except Refused as refused:
            if refused.reason is RefusalReason.BUSY:
                raise
            self._credits.received(envelope.sender, trio.current_time(), accepted=False)
            self._on_refusal(envelope.sender, refused.reason, refused.detail)
            return Receipt(
                group=group_name, accepted=False, reason=refused.reason.value, detail=refused.detail[:512]
            )
        self._credits.received(envelope.sender, trio.current_time(), accepted=True)
        return Receipt(group=group_name, accepted=True)

    async def receive_external(self, envelope: Envelope) -> bool:
        """Check and record another policy's group; False if it teaches nothing (all rewards equal) or is
        known."""
        group_name = group_id(envelope.sender, envelope.body)
        if await self._store.run(lambda store: store.verdict(group_name)) is not None:
            return False
        return await self._admit(group_name, envelope, source="external")

    async def _admit(self, group_name: bytes, envelope: Envelope, source: str) -> bool:
        group = RolloutGroup.decode(envelope.body)
        self._check_rules(group, envelope, source)
        checked = await self.checks.check(group_name, envelope, source)
        self._check_rules(group, envelope, source)
        if source == "external" and max(checked.rewards) == min(checked.rewards):
            return False
        record: dict[str, Any] = {
            "prompt_ids": checked.prompt_ids,
            "completions": checked.completions,
            "rewards": checked.rewards,
        }
        tokens = sum(len(completion.tokens) // 4 for completion in group.completions)
        mean_reward = sum(checked.rewards) / len(checked.rewards)
        new = await self._store.run(
            lambda store: store.accept(
                group_name,
                sender=envelope.sender,
                policy=group.policy,
                counter=group.counter,
                oldest_version=oldest_version(group),
                source=source,
                tokens=tokens,
                mean_reward=mean_reward,
                envelope=envelope.encoded,
                checked=record,
            )
        )
        if not new:
            # Signed anew with some other field changed, the same work would be trained on twice.
            raise Refused(RefusalReason.REPLAYED, f"counter {group.counter} has brought a group before")
        self.accepted_from[envelope.sender] += 1
        self._waiting[source].add(group_name)
        self._hand_over(group_name, envelope, source, record)
        return True

    def _check_rules(self, group: RolloutGroup, envelope: Envelope, source: str) -> None:
        spec = self._spec
        if source == "local" and self.status.version is None:
            raise Refused(RefusalReason.BUSY, "the learner is starting; send it again")
        if source == "local" and self.waiting_local >= (spec.max_staleness + 2) * spec.local_groups:
            raise Refused(RefusalReason.NO_CREDIT, f"{self.waiting_local} groups are waiting already")
        check_group(
            group,
            spec,
            self.run_id,
            envelope.sender,
            policy=self.policy if source == "local" else envelope.sender,
            learner_version=self.status.version if source == "local" else None,
            vocabulary_size=self._vocabulary_size if source == "local" else None,
        )

    # The learner process

    def on_learner_down(self, failed: str | None = None) -> None:
        """The learner process died or said why it cannot go on: nothing is handed over until it is ready
        again."""
        self._takes_groups = self._counts_are_known = False
        self.status.state = "restarting" if failed is None else f"failed: {failed}"

    def finish_training(self) -> None:
        """A final evaluation now, then serve without training."""
        self._told_to_finish = True
        if self._takes_groups:
            self._tell_learner({"type": "finish"})

    def _tell_learner(self, message: dict[str, Any]) -> bool:
        try:
            if self.learner_process is None:
                return False
            self.learner_process.send(message)
        except ChildGone as error:
            log.info("%s: it was not told of %r", error, message["type"])
            return False
        return True

    async def on_learner_message(self, message: dict[str, Any]) -> None:
        """The learner process says something."""
        kind = message["type"]
        if kind == "ready":
            await self._on_ready(message)
        elif kind == "update":
            await self._on_update(message)
        elif kind == "eval":
            self._on_eval(message)
        elif kind == "state":
            self.status.state = message["text"]
        elif kind == "halted":
            await self._on_halted(message)

    async def _on_ready(self, message: dict[str, Any]) -> None:
        version: int = message["version"]
        back, marked = await self._store.run(lambda store: store.reconcile(version, message["consumed"]))
        if back or marked:
            self._on_event(
                "warning",
                f"resumed at version {version}: {back} groups wait again, "
                f"{marked} were already in the weights",
            )
        await self._publish(message["publication"])
        await self._count_from_ledger()
        self._handed_over.clear()
        for groups in self._waiting.values():
            groups.clear()
        self.status.version, self.status.halted = version, None
        self.status.eval_before = message.get("eval_before", self.status.eval_before)
        # From here on a group that is accepted is handed over at once; one that was accepted before is in
        # the list below. Credit waits until both are counted.
        self._takes_groups = True
        count = await self._hand_over_waiting()
        self._counts_are_known = True
        self._on_event("info", f"learner ready at version {version}, {count} groups waiting")
        if self._told_to_finish:
            self._tell_learner({"type": "finish"})

    async def _on_halted(self, message: dict[str, Any]) -> None:
        status = self.status
        status.halted, status.version = message["reason"], message["version"]
        status.state = message["reason"]
        self._on_event("error", message["reason"])
        if message["publication"] is not None:
            await self._publish(message["publication"])

    async def _hand_over_waiting(self) -> int:
        self._missed_some = False
        waiting = await self._store.run(lambda store: store.waiting())
        for group in waiting:
            self._waiting[group.source].add(group.id)
            envelope = open_envelope(group.envelope, run_id=self.run_id)
            self._hand_over(group.id, envelope, group.source, group.checked)
            await trio.lowlevel.checkpoint()
        return len(waiting)

    def _hand_over(self, group_name: bytes, envelope: Envelope, source: str, record: dict[str, Any]) -> None:
        if not self._takes_groups or group_name in self._handed_over or self._missed_some:
            return  # It is in the ledger: the next "ready" or update hands it over.
        message = {"type": "group", "id": group_name, "body": envelope.body, "source": source, **record}
        if self._tell_learner(message):
            self._handed_over.add(group_name)
        else:
            self._missed_some = True

    async def _on_update(self, message: dict[str, Any]) -> None:
        version: int = message["version"]
        consumed, stale = message["consumed"], message["stale"]
        unexpected = await self._store.run(lambda store: store.record_update(version, consumed, stale))
        if unexpected:
            self._on_event(
                "error", f"version {version} consumed {len(unexpected)} groups that were not waiting"
            )
        for group_name in [*consumed, *stale]:
            self._handed_over.discard(group_name)
        for groups in self._waiting.values():
            groups.difference_update(consumed, stale)
        # In one step with the counts above: who asks now must not be granted for the version before.
        status = self.status
        status.version = version
        status.note_update(message["metrics"], message["staleness"], message["by_age"])
        if message["publication"] is not None:
            await self._publish(message["publication"])
        if "reward_mean" in status.metrics:
            self._on_metric("reward", version, status.metrics["reward_mean"])
        if self.learner_process is not None:
            try:
                # Behind the groups that wait for the process, however many: without it nothing goes on.
                await self.learner_process.deliver({"type": "ack", "version": version})
            except ChildGone as error:
                log.info("version %d was not acknowledged: %s", version, error)
        if self._missed_some:
            await self._hand_over_waiting()

    def _on_eval(self, message: dict[str, Any]) -> None:
        self.status.note_evaluation(message["version"], message["accuracy"], bool(message["final"]))
        self._on_metric("accuracy", message["version"], message["accuracy"])
        by_task = ", ".join(f"{name} {value:.2f}" for name, value in sorted(message["by_task"].items()))
        label = "final evaluation" if message["final"] else "evaluation"
        self._on_event(
            "info", f"{label} of version {message['version']}: {message['accuracy']:.3f} ({by_task})"
        )

    async def _publish(self, publication: dict[str, Any]) -> None:
        version: int = publication["version"]
        path = Path(publication["path"])
        count = await self._store.run(lambda store: store.record_published(version))
        self.status.published_versions = count
        self.newest_published = max(version, self.newest_published or 0)
        delta = publication["delta"]
        manifest = Manifest(
            policy=self.policy,
            version=version,
            size_bytes=publication["size"],
            chunk_size=publication["chunk_size"],
            chunks=list(publication["chunks"]),
            delta=None
            if delta is None
            else Delta(
                parent=delta["parent"],
                parent_state=delta["parent_state"],
                size_bytes=delta["size"],
                chunk_size=delta["chunk_size"],
                chunks=list(delta["chunks"]),
            ),
            probe=None if publication["probe"] is None else Probe(**publication["probe"]),
        )
        held = self._versions.get(self.policy, version)
        if held is not None and held.manifest == manifest:
            envelope = held.envelope
        else:
            if held is not None:
                self._versions.discard_weights(held)
                self._versions.discard_delta(held)
            sequence = self._next_sequence()
            encoded = seal(self._identity, self.run_id, "manifest", sequence, manifest.encode())
            envelope = open_envelope(encoded, run_id=self.run_id)
        delta_path = None if delta is None else Path(delta["path"])
        stored = self._versions.add(manifest, envelope, path, delta_path)
        await trio.to_thread.run_sync(self._versions.save_manifest, stored)
        await self._versions.retain(self.policy, self._spec.max_staleness + 2)
        await self._on_published(stored)

"""The learner's side of a node: receive, check and record groups, pace workers, sign and announce what is
trained."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.runtime.version_store import StoredVersion, VersionStore

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 30.0
"""How long the verifier may take for one group before the group is handed back to its worker."""
CREDIT_LIFETIME_S = 60.0
"""A granted group that has not come by then is granted to somebody else."""
RETRY_AFTER_S = 0.25
MAX_CHECKS = 256
"""Groups being checked at once; more are told to come again."""


@dataclass
class LearnerStatus:
    """What the page shows of the learner."""

    state: str = "starting"
    version: int | None = None
    updates: int = 0
    published_versions: int = 0
    eval_before: float | None = None
    eval_after: float | None = None
    final: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    max_staleness_seen: int = 0
    update_s: float | None = None


@dataclass(frozen=True)
class CheckedGroup:
    """The verifier's answer."""

    ok: bool
    reason: str
    prompt_ids: list[int]
    completions: list[list[int]] | None
    rewards: list[float]


class LearnerRole:
    """Owns the ledger's intake and the learner process's messages.

    Promises: a receipt that says accepted is sent only after the ledger has the group on disk; a group is
    recorded
    once however often it is sent; the learner process sees each waiting group once per start of that process.
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
        self.waiting_local = 0
        self.waiting_external = 0
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
        self._sources: dict[bytes, str] = {}
        self._credits: dict[bytes, list[float]] = {}
        self._checks: dict[bytes, trio.Event] = {}
        self._answers: dict[bytes, CheckedGroup] = {}
        self.learner_process: ChildProcess | None = None
        self.verifier_process: ChildProcess | None = None
        self._verifier_ready = trio.Event()
        self._learner_up = False

    # Credit

    def credit(self, worker: bytes, request: CreditRequest) -> Credit:
        """Answer a worker's request for credit."""
        status = self.status
        if request.policy != self.policy:
            raise Refused(RefusalReason.UNKNOWN_POLICY, f"this node trains {node_name(self.policy)}")
        if status.version is None or not self._learner_up:
            return Credit(granted=0, version=0, retry_after_s=1.0, reason="the learner process is starting")
        if status.final:
            return Credit(
                granted=0, version=status.version, retry_after_s=5.0, reason="training has finished"
            )
        state = PacingState(
            version=status.version,
            published_version=status.version,
            batch_groups=self._spec.local_groups,
            waiting=self.waiting_local + len(self._checks),
            outstanding=self._outstanding(),
            max_staleness=self._spec.max_staleness,
            pacing_batches=self._spec.pacing_batches,
        )
        grant = grant_credit(state, request.version, request.wanted)
        if grant.count:
            expiry = trio.current_time() + CREDIT_LIFETIME_S
            self._credits.setdefault(worker, []).extend([expiry] * grant.count)
        return Credit(
            granted=grant.count, version=status.version, retry_after_s=RETRY_AFTER_S, reason=grant.reason
        )

    def _outstanding(self) -> int:
        now = trio.current_time()
        for worker, expiries in list(self._credits.items()):
            live = [expiry for expiry in expiries if expiry > now]
            if live:
                self._credits[worker] = live
            else:
                del self._credits[worker]
        return sum(len(expiries) for expiries in self._credits.values())

    def forget_worker(self, worker: bytes) -> None:
        """A worker is gone: its credit can be granted to others."""
        self._credits.pop(worker, None)

    # Intake

    async def handle_credit(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, CreditRequest)
        return "credit", self.credit(sender, message)

    async def handle_push(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, GroupPush)
        envelope = open_envelope(message.envelope, run_id=self.run_id)
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
            self._release_credit(envelope.sender)
            self._on_refusal(envelope.sender, refused.reason, refused.detail)
            return Receipt(
                group=group_name, accepted=False, reason=refused.reason.value, detail=refused.detail[:512]
            )
        self._release_credit(envelope.sender)
        return Receipt(group=group_name, accepted=True)

    async def receive_external(self, envelope: Envelope) -> bool:
        """Check and record another policy's group; False if it teaches nothing (all rewards equal) or is
        known."""
        group_name = group_id(envelope.sender, envelope.body)
        if await self._store.run(lambda store: store.verdict(group_name)) is not None:
            return False
        return await self._admit(group_name, envelope, source="external")

    async def _admit(self, group_name: bytes, envelope: Envelope, source: str) -> bool:
        if group_name in self._checks:
            raise Refused(RefusalReason.BUSY, "this group is being checked; ask again for its receipt")
        if len(self._checks) >= MAX_CHECKS:
            raise Refused(RefusalReason.BUSY, "too many groups are being checked; send it again")
        group = RolloutGroup.decode(envelope.body)
        self._check_rules(group, envelope, source)
        limit = (self._spec.max_staleness + 2) * self._spec.local_groups
        if source == "local" and self.waiting_local >= limit:
            raise Refused(RefusalReason.NO_CREDIT, f"{self.waiting_local} groups are waiting already")
        checked = await self._check_content(group_name, envelope, source)
        if not checked.ok:
            reason = RefusalReason(checked.reason.split(":")[0])
            raise Refused(reason, checked.reason.partition(":")[2].strip())
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
        self._hand_over(group_name, envelope, source, record)
        return True

    def _check_rules(self, group: RolloutGroup, envelope: Envelope, source: str) -> None:
        if source == "local" and self.status.version is None:
            raise Refused(RefusalReason.BUSY, "the learner is starting; send it again")
        check_group(
            group,
            self._spec,
            self.run_id,
            envelope.sender,
            policy=self.policy if source == "local" else envelope.sender,
            learner_version=self.status.version if source == "local" else None,
            vocabulary_size=self._vocabulary_size if source == "local" else None,
        )

    def _release_credit(self, worker: bytes) -> None:
        expiries = self._credits.get(worker)
        if expiries:
            expiries.pop()

    async def _check_content(self, group_name: bytes, envelope: Envelope, source: str) -> CheckedGroup:
        event = self._checks[group_name] = trio.Event()
        try:
            with trio.move_on_after(CHECK_TIMEOUT_S):
                await self._verifier_ready.wait()
                if self.verifier_process is None:
                    raise Refused(RefusalReason.BUSY, "the verifier is not running; send it again")
                self.verifier_process.send(
                    {
                        "type": "check",
                        "id": group_name,
                        "body": envelope.body,
                        "sender": envelope.sender,
                        "run_id": self.run_id,
                        "source": source,
                    }
                )
                await event.wait()
            answer = self._answers.pop(group_name, None)
        except ChildGone as error:
            raise Refused(RefusalReason.BUSY, "the verifier is restarting; send it again") from error
        finally:
            del self._checks[group_name]
        if answer is None:
            raise Refused(
                RefusalReason.BUSY, f"the check did not finish in {CHECK_TIMEOUT_S:.0f} s; send it again"
            )
        return answer

    # The children

    def on_learner_down(self) -> None:
        """The learner process died: nothing is handed over until it is ready again."""
        self._learner_up = False
        self.status.state = "restarting"

    def on_verifier_down(self) -> None:
        """The verifier process died: groups in check go back to their workers, which send them again."""
        self._verifier_ready = trio.Event()
        for event in self._checks.values():
            event.set()

    async def on_verifier_message(self, message: dict[str, Any]) -> None:
        """The verifier process says something."""
        if message["type"] == "ready":
            self._verifier_ready.set()
        elif message["type"] == "checked" and message["id"] in self._checks:
            self._answers[message["id"]] = CheckedGroup(
                ok=message["ok"],
                reason=message.get("reason") or "",
                prompt_ids=message.get("prompt_ids") or [],
                completions=message.get("completions"),
                rewards=message.get("rewards") or [],
            )
            self._checks[message["id"]].set()

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

    async def _on_ready(self, message: dict[str, Any]) -> None:
        version: int = message["version"]
        back, marked = await self._store.run(lambda store: store.reconcile(version, message["consumed"]))
        if back or marked:
            self._on_event(
                "warning",
                f"resumed at version {version}: {back} groups wait again, "
                f"{marked} were already in the weights",
            )
        # Credit that was granted before the crash may come in or not: it does not count against the workers.
        self._credits.clear()
        await self._publish(message["publication"])
        self.status.version = version
        self.status.eval_before = message.get("eval_before", self.status.eval_before)
        self._learner_up = True
        waiting = await self._store.run(lambda store: store.waiting())
        self._sources.clear()
        self.waiting_local = self.waiting_external = 0
        for group in waiting:
            envelope = open_envelope(group.envelope, run_id=self.run_id)
            self._hand_over(group.id, envelope, group.source, group.checked)
        self._on_event("info", f"learner ready at version {version}, {len(waiting)} groups waiting")

    def _hand_over(self, group_name: bytes, envelope: Envelope, source: str, record: dict[str, Any]) -> None:
        if group_name in self._sources:
            return
        if self.learner_process is None or not self._learner_up:
            return  # It is in the ledger: the next "ready" hands it over.
        try:
            self.learner_process.send(
                {"type": "group", "id": group_name, "body": envelope.body, "source": source, **record}
            )
        except ChildGone:
            return  # The same: the ledger has it.
        self._sources[group_name] = source
        if source == "local":
            self.waiting_local += 1
        else:
            self.waiting_external += 1

    async def _on_update(self, message: dict[str, Any]) -> None:
        version: int = message["version"]
        consumed, stale = message["consumed"], message["stale"]
        unexpected = await self._store.run(lambda store: store.record_update(version, consumed, stale))
        if unexpected:
            self._on_event(
                "error", f"version {version} consumed {len(unexpected)} groups that were not waiting"
            )
        for group_name in [*consumed, *stale]:
            source = self._sources.pop(group_name, None)
            if source == "local":
                self.waiting_local -= 1
            elif source == "external":
                self.waiting_external -= 1
        # In one step with the counts above: who asks now must not be granted for the version before.
        status = self.status
        status.version = version
        status.updates += 1
        if message["publication"] is not None:
            await self._publish(message["publication"])
        status.metrics = {name: float(value) for name, value in message["metrics"].items()}
        for lag, count in message["staleness"].items():
            status.staleness[int(lag)] += count
            status.max_staleness_seen = max(status.max_staleness_seen, int(lag))
        if "reward_mean" in status.metrics:
            self._on_metric("reward", version, status.metrics["reward_mean"])
        if self.learner_process is not None:
            try:
                self.learner_process.send({"type": "ack", "version": version})
            except ChildGone:
                log.info("the learner process ended before version %d was acknowledged", version)

    def _on_eval(self, message: dict[str, Any]) -> None:
        status = self.status
        if status.eval_before is None:
            status.eval_before = message["accuracy"]
        else:
            status.eval_after = message["accuracy"]
        status.final = status.final or bool(message["final"])
        self._on_metric("accuracy", message["version"], message["accuracy"])
        by_task = ", ".join(f"{name} {value:.2f}" for name, value in sorted(message["by_task"].items()))
        label = "final evaluation" if message["final"] else "evaluation"
        self._on_event(
            "info", f"{label} of version {message['version']}: {message['accuracy']:.3f} ({by_task})"
        )

    async def _publish(self, publication: dict[str, Any]) -> None:
        version: int = publication["version"]
        path = Path(publication["path"])
        held = self._versions.get(self.policy, version)
        if held is not None and held.manifest.state_hash == publication["state_hash"]:
            await self._on_published(held)
            return
        manifest = Manifest(
            policy=self.policy,
            version=version,
            kind="snapshot",
            size_bytes=publication["size"],
            chunk_size=publication["chunk_size"],
            chunks=list(publication["chunks"]),
            state_hash=publication["state_hash"],
            probe=None if publication["probe"] is None else Probe(**publication["probe"]),
        )
        encoded = seal(self._identity, self.run_id, "manifest", self._next_sequence(), manifest.encode())
        envelope = open_envelope(encoded, run_id=self.run_id)
        stored = self._versions.add(manifest, envelope, path)
        await trio.to_thread.run_sync(self._versions.save_manifest, stored)
        self._versions.retain(self.policy, self._spec.max_staleness + 2)
        self.status.published_versions += 1
        await self._on_published(stored)

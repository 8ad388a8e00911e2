"""The worker's side of a node: ask for credit, generate, keep every group until its receipt comes."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import trio

from peers.base import TransportError
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Credit, Receipt, RolloutGroup, group_id
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.children import ChildGone, ChildProcess
from swarmnode.runtime.events import Tell
from swarmnode.runtime.rates import Rate
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.runtime.version_loading import VersionLoading
from swarmnode.runtime.version_store import StoredVersion

log = logging.getLogger(__name__)

HANGS_AFTER_S = 1800.0
"""An engine that was asked for groups and has given none for so long hangs: a batch of long answers of a
large model on a slow machine takes minutes."""
OWED_FOR_S = 45.0
"""Credit for groups that died with their process is used again within this time; then the learner has given
it to others."""
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 10.0
MAX_PUSHES = 4
MAX_OUTBOX = 256
"""Groups kept for a learner that is away; the worker pauses beyond."""
REFUSALS_BEFORE_DROP = 4
"""A call may be refused for what the learner is at that moment, so a group is given up only when its push was
refused so often. A receipt is final at once."""


class LearnerLink(Protocol):
    """How a worker reaches its learner: over the network, or in the same node."""

    async def credit(self, version: int, wanted: int) -> Credit:
        """Raises `TransportError` or `Refused`."""
        ...

    async def push(self, envelope: bytes) -> Receipt:
        """Raises `TransportError` or `Refused` (busy: try again)."""
        ...


class WorkerRole:
    """Generates groups of one policy while the learner wants them.

    Promises: a counter is used once, across restarts; a generated group is on disk before it is sent and
    stays there until the learner's receipt; weights only move forward; groups of a version whose snapshot is
    not verified yet are neither sent nor written down.
    """

    def __init__(
        self,
        *,
        policy: bytes,
        run_id: bytes,
        identity: Identity,
        link: LearnerLink,
        store: StoreThread,
        next_sequence: Callable[[], int],
        groups_in_hand: int,
        on_event: Tell,
        on_accepted: Callable[[bytes, RolloutGroup, Receipt], None] | None,
    ) -> None:
        self.policy = policy
        self.state = "waiting for weights"
        self.receipts: Counter[str] = Counter()
        self.last_refusal: str | None = None
        self.group_rate = Rate()
        self.token_rate = Rate()
        self.process: ChildProcess | None = None
        self._run_id = run_id
        self._identity = identity
        self._link = link
        self._store = store
        self._next_sequence = next_sequence
        self._groups_in_hand = groups_in_hand
        self._on_event = on_event
        self._on_accepted = on_accepted
        self._versions = VersionLoading()
        self._held: list[dict[str, Any]] = []
        """Messages of groups whose version is not verified yet."""
        self._asked: set[int] = set()
        self._last_progress_s = 0.0
        self._owed = 0
        self._owed_until_s = 0.0
        self._outbox: dict[bytes, bytes] = {}
        self._pushing: set[bytes] = set()
        self._wake = trio.Event()
        self._ready = False
        self._stopping = False

    async def start(self) -> None:
        """Read the outbox and the receipts of earlier starts."""
        self._outbox = dict(await self._store.run(lambda store: store.outbox()))
        self.receipts.update(await self._store.run(lambda store: store.receipts()))
        if self._outbox:
            self._on_event("info", f"{len(self._outbox)} groups of an earlier start wait for their receipts")

    @property
    def loaded_version(self) -> int | None:
        """The version that groups are made with."""
        return self._versions.loaded

    def offer_version(self, stored: StoredVersion) -> None:
        """A version's delta or its verified snapshot is on disk: load it if it is newer."""
        self._versions.offer(stored)
        self._load()
        self.wake()

    def withdraw_versions(self, versions: Sequence[int]) -> None:
        """Versions offered before are wrong: what they made stays here, and the last good one is loaded."""
        self._versions.withdraw(versions)
        self._drop([one for one in self._held if self._versions.verdict(one["version"]) == "drop"])
        self._load()
        self.wake()

    def _drop(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            self._held = [one for one in self._held if one not in groups]
            self._regain(len(groups))
            self._on_event(
                "warning", f"{len(groups)} groups of weights that were withdrawn are thrown away", "withdrawn"
            )

    def _regain(self, count: int) -> None:
        """Groups that were granted did not come of it: others are made for them, under new counters."""
        self._owed = min(self._owed + count, self._groups_in_hand)
        self._owed_until_s = trio.current_time() + OWED_FOR_S

    def _load(self) -> None:
        """Load the newest version, one at a time: those between may be gone before their turn comes."""
        if not self._ready or self.process is None:
            return
        message = self._versions.next_load()
        if message is not None:
            try:
                self.process.send(message)
            except ChildGone:
                self._versions.on_process_down()  # Loaded when the process is ready again.

    async def on_message(self, message: dict[str, Any]) -> None:
        """The rollout process says something."""
        kind = message["type"]
        self._last_progress_s = trio.current_time()
        if kind == "ready":
            self._ready = True
            self._load()
        elif kind == "loaded":
            self._versions.on_loaded(message)
            self._load()
            self.wake()
        elif kind == "load_failed":
            self._versions.on_failed(message)
            self._on_event(
                "error",
                f"version {message['version']} was not loaded from {message['way']}, the old weights stay: "
                f"{message['reason']}",
            )
            self._load()
        elif kind == "group":
            await self._on_group(message)

    def on_process_down(self) -> None:
        """The rollout process died: what it had in hand is generated anew under new counters."""
        self._regain(len(self._asked))
        self._asked.clear()
        self._ready = False
        self._versions.on_process_down()
        self.group_rate.clear()
        self.token_rate.clear()

    async def _on_group(self, message: dict[str, Any]) -> None:
        self._asked.discard(message["counter"])
        self.group_rate.add(1)
        self.token_rate.add(message["tokens"])
        verdict = self._versions.verdict(message["version"])
        if self._versions.runs_withdrawn or verdict == "drop":
            self._drop([message])
        elif verdict == "hold":
            self._held.append(message)
        else:
            await self._keep(message)

    async def _keep(self, message: dict[str, Any]) -> None:
        body: bytes = message["body"]
        envelope = seal(self._identity, self._run_id, "rollout_group", self._next_sequence(), body)
        group_name = group_id(self._identity.key, body)
        await self._store.run(lambda store: store.put_outbox(group_name, message["counter"], envelope))
        self._outbox[group_name] = envelope
        self.wake()

    def wake(self) -> None:
        """Something changed that generation or pushing may wait for."""
        self._wake.set()
        self._wake = trio.Event()

    def begin_stop(self) -> None:
        """Ask for no more credit; what is in hand is still pushed."""
        self._stopping = True
        self.wake()

    @property
    def in_hand(self) -> int:
        """Groups being generated or waiting for a receipt."""
        return len(self._asked) + self.in_outbox

    @property
    def in_outbox(self) -> int:
        """Groups waiting for a receipt, those included that are held until their version is verified."""
        return len(self._outbox) + len(self._held)

    async def run(self) -> None:
        """Generate and push until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate)
            nursery.start_soon(self._push_all, nursery)

    async def _generate(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping:
            self._end_hanging()
            wanted = self._groups_in_hand - len(self._asked)
            if self.loaded_version is None:
                self.state = "waiting for weights"
                await self._sleep(1.0)
                continue
            if self.in_outbox >= MAX_OUTBOX:
                self.state = f"paused: {self.in_outbox} groups wait for the learner's receipt"
                await self._sleep(1.0)
                continue
            if wanted <= 0:
                self.state = "generating"
                await self._sleep(1.0)
                continue
            if self._owed and trio.current_time() < self._owed_until_s:
                owed, self._owed = min(self._owed, wanted), 0
                await self._ask(owed)
                continue
            try:
                credit = await self._link.credit(self.loaded_version, wanted)
            except (TransportError, Refused) as error:
                self.state = f"waiting for the learner: {error}"
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)
                continue
            retry_s = FIRST_RETRY_S
            if credit.granted == 0:
                if not self._asked:
                    self.state = f"idle: {credit.reason}"
                await trio.sleep(max(0.05, min(credit.retry_after_s, LONGEST_RETRY_S)))
                continue
            self.state = "generating"
            await self._ask(min(credit.granted, wanted))

    async def _ask(self, count: int) -> None:
        first = await self._store.run(lambda store: store.reserve("group_counter", count))
        if self.process is None:
            return
        if not self._asked:
            self._last_progress_s = trio.current_time()
        try:
            for counter in range(first, first + count):
                self.process.send({"type": "generate", "counter": counter})
                self._asked.add(counter)
        except ChildGone:
            log.info("the rollout process ended before it was asked for %d groups", count)

    def _end_hanging(self) -> None:
        silent_s = trio.current_time() - self._last_progress_s
        if self._asked and silent_s >= HANGS_AFTER_S and self.process is not None:
            self.process.end(f"it gave none of {len(self._asked)} groups in {silent_s:.0f} s")

    async def _sleep(self, longest_s: float) -> None:
        with trio.move_on_after(longest_s):
            await self._wake.wait()

    async def _push_all(self, nursery: trio.Nursery) -> None:
        while True:
            await self._release_held()
            for group_name in list(self._outbox):
                if len(self._pushing) >= MAX_PUSHES:
                    break
                if group_name not in self._pushing:
                    self._pushing.add(group_name)
                    nursery.start_soon(self._push, group_name)
            await self._sleep(1.0)

    async def _release_held(self) -> None:
        """Keep and send what was held back for a version that is verified now."""
        for message in [*self._held]:
            verdict = self._versions.verdict(message["version"])
            if verdict != "hold" and message in self._held:
                self._held.remove(message)
                if verdict == "send":
                    await self._keep(message)
                else:
                    self._drop([message])

    async def _push(self, group_name: bytes) -> None:
        try:
            receipt = await self._receipt_for(group_name)
            verdict = _verdict_of(receipt)
            await self._store.run(lambda store: store.settle_outbox(group_name, verdict))
            encoded = self._outbox.pop(group_name)
            self.receipts[verdict] += 1
            if receipt.accepted:
                if self._on_accepted is not None:
                    body = open_envelope(encoded, run_id=self._run_id).body
                    self._on_accepted(encoded, RolloutGroup.decode(body), receipt)
            else:
                self.last_refusal = f"{verdict}: {receipt.detail}"
                self._on_event(
                    "warning", f"the learner refused a group: {self.last_refusal}", f"receipt {verdict}"
                )
        finally:
            self._pushing.discard(group_name)
            self.wake()

    async def _receipt_for(self, group_name: bytes) -> Receipt:
        """Push until the learner says what becomes of the group."""
        delay, refusals = FIRST_RETRY_S, 0
        while True:
            try:
                receipt = await self._link.push(self._outbox[group_name])
                if receipt.group == group_name:
                    return receipt
                log.warning("the learner's receipt for %s is for another group", group_name.hex()[:12])
            except Refused as refused:
                refusals += refused.reason is not RefusalReason.BUSY
                if refusals >= REFUSALS_BEFORE_DROP:
                    return Receipt(
                        group=group_name,
                        accepted=False,
                        reason=refused.reason.value,
                        detail=refused.detail[:512],
                    )
                log.debug("push of %s: %s", group_name.hex()[:12], refused)
            except TransportError as error:
                log.debug("push of %s: %s", group_name.hex()[:12], error)
            await trio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY_S)


def _verdict_of(receipt: Receipt) -> str:
    """ "accepted", or one of the known reasons: what a learner writes there is counted by word."""
    if receipt.accepted:
        return "accepted"
    known = {reason.value for reason in RefusalReason}
    return receipt.reason if receipt.reason in known else "other"

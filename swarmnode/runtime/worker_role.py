"""The worker's side of a node: ask for credit, generate, keep every group until its receipt comes."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import trio

from peers.base import TransportError
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Credit, Receipt, RolloutGroup, group_id
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.children import ChildGone, ChildProcess
from swarmnode.runtime.rates import Rate
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.runtime.version_store import StoredVersion, probe_message

log = logging.getLogger(__name__)

GENERATION_TIMEOUT_S = 300.0
"""Groups asked of the engine and not seen after this long are given up (their counters stay unused)."""
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 10.0
MAX_PUSHES = 4
MAX_OUTBOX = 256
"""Groups kept for a learner that is away; the worker pauses beyond."""


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
    stays there
    until the learner's receipt; weights only move forward.
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
        on_event: Callable[[str, str], None],
        on_loaded: Callable[[int], None],
        on_receipt: Callable[[bytes, RolloutGroup, Receipt], None],
    ) -> None:
        self.policy = policy
        self.loaded_version: int | None = None
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
        self._on_loaded = on_loaded
        self._on_receipt = on_receipt
        self._newest: StoredVersion | None = None
        self._asked: dict[int, float] = {}
        self._outbox: dict[bytes, bytes] = {}
        self._pushing: set[bytes] = set()
        self._wake = trio.Event()
        self._ready = False
        self._stopping = False

    async def start(self) -> None:
        """Read the outbox of an earlier start."""
        self._outbox = dict(await self._store.run(lambda store: store.outbox()))
        if self._outbox:
            self._on_event("info", f"{len(self._outbox)} groups of an earlier start wait for their receipts")

    def offer_version(self, stored: StoredVersion) -> None:
        """A version is on disk and verified: load it if it is newer."""
        if self._newest is None or stored.manifest.version > self._newest.manifest.version:
            self._newest = stored
            self._load()

    def _load(self) -> None:
        if not self._ready or self._newest is None or self.process is None:
            return
        manifest = self._newest.manifest
        try:
            self.process.send(
                {
                    "type": "load",
                    "version": manifest.version,
                    "path": str(self._newest.weights_path),
                    "probe": probe_message(manifest.probe),
                }
            )
        except ChildGone:
            return  # Loaded when the process is ready again.

    async def on_message(self, message: dict[str, Any]) -> None:
        """The rollout process says something."""
        kind = message["type"]
        if kind == "ready":
            self._ready = True
            self._asked.clear()
            self.loaded_version = None
            self._load()
        elif kind == "loaded":
            self.loaded_version = message["version"]
            self._on_loaded(message["version"])
            self.wake()
        elif kind == "load_failed":
            self._on_event(
                "error",
                f"version {message['version']} was not loaded, the old weights stay: {message['reason']}",
            )
        elif kind == "group":
            await self._on_group(message)

    def on_process_down(self) -> None:
        """The rollout process died: what it had in hand is generated anew under new counters."""
        self._ready = False
        self.loaded_version = None
        self._asked.clear()
        self.group_rate.clear()
        self.token_rate.clear()

    async def _on_group(self, message: dict[str, Any]) -> None:
        self._asked.pop(message["counter"], None)
        self.group_rate.add(1)
        self.token_rate.add(message["tokens"])
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
        return len(self._asked) + len(self._outbox)

    @property
    def in_outbox(self) -> int:
        """Groups waiting for a receipt."""
        return len(self._outbox)

    async def run(self) -> None:
        """Generate and push until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate)
            nursery.start_soon(self._push_all, nursery)

    async def _generate(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping:
            self._give_up_lost()
            wanted = self._groups_in_hand - len(self._asked)
            if self.loaded_version is None:
                self.state = "waiting for weights"
                await self._sleep(1.0)
                continue
            if len(self._outbox) >= MAX_OUTBOX:
                self.state = f"paused: {len(self._outbox)} groups wait for the learner's receipt"
                await self._sleep(1.0)
                continue
            if wanted <= 0:
                self.state = "generating"
                await self._sleep(1.0)
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
            await self._ask(credit.granted)

    async def _ask(self, count: int) -> None:
        first = await self._store.run(lambda store: store.reserve("group_counter", count))
        if self.process is None:
            return
        try:
            for counter in range(first, first + count):
                self.process.send({"type": "generate", "counter": counter})
                self._asked[counter] = trio.current_time()
        except ChildGone:
            log.info("the rollout process ended before it was asked for %d groups", count)

    def _give_up_lost(self) -> None:
        limit = trio.current_time() - GENERATION_TIMEOUT_S
        for counter in [counter for counter, asked in self._asked.items() if asked < limit]:
            del self._asked[counter]
            self._on_event(
                "warning", f"group {counter} was not generated within {GENERATION_TIMEOUT_S:.0f} s"
            )

    async def _sleep(self, longest_s: float) -> None:
        with trio.move_on_after(longest_s):
            await self._wake.wait()

    async def _push_all(self, nursery: trio.Nursery) -> None:
        while True:
            for group_name in list(self._outbox):
                if len(self._pushing) >= MAX_PUSHES:
                    break
                if group_name not in self._pushing:
                    self._pushing.add(group_name)
                    nursery.start_soon(self._push, group_name)
            await self._sleep(1.0)

    async def _push(self, group_name: bytes) -> None:
        delay = FIRST_RETRY_S
        try:
            while True:
                try:
                    receipt = await self._link.push(self._outbox[group_name])
                    break
                except Refused as refused:
                    if refused.reason is not RefusalReason.BUSY:
                        receipt = Receipt(
                            group=group_name,
                            accepted=False,
                            reason=refused.reason.value,
                            detail=refused.detail[:512],
                        )
                        break
                    log.debug("push of %s: %s", group_name.hex()[:12], refused)
                except TransportError as error:
                    log.debug("push of %s: %s", group_name.hex()[:12], error)
                await trio.sleep(delay)
                delay = min(delay * 2, LONGEST_RETRY_S)
            verdict = "accepted" if receipt.accepted else receipt.reason
            await self._store.run(lambda store: store.settle_outbox(group_name, verdict))
            envelope = open_envelope(self._outbox.pop(group_name), run_id=self._run_id)
            self.receipts[verdict] += 1
            if not receipt.accepted:
                self.last_refusal = f"{receipt.reason}: {receipt.detail}"
                self._on_event("warning", f"the learner refused a group: {receipt.reason}: {receipt.detail}")
            self._on_receipt(envelope.encoded, RolloutGroup.decode(envelope.body), receipt)
        finally:
            self._pushing.discard(group_name)
            self.wake()

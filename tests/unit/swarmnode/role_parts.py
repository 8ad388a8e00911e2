"""What the tests of the roles need around them: a small run, groups that break no rule, the channel's end of
a child, a store without its thread (virtual time would pass while a thread works)."""

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import trio

from protocol.chunks import state_hash
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Completion, RolloutGroup, SamplingContract, group_id
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task
from swarmnode.runtime.children import ChildGone
from swarmnode.runtime.learner_role import LearnerRole
from swarmnode.runtime.version_store import StoredVersion, VersionStore
from swarmnode.store import Store

Result = TypeVar("Result")
LEARNER = Identity.from_seed(b"L" * 32)
WORKER = Identity.from_seed(b"W" * 32)
OTHER = Identity.from_seed(b"O" * 32)


def make_spec(**changes: Any) -> RunSpec:
    """A run whose batch is four groups of two completions; staleness up to 2; at most two batches at once."""
    fields: dict[str, Any] = {
        "name": "small",
        "nonce": b"n" * 16,
        "preset": "fleet",
        "model": BaseModelRef(name="tiny", assets=[]),
        "tasks": [TaskSpec(environment="e", name="t")],
        "sampling": SamplingContract(max_new_tokens=4, group_size=2),
        "max_staleness": 2,
        "local_groups": 4,
        "pacing_batches": 2,
        "learners": [LEARNER.key],
    }
    return RunSpec(**{**fields, **changes})


def make_group(
    spec: RunSpec,
    sender: Identity,
    counter: int,
    *,
    version: int = 0,
    policy: bytes = LEARNER.key,
    rewards: tuple[float, ...] = (0.0, 1.0),
) -> RolloutGroup:
    """A group that passes all rules."""
    return RolloutGroup(
        task=assigned_task(spec.tasks, spec.run_id, sender.key, policy, version, counter),
        policy=policy,
        version=version,
        counter=counter,
        prompt_hash=b"p" * 32,
        sampling=spec.sampling,
        engine="test",
        completions=[Completion.build([1, 2], [-1.0, -1.0], [(version, 2)], "stop")] * 2,
        rewards=list(rewards),
    )


_sequence = itertools.count(1)


def sealed(spec: RunSpec, sender: Identity, group: RolloutGroup) -> Envelope:
    encoded = seal(sender, spec.run_id, "rollout_group", next(_sequence), group.encode())
    return open_envelope(encoded, run_id=spec.run_id)


def name_of(envelope: Envelope) -> bytes:
    return group_id(envelope.sender, envelope.body)


class FakeChild:
    """The node's end of a child's channel: what was sent, and whether the child is there."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_up = True
        self.room = 10**6
        self.ended: list[str] = []
        self.on_send: Callable[[dict[str, Any]], None] = lambda message: None

    def send(self, message: dict[str, Any]) -> None:
        if not self.is_up or self.room <= 0:
            raise ChildGone("the test's child is down")
        self.room -= 1
        self.sent.append(message)
        self.on_send(message)

    async def deliver(self, message: dict[str, Any]) -> None:
        self.room += 1
        self.send(message)

    def end(self, reason: str) -> None:
        self.ended.append(reason)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == kind]


class InlineStore:
    """`StoreThread` without the thread. `between`, if set, runs between each transaction and its caller, with
    the number of transactions before: a test puts there what must happen at that moment."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path)
        self.between: Callable[[int], Awaitable[None]] | None = None
        self._count = 0

    async def run(self, transaction: Callable[[Store], Result]) -> Result:
        await trio.lowlevel.checkpoint()
        result = transaction(self.store)
        between, self.between = self.between, None
        if between is not None:
            # Not for its own transactions.
            await between(self._count)
            self._count += 1
            self.between = between
        await trio.lowlevel.checkpoint()
        return result


class LearnerParts:
    """A `LearnerRole` between a ledger and two children that the test plays."""

    def __init__(self, path: Path, spec: RunSpec | None = None, vocabulary_size: int = 10) -> None:
        self.path = path
        self.spec = spec or make_spec()
        self.store = InlineStore(path / "state.sqlite")
        self.learner, self.verifier = FakeChild(), FakeChild()
        self.events: list[tuple[str, str]] = []
        self.metrics: list[tuple[str, int, float]] = []
        self.refusals: list[str] = []
        self.published: list[int] = []
        self.rewards = (0.0, 1.0)
        self.role = LearnerRole(
            spec=self.spec,
            identity=LEARNER,
            vocabulary_size=vocabulary_size,
            store=self.store,  # type: ignore[arg-type]
            versions=VersionStore(path / "policies", self.spec.run_id),
            next_sequence=lambda: next(_sequence),
            on_published=self._on_published,
            on_event=lambda level, text: self.events.append((level, text)),
            on_metric=lambda *point: self.metrics.append(point),
            on_refusal=lambda peer, reason, detail: self.refusals.append(reason.value),
        )
        self.role.learner_process = self.learner  # type: ignore[assignment]
        self.role.checks.process = self.verifier  # type: ignore[assignment]

    async def _on_published(self, stored: StoredVersion) -> None:
        self.published.append(stored.manifest.version)

    def verify_by(self, nursery: trio.Nursery, **answer: Any) -> None:
        """The verifier answers every check with `answer` (by default: right, with `self.rewards`)."""

        def on_send(message: dict[str, Any]) -> None:
            checked = {
                "type": "checked",
                "id": message["id"],
                "ok": True,
                "reason": None,
                "prompt_ids": [1, 2],
                "completions": None,
                "rewards": list(self.rewards),
                **answer,
            }
            nursery.start_soon(self.role.checks.on_message, checked)

        self.verifier.on_send = on_send

    def publication(self, version: int) -> dict[str, Any]:
        path = self.path / "policies" / self.role.policy.hex()[:16] / f"v{version}" / "model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights %d" % version)
        return {
            "version": version,
            "path": str(path),
            "size": path.stat().st_size,
            "state_hash": state_hash(path.stat().st_size, 1024, [b"%032d" % version]),
            "chunk_size": 1024,
            "chunks": [b"%032d" % version],
            "delta": None,
            "probe": None,
        }

    async def up(self, version: int = 0, consumed: dict[int, list[bytes]] | None = None) -> None:
        """Both children are ready."""
        await self.role.checks.on_message({"type": "ready"})
        await self.learner_ready(version, consumed)

    async def learner_ready(self, version: int = 0, consumed: dict[int, list[bytes]] | None = None) -> None:
        await self.role.on_learner_message(
            {
                "type": "ready",
                "version": version,
                "consumed": consumed or {},
                "eval_before": None,
                "publication": self.publication(version),
            }
        )

    async def update(self, version: int, consumed: list[bytes], stale: list[bytes] | None = None) -> None:
        """The learner process made an update."""
        await self.role.on_learner_message(
            {
                "type": "update",
                "version": version,
                "consumed": consumed,
                "stale": stale or [],
                "publication": self.publication(version),
                "metrics": {"reward_mean": 0.5},
                "staleness": {0: len(consumed)},
                "by_age": {},
            }
        )

    def envelope(self, counter: int, sender: Identity = WORKER, version: int = 0, **changes: Any) -> Envelope:
        return sealed(self.spec, sender, make_group(self.spec, sender, counter, version=version, **changes))

    async def push(self, counter: int, sender: Identity = WORKER, version: int = 0) -> bytes:
        """Push a group that is accepted; its name."""
        receipt = await self.role.receive_local(self.envelope(counter, sender, version))
        assert receipt.accepted, (receipt.reason, receipt.detail)
        return receipt.group

    def counts_agree(self) -> bool:
        """The role's counts are those of the ledger."""
        counts = self.store.store.counts()
        return counts.get("accepted", 0) == self.role.waiting_local + self.role.waiting_external

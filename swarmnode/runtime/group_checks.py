"""Asks the verifier process about groups, many at once, and notices when it dies or hangs."""

import logging
from dataclasses import dataclass
from typing import Any

import trio

from protocol.envelope import Envelope
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.children import ChildGone, ChildProcess

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 30.0
"""How long the verifier may take for one group before the group is handed back to its worker."""
HANGS_AFTER_S = 180.0
"""A verifier that owes answers and has given none for so long hangs. A check may use 20 s of processor time,
which takes longer on a busy machine."""
MAX_CHECKS = 256
"""Groups being checked at once; more are told to come again."""


@dataclass(frozen=True)
class CheckedGroup:
    """The verifier's verdict on a group that it did not refuse."""

    prompt_ids: list[int]
    completions: list[list[int]] | None
    rewards: list[float]


class GroupChecks:
    """A group is checked at most once at a time, and every check ends: answered, refused, or `busy`."""

    def __init__(self, run_id: bytes) -> None:
        self.process: ChildProcess | None = None
        self._run_id = run_id
        self._ready = trio.Event()
        self._waiting: dict[bytes, trio.Event] = {}
        self._answers: dict[bytes, dict[str, Any]] = {}
        self._owing_since_s: float | None = None
        """Since when the verifier has owed answers and given none."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def check(self, group: bytes, envelope: Envelope, source: str) -> CheckedGroup:
        """The verdict on a `local` or `external` group. Raises `Refused`; `busy` when it must come again."""
        if group in self._waiting:
            raise Refused(RefusalReason.BUSY, "this group is being checked; ask again for its receipt")
        if len(self._waiting) >= MAX_CHECKS:
            raise Refused(RefusalReason.BUSY, "too many groups are being checked; send it again")
        self._waiting[group] = trio.Event()
        try:
            with trio.move_on_after(CHECK_TIMEOUT_S) as limit:
                await self._ready.wait()
                # Only who has been sent is woken when the verifier dies; the others wait for the next.
                event = self._waiting[group] = trio.Event()
                self._send(group, envelope, source)
                await event.wait()
            answer = self._answers.get(group)
        finally:
            del self._waiting[group]
            self._answers.pop(group, None)
        if answer is not None:
            return _verdict(answer)
        if limit.cancelled_caught:
            self._end_hanging()
            raise Refused(
                RefusalReason.BUSY, f"the check did not finish in {CHECK_TIMEOUT_S:.0f} s; send it again"
            )
        raise Refused(RefusalReason.BUSY, "the verifier is restarting; send it again")

    def _send(self, group: bytes, envelope: Envelope, source: str) -> None:
        try:
            if self.process is None:
                raise ChildGone("the verifier process is not running")
            self.process.send(
                {
                    "type": "check",
                    "id": group,
                    "body": envelope.body,
                    "sender": envelope.sender,
                    "run_id": self._run_id,
                    "source": source,
                }
            )
        except ChildGone as error:
            raise Refused(RefusalReason.BUSY, "the verifier is restarting; send it again") from error
        if self._owing_since_s is None:
            self._owing_since_s = trio.current_time()

    def _end_hanging(self) -> None:
        if self._owing_since_s is None or self.process is None:
            return
        silent_s = trio.current_time() - self._owing_since_s
        if silent_s >= HANGS_AFTER_S:
            self.process.end(f"it answered nothing for {silent_s:.0f} s")

    def on_down(self) -> None:
        """The verifier process died: groups in check go back to their workers, which send them again."""
        self._owing_since_s = None
        if self._ready.is_set():
            self._ready = trio.Event()
        for event in self._waiting.values():
            event.set()

    async def on_message(self, message: dict[str, Any]) -> None:
        """The verifier process says something."""
        if message["type"] == "ready":
            self._ready.set()
        elif message["type"] == "checked":
            if message["id"] in self._waiting:
                self._answers[message["id"]] = message
                self._waiting[message["id"]].set()
            owes = any(not event.is_set() for event in self._waiting.values())
            self._owing_since_s = trio.current_time() if owes else None


def _verdict(answer: dict[str, Any]) -> CheckedGroup:
    if answer["ok"]:
        return CheckedGroup(answer["prompt_ids"], answer["completions"], answer["rewards"])
    reason, _, detail = str(answer["reason"]).partition(":")
    raise Refused(RefusalReason(reason), detail.strip())

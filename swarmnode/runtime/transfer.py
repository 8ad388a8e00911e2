"""How far a download is, for people: in events, in the state, on the page."""

from collections.abc import Callable
from typing import Any

import trio

from peers.chunk_exchange import TransferProgress
from swarmnode.runtime.rates import Rate

TELL_EVERY_S = 10.0


class Transfer:
    """One file that is being fetched."""

    def __init__(self, what: str, total_bytes: int, done_bytes: int = 0) -> None:
        """`what` is for people; `done_bytes` are here from an earlier try."""
        self.what = what
        self.total_bytes = total_bytes
        self.done_bytes = done_bytes
        self._rate = Rate()
        self._began = False

    def note(self, progress: TransferProgress) -> None:
        """Take in how far it is. What is there at first did not come now."""
        if self._began:
            self._rate.add(progress.done_bytes - self.done_bytes)
        self._began = True
        self.done_bytes = progress.done_bytes

    def state(self) -> dict[str, Any]:
        """As it is in the node's state."""
        return {
            "what": self.what,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "percent": 100.0 * self.done_bytes / self.total_bytes,
            "bytes_per_s": self._rate.per_second(),
        }

    def __str__(self) -> str:
        return transfer_text(self.state())


def transfer_text(state: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"{state['what']}: {state['percent']:.0f} % of {state['total_bytes'] / 1e6:,.1f} MB, "
        f"{state['bytes_per_s'] / 1e6:,.1f} MB/s"
    )


class FileProgress:
    """Events, now and then, about files of which one is fetched after the other."""

    def __init__(self, on_event: Callable[[str, str], None]) -> None:
        self._on_event = on_event
        self._transfer: Transfer | None = None
        self._told_s = trio.current_time()

    def note(self, name: str, progress: TransferProgress) -> None:
        """A file is so far."""
        if self._transfer is None or self._transfer.what != name:
            self._transfer = Transfer(name, progress.total_bytes)
            self._told_s = trio.current_time()
        self._transfer.note(progress)
        if trio.current_time() - self._told_s >= TELL_EVERY_S:
            self._told_s = trio.current_time()
            self._on_event("info", f"fetching {self._transfer}")

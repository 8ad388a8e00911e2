"""The node's state as it leaves: read, made into JSON, and pushed to those who follow it.

Invariants: `get_state` is called on the API thread only; its exceptions are counted and leave the feed only
as `StateUnavailable`; a follower holds at most one frame that it has not yet sent (the newest).
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("swarmnode.api")

State = dict[str, Any]

MAX_SUBSCRIBERS = 32
"""Open event streams. A page holds one; each costs a copy of the state every second."""

PUSH_INTERVAL_S = 1.0


class StateUnavailable(Exception):
    """`get_state` failed. The message is one line and names the cause."""


class TooManySubscribers(Exception):
    """All event streams are taken."""


class Subscription:
    """One follower's slot: the newest frame not yet taken."""

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._offered: bytes | None = None
        self._wake = asyncio.Event()
        self.closed = False

    def offer(self, frame: bytes) -> None:
        """Replace the waiting frame, unless this follower already had the same one."""
        if frame != self._offered:
            self._offered = self._frame = frame
            self._wake.set()

    def close(self) -> None:
        """End the stream at its next wait."""
        self.closed = True
        self._wake.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The newest frame, or None when nothing changed within `timeout_s` or the feed closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return None
        self._wake.clear()
        frame, self._frame = self._frame, None
        return frame


class StateFeed:
    """Reads the state for answers, and once a second for all followers together."""

    def __init__(self, get_state: Callable[[], State]) -> None:
        self._get_state = get_state
        self._subscriptions: set[Subscription] = set()
        self._wanted = asyncio.Event()
        self._read_at = -math.inf
        self._last_error: str | None = None
        self.errors = 0

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    def read(self) -> State:
        """The state now. Raises `StateUnavailable`."""
        self._read_at = time.monotonic()
        try:
            state = self._get_state()
            if not isinstance(state, dict):
                raise TypeError(f"the state is a {type(state).__name__}, not a dict")
        except Exception as error:  # whatever it is, the API must outlive it
            raise self._failed(error) from error
        if self._last_error is not None:
            log.info("the node's state can be read again")
            self._last_error = None
        return state

    def read_json(self) -> bytes:
        """The state now as one line of JSON. Raises `StateUnavailable`."""
        state = self.read()
        try:
            return to_json(state)
        except Exception as error:  # a value that JSON does not know, or a dict that changed meanwhile
            raise self._failed(error) from error

    def healthy(self, max_age_s: float = 1.0) -> bool:
        """Whether the state can be read; asks again only when the last answer is older than `max_age_s`."""
        if time.monotonic() - self._read_at > max_age_s:
            try:
                self.read_json()
            except StateUnavailable:
                return False
        return self._last_error is None

    def subscribe(self) -> Subscription:
        """A new follower, which gets the state at once. Raises `TooManySubscribers`."""
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            raise TooManySubscribers
        subscription = Subscription()
        self._subscriptions.add(subscription)
        self._wanted.set()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End all streams."""
        for subscription in self._subscriptions:
            subscription.close()

    async def run(self) -> None:
        """Push to the followers until cancelled; idle while there are none."""
        while True:
            if not self._subscriptions:
                await self._wanted.wait()
            self._wanted.clear()
            frame = self._frame()
            for subscription in self._subscriptions:
                subscription.offer(frame)
            try:
                async with asyncio.timeout(PUSH_INTERVAL_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _frame(self) -> bytes:
        try:
            return b"event: state\ndata: " + self.read_json() + b"\n\n"
        except StateUnavailable as error:
            return b"event: problem\ndata: " + to_json({"error": str(error)}) + b"\n\n"

    def _failed(self, error: Exception) -> StateUnavailable:
        self.errors += 1
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        if cause != self._last_error:  # once per cause, not once per second
            log.error("the node's state cannot be read: %s", cause, exc_info=error)
        self._last_error = cause
        return StateUnavailable(f"the node cannot tell its state ({cause}); its log says more")


def to_json(value: Any) -> bytes:
    """`value` as one line of JSON that browsers accept: numbers that are not finite become null."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

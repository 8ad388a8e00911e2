"""Keeps a service task alive: restarts it after a crash with back-off, reports each crash, never gives up."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A service that ran this long before it crashed starts again with the first delay."""


@dataclass(frozen=True)
class Crash:
    """One crash of one service, and when it starts again."""

    name: str
    error: Exception
    attempt: int
    """Crashes in a row without a healthy stretch between them, this one included."""
    restart_in_s: float

    def __str__(self) -> str:
        cause = describe(self.error)
        return f"{self.name} crashed ({cause}); restart {self.attempt} in {self.restart_in_s:.1f} s"


def describe(error: BaseException) -> str:
    """One line: the innermost cause of an exception (group) and its type."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def supervise(
    name: str,
    service: Callable[[], Awaitable[None]],
    on_crash: Callable[[Crash], None],
    *,
    first_delay_s: float = FIRST_DELAY_S,
    max_delay_s: float = MAX_DELAY_S,
    healthy_after_s: float = HEALTHY_AFTER_S,
    rng: random.Random | None = None,
) -> None:
    """Run `service` until it returns or this task is cancelled; after an exception wait and run it again.

    The delay doubles with each crash in a row up to `max_delay_s`, with jitter between half of it and all
    of it. Cancellation is not an error: it is never reported and never swallowed.
    """
    rng = rng or random.Random()
    attempt = 0
    while True:
        started_s = trio.current_time()
        try:
            await service()
            return
        except Exception as caught:
            error: Exception = caught
        except BaseExceptionGroup as group:
            # A crash and a cancellation met in one nursery: report the first, obey the second.
            crashes, rest = group.split(Exception)
            if crashes is not None:
                on_crash(Crash(name, crashes, attempt + 1, 0.0))
            assert rest is not None, "a group of ordinary exceptions only is an ExceptionGroup"
            raise rest from None
        if trio.current_time() - started_s >= healthy_after_s:
            attempt = 0
        attempt += 1
        delay_s = min(max_delay_s, first_delay_s * 2.0 ** min(attempt - 1, 30)) * rng.uniform(0.5, 1.0)
        on_crash(Crash(name, error, attempt, delay_s))
        await trio.sleep(delay_s)

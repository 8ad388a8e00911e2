"""Two small things that trio has not: an event that can happen again and again, and the cause of a group."""

import trio


class Signal:
    """`wait` returns at the next `set`. Look at the state first, then wait: nothing runs in between."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        await self._event.wait()


def first_cause(error: BaseException) -> BaseException:
    """The first exception in a group that is none itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

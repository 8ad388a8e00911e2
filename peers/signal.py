"""An event that can happen again and again."""

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

"""The hello exchange: a peer counts as connected once both sides have spoken, not when a port is open."""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from peers.base import PeerId, TransportError
from peers.swarm import Swarm
from protocol.base import Message
from protocol.messages import Hello
from protocol.refusals import RefusalReason, Refused

HELLO_TIMEOUT_S = 10.0
HELLO_TRIES = 2
MAX_HELLO_BYTES = 64 * 1024

OnHello = Callable[[PeerId, Hello, float | None], None]
"""Called with each hello heard, and how long its answer took (None when the peer spoke first)."""


@dataclass(eq=False)
class _Exchange:
    done: trio.Event = field(default_factory=trio.Event)
    error: str = "the exchange was cut off"


class Greeter:
    """Says hello, answers it, knows who has said it on this connection. One exchange per peer at once."""

    def __init__(self, swarm: Swarm, hello: Callable[[], Hello], on_hello: OnHello) -> None:
        self._swarm = swarm
        self._hello = hello
        self._on_hello = on_hello
        self._greeted: set[PeerId] = set()
        self._busy: dict[PeerId, _Exchange] = {}
        swarm.serve("hello", self._answer, max_bytes=MAX_HELLO_BYTES)

    @property
    def greeted(self) -> set[PeerId]:
        """Connected peers that have said hello on this connection."""
        return self._greeted & self._swarm.transport.connected_peers()

    def is_busy(self, peer: PeerId) -> bool:
        """Whether an exchange with the peer is going on."""
        return peer in self._busy

    def disconnected(self, peer: PeerId) -> None:
        """The connection is gone: on the next one the peer must say hello again."""
        self._greeted.discard(peer)

    def reset(self) -> None:
        """Forget exchanges that were cut off with the task that made them."""
        for exchange in self._busy.values():
            exchange.done.set()
        self._busy.clear()

    async def greet(self, peer: PeerId, *, again: bool = False) -> str:
        """Exchange hellos with a connected peer; "" or why not, and then the connection is closed.

        With `again` it is done even if the peer has said hello before: a sign of life.
        """
        if peer in self._busy:
            running = self._busy[peer]
            await running.done.wait()
            return running.error
        if peer in self.greeted and not again:
            return ""
        exchange = self._busy[peer] = _Exchange()
        try:
            exchange.error = await self._exchange(peer)
            if exchange.error:
                self._greeted.discard(peer)
                await self._swarm.transport.disconnect(peer)
            return exchange.error
        finally:
            self._busy.pop(peer, None)
            exchange.done.set()

    async def _exchange(self, peer: PeerId) -> str:
        error = ""
        for _ in range(HELLO_TRIES):
            started_s = trio.current_time()
            try:
                answer = await self._swarm.call(peer, self._hello(), timeout_s=HELLO_TIMEOUT_S, expect=Hello)
            except Refused as refused:
                if refused.reason is RefusalReason.WRONG_RUN:
                    return f"it is a node of another run ({refused.detail}); check the invite or the seed"
                return f"it refuses this node: {refused}"
            except TransportError as failure:
                error = f"it does not say hello: {failure}"
                if peer not in self._swarm.transport.connected_peers():
                    return error
            else:
                self._heard(peer, answer, trio.current_time() - started_s)
                return ""
        return error

    async def _answer(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, Hello)
        self._heard(sender, message, None)
        return "hello", self._hello()

    def _heard(self, peer: PeerId, hello: Hello, round_trip_s: float | None) -> None:
        self._greeted.add(peer)
        self._on_hello(peer, hello, round_trip_s)

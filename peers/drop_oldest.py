"""A bounded broadcast: each subscriber has its own channel; a slow one loses its oldest items, counted."""

from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class DropOldestBroadcast(Generic[T]):
    """Sending never waits. A subscriber that closed its channel is forgotten at the next send."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The second end is a clone of the subscriber's, to take the oldest item out when the channel is full.
        self._channels: list[tuple[trio.MemorySendChannel[T], trio.MemoryReceiveChannel[T]]] = []
        self.dropped = 0

    def subscribe(self) -> trio.MemoryReceiveChannel[T]:
        """A new channel that receives what is sent from now on."""
        send, receive = trio.open_memory_channel[T](self._capacity)
        self._channels.append((send, receive.clone()))
        return receive

    def has_subscribers(self) -> bool:
        """Whether any subscriber still holds its channel open; closes the ends of those that do not."""
        kept = []
        for send, oldest in self._channels:
            if send.statistics().open_receive_channels > 1:
                kept.append((send, oldest))
            else:
                send.close()
                oldest.close()
        self._channels = kept
        return bool(kept)

    def send(self, item: T) -> int:
        """Give `item` to every subscriber; returns how many old items were dropped to make room."""
        dropped = 0
        self.has_subscribers()
        for send, oldest in self._channels:
            try:
                send.send_nowait(item)
            except trio.WouldBlock:
                oldest.receive_nowait()
                send.send_nowait(item)
                dropped += 1
        self.dropped += dropped
        return dropped

    def close(self) -> None:
        """End every subscriber's channel after what still waits in it."""
        for send, oldest in self._channels:
            send.close()
            oldest.close()
        self._channels = []

"""From an address to a TCP connection: names resolved in a thread, IPv4 first, several addresses raced."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from peers.base import PeerUnreachable
from peers.libp2p_address import Endpoint

HEAD_START_S = 0.25
"""How long an address is tried alone before the next one joins."""

MAX_CANDIDATES = 8
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

T = TypeVar("T")

_resolving = trio.CapacityLimiter(8)


async def resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, str]]:
    """The IP addresses of an endpoint, IPv4 first. Raises `PeerUnreachable` if the name has none."""
    if endpoint.kind in ("ip4", "ip6"):
        return [(_FAMILIES[endpoint.kind], endpoint.host)]

    def look_up() -> list[tuple[socket.AddressFamily, str]]:
        family = _FAMILIES.get(endpoint.kind, socket.AF_UNSPEC)
        found = socket.getaddrinfo(endpoint.host, endpoint.port, family, socket.SOCK_STREAM)
        return [(entry[0], str(entry[4][0])) for entry in found]

    try:
        # The limiter is the thread's until it ends, even if this task is cancelled: names cannot pile up.
        found = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # the stubs are older than trio
            look_up, abandon_on_cancel=True, limiter=_resolving
        )
    except (OSError, UnicodeError) as error:
        raise PeerUnreachable(f"the name '{endpoint.host}' cannot be resolved: {error}") from error
    return sorted(dict.fromkeys(found), key=lambda entry: entry[0] != socket.AF_INET)[:MAX_CANDIDATES]


async def open_stream(family: socket.AddressFamily, ip: str, port: int) -> trio.SocketStream:
    """A TCP connection to one address. Raises OSError."""
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await sock.connect((ip, port))
        return trio.SocketStream(sock)
    except BaseException:
        sock.close()
        raise


async def first_success(
    attempts: Sequence[Callable[[], Awaitable[T]]], failures: list[Exception]
) -> T | None:
    """Start the attempts one by one, each when the last failed or had its head start; the first result wins.

    Failures are added to `failures` as they come, so that a caller that times out can still tell them.
    """
    results: list[T] = []

    async def run(attempt: Callable[[], Awaitable[T]], failed: trio.Event) -> None:
        try:
            results.append(await attempt())
        except (OSError, PeerUnreachable) as error:
            failures.append(error)
            failed.set()
        else:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for attempt in attempts:
            failed = trio.Event()
            nursery.start_soon(run, attempt, failed)
            with trio.move_on_after(HEAD_START_S):
                await failed.wait()
    return results[0] if results else None

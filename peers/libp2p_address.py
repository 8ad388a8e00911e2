"""Peer ids and multiaddresses as text: reading, writing, and which ones a node announces. No network."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import base58

from peers.base import PeerId
from protocol.limits import MAX_ADDRESS_CHARS, MAX_ADDRESSES

_ED25519_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
"""Identity multihash (0x00) of 36 bytes: the protobuf {type: Ed25519 (1), data: 32 bytes} of a public key."""

_PREFIX_BYTES = len(_ED25519_PREFIX)


def peer_id_to_multihash(peer: PeerId) -> bytes:
    """The 38-byte libp2p peer id that embeds the public key. Raises ValueError unless `peer` has 32 bytes."""
    if len(peer) != 32:
        raise ValueError(f"a peer id is a 32-byte Ed25519 public key, got {len(peer)} bytes")
    return _ED25519_PREFIX + peer


def peer_id_from_multihash(multihash: bytes) -> PeerId:
    """The public key in a libp2p peer id. Raises ValueError for other key types, whose ids hold a hash."""
    if len(multihash) != _PREFIX_BYTES + 32 or not multihash.startswith(_ED25519_PREFIX):
        raise ValueError("not the libp2p peer id of an Ed25519 key (those begin with 12D3KooW)")
    return PeerId(multihash[_PREFIX_BYTES:])


def peer_id_to_text(peer: PeerId) -> str:
    """The usual text of a peer id, such as 12D3KooW…"""
    return base58.b58encode(peer_id_to_multihash(peer)).decode("ascii")


def peer_id_from_text(text: str) -> PeerId:
    """Read 12D3KooW… Raises ValueError with the offending text."""
    if len(text) > 64:
        raise ValueError("a peer id has 52 characters; this one is far longer")
    try:
        return peer_id_from_multihash(base58.b58decode(text))
    except ValueError as error:
        raise ValueError(f"'{text}' is not a peer id: {error}") from error


def split_peer_id(address: str) -> tuple[str, PeerId]:
    """Split "/ip4/10.0.0.2/tcp/4001/p2p/12D3KooW…" into the part to dial and the peer expected there."""
    location, separator, text = address.rpartition("/p2p/")
    if not separator or not location.startswith("/"):
        raise ValueError(f"'{address}' is not an address of a peer: expected /ip4/HOST/tcp/PORT/p2p/PEER-ID")
    return location, peer_id_from_text(text.rstrip("/"))


@dataclass(frozen=True)
class Endpoint:
    """Where to dial or listen: /KIND/HOST/tcp/PORT. KIND is ip4, ip6, dns (both families), dns4 or dns6."""

    kind: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"


def parse_endpoint(address: str) -> Endpoint:
    """Read /ip4/10.0.0.2/tcp/4001 and the like, without /p2p/. Raises ValueError saying what is expected."""
    expected = "expected /ip4/HOST/tcp/PORT, or ip6, dns, dns4, dns6 in place of ip4"
    if len(address) > MAX_ADDRESS_CHARS:
        raise ValueError(f"an address has at most {MAX_ADDRESS_CHARS} characters; {expected}")
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp" or not parts[2]:
        raise ValueError(f"'{address}' is not a TCP address: {expected}")
    kind, host, port = parts[1], parts[2], parts[4]
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"'{port}' in '{address}' is not a port number")
    if kind in ("ip4", "ip6"):
        try:
            version = ipaddress.ip_address(host).version
        except ValueError as error:
            raise ValueError(
                f"'{host}' in '{address}' is not an IP address; names go under /dns4/"
            ) from error
        if kind != f"ip{version}":
            raise ValueError(f"'{host}' in '{address}' belongs under /ip{version}/")
    elif kind not in ("dns", "dns4", "dns6"):
        raise ValueError(f"'{address}' cannot be dialed: {expected}")
    return Endpoint(kind, host, int(port))


def announced_endpoints(
    configured: Iterable[str], listening: Sequence[Endpoint], own_ips: Iterable[str]
) -> list[Endpoint]:
    """What others are told to dial.

    `configured` addresses win, with port 0 replaced by the first port listened on. Otherwise the addresses
    listened on, with 0.0.0.0 and :: replaced by `own_ips`; loopback addresses only if there are no others.
    """
    chosen = [parse_endpoint(address.partition("/p2p/")[0]) for address in configured]
    if chosen:
        port = listening[0].port if listening else 0
        return [replace(endpoint, port=endpoint.port or port) for endpoint in chosen][:MAX_ADDRESSES]
    own = [ipaddress.ip_address(ip.partition("%")[0]) for ip in own_ips]
    found: dict[Endpoint, bool] = {}
    for endpoint in listening:
        ip = ipaddress.ip_address(endpoint.host)
        for candidate in own if ip.is_unspecified else [ip]:
            # An IPv6 socket on :: serves IPv4 only where the system says so; what is certain is announced.
            if candidate.version == ip.version and not candidate.is_link_local:
                kind = f"ip{candidate.version}"
                found[Endpoint(kind, str(candidate), endpoint.port)] = candidate.is_loopback
    reachable = [endpoint for endpoint, loopback in found.items() if not loopback]
    return (reachable or list(found))[:MAX_ADDRESSES]

"""Peer ids and addresses as text: what comes after /p2p/ in a multiaddress. Pure text, no network."""

import base58

from peers.base import PeerId

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

"""Peer ids and addresses as text, and which addresses a node announces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.base import PeerId
from peers.libp2p_address import (
    Endpoint,
    announced_endpoints,
    parse_endpoint,
    peer_id_from_text,
    peer_id_to_text,
    split_peer_id,
)

# Computed by libp2p from the key pair of the private seed 00 01 … 1f: ID.from_pubkey(public).to_base58().
KEY = PeerId(bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"))
TEXT = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def test_a_peer_id_has_libp2ps_text():
    assert peer_id_to_text(KEY) == TEXT
    assert peer_id_from_text(TEXT) == KEY


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_survives_as_text(key: bytes):
    assert peer_id_from_text(peer_id_to_text(PeerId(key))) == key


@pytest.mark.parametrize(
    "text",
    ["", "12D3", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", TEXT[:-1] + "0", "1" * 500, "é" * 52],
    ids=["empty", "short", "RSA", "not base58", "long", "not ASCII"],
)
def test_other_text_is_no_peer_id(text: str):
    with pytest.raises(ValueError):
        peer_id_from_text(text)


def test_the_peer_is_split_from_the_place():
    assert split_peer_id(f"/dns4/seed.example/tcp/4001/p2p/{TEXT}") == ("/dns4/seed.example/tcp/4001", KEY)
    with pytest.raises(ValueError, match="expected /ip4/HOST/tcp/PORT/p2p/PEER-ID"):
        split_peer_id("/ip4/10.0.0.1/tcp/4001")


@pytest.mark.parametrize("address", ["/ip4/10.0.0.1/tcp/0", "/ip6/fd00::1/tcp/65535", "/dns/host/tcp/4001"])
def test_tcp_addresses_are_read_and_written(address: str):
    assert str(parse_endpoint(address)) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "10.0.0.1:4001",
        "/ip4/10.0.0.1/udp/4001",
        "/ip4/10.0.0.1/tcp/65536",
        "/ip4/10.0.0.1/tcp/-1",
        "/ip4/10.0.0.1/tcp/²",
        "/ip4/host/tcp/4001",
        "/ip4/::1/tcp/4001",
        "/ip6/10.0.0.1/tcp/4001",
        "/unix/x/tcp/4001",
        "/dns4//tcp/4001",
        "/ip4/10.0.0.1/tcp/4001/ws",
        "/dns4/" + "a" * 300 + "/tcp/4001",
    ],
)
def test_what_cannot_be_dialed_is_refused(address: str):
    with pytest.raises(ValueError):
        parse_endpoint(address)


OWN = ["127.0.0.1", "192.168.1.5", "169.254.3.4", "::1", "fe80::1%eth0", "2001:db8::5"]


def texts(endpoints: list[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]


def test_listening_everywhere_announces_the_interfaces_but_not_loopback():
    everywhere = [Endpoint("ip4", "0.0.0.0", 4001), Endpoint("ip6", "::", 4002)]
    assert texts(announced_endpoints([], everywhere, OWN)) == [
        "/ip4/192.168.1.5/tcp/4001",
        "/ip6/2001:db8::5/tcp/4002",
    ]


def test_loopback_is_announced_only_where_there_is_nothing_else():
    loopback = Endpoint("ip4", "127.0.0.1", 4001)
    assert texts(announced_endpoints([], [loopback], OWN)) == ["/ip4/127.0.0.1/tcp/4001"]
    everywhere = Endpoint("ip4", "0.0.0.0", 4001)
    assert texts(announced_endpoints([], [everywhere], ["127.0.0.1"])) == ["/ip4/127.0.0.1/tcp/4001"]
    lan = Endpoint("ip4", "10.0.0.2", 4001)
    assert texts(announced_endpoints([], [loopback, lan], OWN)) == ["/ip4/10.0.0.2/tcp/4001"]


def test_configured_addresses_replace_all_others_and_port_0_is_the_real_port():
    listening = [Endpoint("ip4", "0.0.0.0", 40123)]
    configured = ["/dns4/learner/tcp/0", f"/ip4/203.0.113.7/tcp/9999/p2p/{TEXT}"]
    assert texts(announced_endpoints(configured, listening, OWN)) == [
        "/dns4/learner/tcp/40123",
        "/ip4/203.0.113.7/tcp/9999",
    ]

"""The rules on Host, Origin and token, as pure functions."""

import pytest

from swarmnode.api.access import AccessRules, is_loopback, split_host

TOKEN = "correct-horse-battery"
OPEN = AccessRules(port=8642, token=None)
LOCKED = AccessRules(port=8642, token=TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST:8642", "[::1]:8642"])
def test_own_names_are_served_on_loopback(host: str) -> None:
    assert OPEN.check_origin({"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8642",
        "127.0.0.1.evil.example:8642",
        "localhost",
        "localhost:80",
        "127.0.0.1:8643",
        "evil@127.0.0.1:8642",
        "127.0.0.1:8642/",
        "127.0.0.1:99999999",
        "[::1",
    ],
)
def test_rebound_and_malformed_hosts_are_refused_on_loopback(host: str) -> None:
    denied = OPEN.check_origin({"Host": host})
    assert denied is not None
    assert (denied.status, denied.reason) == (403, "host")
    assert "http://127.0.0.1:8642" in denied.detail


def test_port_80_needs_no_port_in_the_host() -> None:
    assert AccessRules(port=80, token=None).check_origin({"Host": "localhost"}) is None


def test_further_host_names_hold_with_any_port_or_with_the_one_given() -> None:
    rules = AccessRules(port=8642, token=None, host_names=frozenset({"node.lan", "localhost:9000"}))
    assert rules.check_origin({"Host": "node.lan"}) is None
    assert rules.check_origin({"Host": "node.lan:18642"}) is None
    assert rules.check_origin({"Host": "localhost:9000"}) is None
    assert rules.check_origin({"Host": "localhost:9001"}) is not None


def test_with_a_token_any_host_is_served() -> None:
    assert LOCKED.check_origin({"Host": "node7.example:18642"}) is None


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "http://localhost:3000", "http://127.0.0.1:8642"]
)
@pytest.mark.parametrize("rules", [OPEN, LOCKED])
def test_other_origins_are_refused(rules: AccessRules, origin: str) -> None:
    denied = rules.check_origin({"Host": "localhost:8642", "Origin": origin})
    assert denied is not None
    assert (denied.status, denied.reason) == (403, "origin")


def test_the_own_origin_is_served() -> None:
    assert OPEN.check_origin({"Host": "localhost:8642", "Origin": "http://localhost:8642"}) is None


def test_requests_that_another_site_caused_are_refused_unless_a_person_followed_a_link() -> None:
    headers = {"Host": "localhost:8642", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert OPEN.check_origin(headers) is not None
    assert OPEN.check_origin(headers | {"Sec-Fetch-Site": "same-site"}) is not None
    assert OPEN.check_origin(headers | {"Sec-Fetch-Site": "same-origin"}) is None
    assert OPEN.check_origin(headers | {"Sec-Fetch-Mode": "navigate"}) is None


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_token_opens(given: str) -> None:
    assert LOCKED.check_token({"Authorization": given}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer \udcff\u20ac"},
    ],
)
def test_anything_else_does_not(headers: dict[str, str]) -> None:
    denied = LOCKED.check_token(headers)
    assert denied is not None
    assert (denied.status, denied.reason) == (401, "token")


def test_what_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.4", "node.lan", ""))


def test_split_host() -> None:
    assert split_host("[::1]:8642") == ("::1", 8642)
    assert split_host("name") == ("name", 80)
    assert split_host("name:x") == ("", 0)

"""The server over real HTTP: routes, access, events, failing state, start and stop."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.api import ApiError, ApiServer, feed
from tests.unit.api.example_state import example_state

TOKEN = "correct-horse-battery"


class Node:
    """What stands behind the server: a state that a test changes, or a failure that it sets."""

    def __init__(self) -> None:
        self.state = example_state()
        self.failure: Exception | None = None

    def get_state(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return dict(self.state)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def server(node: Node) -> Iterator[ApiServer]:
    server = ApiServer("127.0.0.1", 0, None, node.get_state)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def locked(node: Node) -> Iterator[ApiServer]:
    server = ApiServer("0.0.0.0", 0, TOKEN, node.get_state)
    server.start()
    yield server
    server.stop()


def get(
    server: ApiServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


def test_state_is_what_the_node_says(server: ApiServer, node: Node) -> None:
    status, headers, body = get(server, "/api/state")
    assert status == 200
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    assert json.loads(body) == node.state


def test_numbers_that_are_not_finite_become_null(server: ApiServer, node: Node) -> None:
    node.state = {"a": float("nan"), "b": [float("inf"), 1.5]}
    assert json.loads(get(server, "/api/state")[2], parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
    }


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/static/page.css", "text/css; charset=utf-8"),
        ("/static/page.js", "text/javascript; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
    ],
)
def test_the_page_is_served_with_its_guards(server: ApiServer, path: str, content_type: str) -> None:
    status, headers, body = get(server, path)
    assert (status, headers["content-type"]) == (200, content_type)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["server"] == "swarmnode"
    assert not [name for name in headers if name.startswith("access-control")]
    assert b"//fonts." not in body and b"https://" not in body


@pytest.mark.parametrize(
    "path",
    ["/static/server.py", "/static/..%2fserver.py", "/static/../server.py", "/static/", "/favicon.ico"],
)
def test_other_paths_do_not_exist(server: ApiServer, path: str) -> None:
    status, headers, body = get(server, path)
    assert status == 404
    assert "error" in json.loads(body)
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: ApiServer, method: str) -> None:
    status, headers, _ = get(server, "/api/state", method)
    assert status == 405
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path", ["/", "/api/state", "/api/events", "/metrics", "/healthz", "/static/page.js"]
)
def test_a_rebound_name_and_another_origin_get_nothing(server: ApiServer, path: str) -> None:
    assert get(server, path, Host="evil.example")[0] == 403
    assert get(server, path, Origin="http://evil.example")[0] == 403


def test_without_the_token_only_the_bare_page_and_health_are_served(locked: ApiServer) -> None:
    for path in (
        "/api/state",
        "/api/events",
        "/metrics",
        "/api/else",
        f"/api/state?token={TOKEN}",
        "//api/state",
    ):
        status, headers, body = get(locked, path)
        assert status == 401, path
        assert headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer TOKEN" in json.loads(body)["error"]
        assert get(locked, path, Authorization="Bearer wrong-wrong-wrong")[0] == 401
    assert get(locked, "/healthz", Host="anything.example")[2] == b'{"ok":true}'
    assert b"amber-learner" not in get(locked, "/")[2]


def test_the_token_opens_the_rest_under_any_host_name(locked: ApiServer) -> None:
    for path in ("/api/state", "/metrics"):
        assert get(locked, path, Authorization=f"Bearer {TOKEN}", Host="node7.example:18642")[0] == 200
    assert locked.page_url == f"http://127.0.0.1:{locked.port}/?token={TOKEN}"


def test_metrics_can_be_scraped(server: ApiServer) -> None:
    get(server, "/api/state", Host="evil.example")
    status, headers, body = get(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [
        sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples
    ]
    values = {sample.name: sample.value for sample in samples if not sample.labels}
    assert values["swarmnode_groups_consumed_total"] == 850
    denied = [sample for sample in samples if sample.name == "swarmnode_api_denied_requests_total"]
    assert [(sample.labels, sample.value) for sample in denied] == [({"reason": "host"}, 1.0)]


def test_a_failing_state_costs_an_answer_and_is_counted(
    server: ApiServer, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.failure = KeyError("ledger")
    for _ in range(2):
        status, _, body = get(server, "/api/state")
        assert status == 500
        assert "KeyError: 'ledger'" in json.loads(body)["error"]
    assert get(server, "/metrics")[0] == 500
    assert get(server, "/healthz")[::2] == (503, b'{"ok":false}')
    node.failure = None
    assert get(server, "/api/state")[0] == 200
    assert get(server, "/healthz")[0] == 200
    assert b"\nswarmnode_api_state_errors_total 3.0\n" in get(server, "/metrics")[2]
    logged = [record for record in caplog.records if "cannot be read" in record.message]
    assert len(logged) == 1, "logged once per cause, not at every request"


def test_a_state_that_is_not_json_costs_an_answer(server: ApiServer, node: Node) -> None:
    node.state = {"key": b"raw"}
    assert get(server, "/api/state")[0] == 500
    node.state = {}
    assert get(server, "/api/state")[2] == b"{}"


# Events


def follow(server: ApiServer, steps: Callable[[aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    """Run `steps(session, url of the events)` on an event loop of its own."""

    async def run() -> None:
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            await steps(session, f"http://127.0.0.1:{server.port}/api/events")

    asyncio.run(run())


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """The next event; comments are skipped."""
    while True:
        frame = (await response.content.readuntil(b"\n\n")).decode()
        if not frame.startswith(":"):
            name, data = frame.strip().split("\n")
            return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_events_bring_the_state_at_once_and_again_only_when_it_changed(
    server: ApiServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PUSH_INTERVAL_S", 0.02)

    async def steps(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await next_event(response) == ("state", node.state)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await next_event(response)
            node.state = {"changed": 1}
            assert await next_event(response) == ("state", {"changed": 1})
            node.failure = ValueError("broken")
            name, data = await next_event(response)
            assert name == "problem" and "ValueError: broken" in data["error"]
            node.failure = None
            assert await next_event(response) == ("state", {"changed": 1})

    follow(server, steps)


def test_a_silent_stream_sends_comments(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.api.server.HEARTBEAT_S", 0.05)

    async def steps(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as response:
            await next_event(response)
            assert await response.content.readuntil(b"\n\n") == b": nothing new\n\n"

    follow(server, steps)


def subscribers(server: ApiServer) -> float:
    samples = [
        s for f in text_string_to_metric_families(get(server, "/metrics")[2].decode()) for s in f.samples
    ]
    return next(sample.value for sample in samples if sample.name == "swarmnode_api_subscribers")


def test_followers_are_bounded_and_forgotten_when_they_leave(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_SUBSCRIBERS", 2)

    async def steps(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as first, session.get(url) as second:
            await next_event(first)
            await next_event(second)
            async with session.get(url) as third:
                assert third.status == 503
                assert "close one" in (await third.json())["error"]
        while await asyncio.to_thread(subscribers, server):
            await asyncio.sleep(0.02)
        async with session.get(url) as again:
            await next_event(again)

    follow(server, steps)


def test_a_follower_that_reads_nothing_is_dropped(
    server: ApiServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.api.server.WRITE_TIMEOUT_S", 0.1)
    node.state = {"big": "x" * 20_000_000}
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        host = f"127.0.0.1:{server.port}"
        client.sendall(f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        with client.makefile("rb") as stream:
            while stream.readline() != b"event: state\n":
                pass
            while subscribers(server):
                pass


# Start and stop


def test_stop_ends_open_streams_and_the_thread(server: ApiServer) -> None:
    async def steps(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as response:
            await next_event(response)
            await asyncio.to_thread(server.stop)
            assert await response.content.read() == b""

    follow(server, steps)
    assert "swarmnode-api" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        get(server, "/healthz")
    server.stop()


def test_a_port_in_use_is_named_with_what_to_do(server: ApiServer, node: Node) -> None:
    with pytest.raises(
        ApiError, match=rf"127\.0\.0\.1:{server.port}.*another program listens there.*api\.port"
    ):
        ApiServer("127.0.0.1", server.port, None, node.get_state).start()


def test_the_port_is_free_again_after_stop(node: Node) -> None:
    first = ApiServer("127.0.0.1", 0, None, node.get_state)
    first.start()
    get(first, "/")
    first.stop()
    second = ApiServer("127.0.0.1", first.port, None, node.get_state)
    second.start()
    assert get(second, "/healthz")[0] == 200
    second.stop()


def test_an_address_of_another_machine_is_named(node: Node) -> None:
    with pytest.raises(ApiError, match=r"192\.0\.2\.7.*no such address"):
        ApiServer("192.0.2.7", 0, TOKEN, node.get_state).start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "node.lan"])
def test_other_hosts_than_loopback_need_a_token(host: str) -> None:
    with pytest.raises(ApiError, match=r"needs a token.*SWARMNODE_API_TOKEN"):
        ApiServer(host, 0, None, dict)


@pytest.mark.parametrize(
    "token", ["", "short", "fifteen-letters", "with a space in it", "ümlaut-ümlaut-ümlaut"]
)
def test_a_token_must_be_long_and_plain(token: str) -> None:
    with pytest.raises(ApiError, match="16 or more plain characters"):
        ApiServer("127.0.0.1", 0, token, dict)


def test_stop_before_start_does_nothing() -> None:
    ApiServer("127.0.0.1", 0, None, dict).stop()

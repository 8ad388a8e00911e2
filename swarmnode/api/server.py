"""The API thread of a node: aiohttp on asyncio beside trio, for the page, JSON, events, metrics and health.

It only reads: no route changes anything in the node. It listens on loopback unless told otherwise, and then
only with a token. Nothing that happens in it (a failing `get_state`, a bad request, a client that does not
read) reaches the node.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from swarmnode.api.access import (
    MIN_TOKEN_CHARS,
    SECURITY_HEADERS,
    TOKEN_FORM,
    AccessRules,
    Denied,
    is_loopback,
)
from swarmnode.api.feed import (
    MAX_SUBSCRIBERS,
    State,
    StateFeed,
    StateUnavailable,
    TooManySubscribers,
    to_json,
)
from swarmnode.api.metrics import CONTENT_TYPE, render_metrics

log = logging.getLogger("swarmnode.api")

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
OPEN_PATHS = ("/", "/healthz")
OPEN_FOLDER = "/static/"
"""What needs no token: it tells nothing about the node. The page itself is open so that it can be loaded
again after it took the token out of its address; what it shows comes from the paths that need the token."""

HEARTBEAT_S = 5.0
WRITE_TIMEOUT_S = 10.0
"""A follower that reads nothing for this long is dropped."""
SHUTDOWN_S = 0.5
START_TIMEOUT_S = 10.0


class ApiError(Exception):
    """The API cannot start. The message is one line that says what to do."""


class ApiServer:
    """Serves one node's state. `get_state` runs on its thread and must quickly return a fresh dict."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        get_state: Callable[[], State],
        *,
        host_names: Iterable[str] = (),
    ) -> None:
        """`port` 0 takes a free one (`.port` after `start`). `host_names`: further Host names to answer to on
        loopback without a token, `name` or `name:port`, as a tunnel or proxy on this machine sends them.

        Raises `ApiError` when `host` is not loopback without a token, or the token is too short for one.
        """
        if token is None and not is_loopback(host):
            raise ApiError(
                f"the API would listen on {host}, which other machines can reach, so it needs a token: "
                f'set {_TOKEN_HINT}, or api.host = "127.0.0.1"'
            )
        if token is not None and not TOKEN_FORM.fullmatch(token):
            raise ApiError(
                f"the API token needs {MIN_TOKEN_CHARS} or more plain characters: set {_TOKEN_HINT}"
            )
        self.host = host
        self.port = port
        self.token = token
        self._get_state = get_state
        self._host_names = frozenset(name.lower() for name in host_names)
        self._files = _load_files()
        self._denied: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._start_error: Exception | None = None

    @property
    def page_url(self) -> str:
        """Where a person opens the page, with the token where there is one."""
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")

    def start(self) -> None:
        """Listen and serve in a thread of its own. Raises `ApiError` that says why it cannot."""
        if self._thread is not None:
            raise ApiError("this API server was started before; make a new one")
        listener = _listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="swarmnode-api", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise ApiError(
                f"the API thread did not start within {START_TIMEOUT_S:.0f} s on {self.host}:{self.port}"
            )
        if self._start_error is not None:
            raise ApiError(f"the API cannot serve on {self.host}:{self.port}: {self._start_error}")

    def stop(self) -> None:
        """End all streams and the thread, within a second. May be called twice, or before `start`."""
        if self._thread is None or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:  # the loop is closed: the thread has ended
            return
        self._thread.join(timeout=1.0)
        if self._thread.is_alive():
            log.warning("the API thread is busy in the node's state and is left behind")

    def _serve(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._main(listener))
        except Exception as error:
            self._start_error = error
            log.exception("the API thread ended")
        finally:
            listener.close()
            self._ready.set()

    async def _main(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        rules = AccessRules(self.port, self.token, self._host_names)
        feed = StateFeed(self._get_state)
        app = web.Application(middlewares=[self._guard(rules)])
        app.on_response_prepare.append(_add_headers)
        self._add_routes(app, feed)
        runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True
        )
        await runner.setup()
        pushing = asyncio.create_task(feed.run())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await web.SockSite(runner, listener).start()
            self._ready.set()
            await asyncio.wait((pushing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if pushing.done():
                pushing.result()  # it never returns: this raises what ended it
        finally:
            pushing.cancel()
            stopping.cancel()
            feed.close()
            await runner.cleanup()

    def _add_routes(self, app: web.Application, feed: StateFeed) -> None:
        async def page(_: web.Request) -> web.StreamResponse:
            return self._file("index.html")

        async def static(request: web.Request) -> web.StreamResponse:
            return self._file(request.match_info["name"])

        async def state(_: web.Request) -> web.StreamResponse:
            return _json(200, feed.read_json())

        async def metrics(_: web.Request) -> web.StreamResponse:
            body = render_metrics(feed.read(), feed.errors, feed.subscribers, self._denied)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

        async def health(_: web.Request) -> web.StreamResponse:
            ok = feed.healthy()
            return _json(200 if ok else 503, to_json({"ok": ok}))

        async def events(request: web.Request) -> web.StreamResponse:
            return await _stream(request, feed)

        app.router.add_get("/", page)
        app.router.add_get("/static/{name}", static)
        app.router.add_get("/api/state", state)
        app.router.add_get("/api/events", events, allow_head=False)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/healthz", health)

    def _file(self, name: str) -> web.Response:
        """A file of the page. Only the names read at start exist, so no path can lead elsewhere."""
        if name not in self._files:
            raise web.HTTPNotFound
        content_type, body = self._files[name]
        return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-cache"})

    def _guard(self, rules: AccessRules) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            denied = rules.check_origin(request.headers)
            is_open = request.path in OPEN_PATHS or request.path.startswith(OPEN_FOLDER)
            if denied is None and not is_open:
                denied = rules.check_token(request.headers)
            if denied is not None:
                self._denied[denied.reason] += 1
                return _refusal(denied)
            try:
                return await handler(request)
            except web.HTTPException as error:
                return _error(error.status, error.reason)
            except TooManySubscribers:
                return _error(503, f"{MAX_SUBSCRIBERS} pages already follow this node; close one of them")
            except StateUnavailable as error:
                return _error(500, str(error))
            except Exception as error:  # a fault in a handler costs one answer, not the thread
                log.exception("the API failed to answer %s", request.path)
                return _error(500, f"the API failed to answer: {type(error).__name__}")

        return guard


async def _stream(request: web.Request, feed: StateFeed) -> web.StreamResponse:
    """Server-sent events: the state when it changed, at most once a second; a comment when nothing did."""
    subscription = feed.subscribe()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    try:
        async with asyncio.timeout(None) as deadline:
            await response.prepare(request)
            while True:
                frame = await subscription.next(HEARTBEAT_S)
                if subscription.closed:
                    break
                deadline.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)
                await response.write(frame or b": nothing new\n\n")
                deadline.reschedule(None)
    except ConnectionResetError:
        log.debug("a follower of the state left")
    except TimeoutError:
        log.info("a follower of the state read nothing for %.0f s and was dropped", WRITE_TIMEOUT_S)
        if request.transport is not None:
            request.transport.abort()
    finally:
        feed.unsubscribe(subscription)
    return response


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(SECURITY_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8")


def _error(status: int, text: str) -> web.Response:
    return _json(status, to_json({"error": text}))


def _refusal(denied: Denied) -> web.Response:
    response = _error(denied.status, denied.detail)
    if denied.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _load_files() -> dict[str, tuple[str, bytes]]:
    return {
        path.name: (CONTENT_TYPES[path.suffix], path.read_bytes())
        for path in sorted(STATIC.iterdir())
        if path.suffix in CONTENT_TYPES
    }


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ApiError` that names the address and what to do."""
    where = f"{host}:{port}"
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = sorted(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE),
            key=lambda found: found[0] != socket.AF_INET,  # "localhost" means 127.0.0.1 where it means both
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
        return listener
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        if isinstance(error, socket.gaierror):
            cause, remedy = "that host name is unknown here", "use 127.0.0.1"
        elif isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            cause = "another program listens there"
            remedy = (
                f"stop it (ss -ltnp 'sport = :{port}' names it) or set another api.port (0 takes a free one)"
            )
        elif isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            cause, remedy = (
                "this machine has no such address",
                "use 127.0.0.1, or 0.0.0.0 with a token for all addresses",
            )
        elif isinstance(error, PermissionError):
            cause, remedy = "ports below 1024 need more rights", "choose one above, for example 8642"
        else:
            cause, remedy = str(error), "choose another host or port"
        raise ApiError(f"the API cannot listen on {where}: {cause}; {remedy}") from error


_TOKEN_HINT = "SWARMNODE_API_TOKEN or api.token to one, for example from `openssl rand -hex 24`"

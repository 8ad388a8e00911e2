"""Who may ask: the token, the Host and Origin rules against hostile web pages, and every answer's headers.

A page elsewhere on the web can make a browser send requests to this machine's loopback. Three rules stop it
from reading anything: the Host header must be a name that only this machine has (a rebound DNS name is not),
a request that another origin caused is refused, and no answer carries a CORS header.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

MIN_TOKEN_CHARS = 16
"""Guesses are not limited in rate, so a token must be too long to guess."""

TOKEN_FORM = re.compile(f"[!-~]{{{MIN_TOKEN_CHARS},}}")

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Server": "swarmnode",
}


@dataclass(frozen=True)
class Denied:
    """A request that is not answered. `reason` is counted; `detail` tells the person what to do."""

    status: int
    reason: str
    detail: str


@dataclass(frozen=True)
class AccessRules:
    """The rules of one server. With a token any Host is served: a rebound name lacks it."""

    port: int
    token: str | None
    host_names: frozenset[str] = frozenset()
    """Further names of this machine, lower case: `name` with any port, `name:port` only with that one."""

    def check_origin(self, headers: Mapping[str, str]) -> Denied | None:
        """The Host, Origin and Sec-Fetch rules, which hold for every path."""
        host = headers.get("Host", "").lower()
        if self.token is None and not self._is_own_host(host):
            return Denied(
                403,
                "host",
                f"this page is served only as http://127.0.0.1:{self.port} or http://localhost:{self.port}, "
                "so that no other web site can reach it under a name of its own. Open one of these.",
            )
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return Denied(403, "origin", "requests from other web sites are not answered")
        if (
            headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
            and headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            return Denied(403, "origin", "requests from other web sites are not answered")
        return None

    def check_token(self, headers: Mapping[str, str]) -> Denied | None:
        """The token rule, which holds for everything that tells something about the node."""
        if self.token is None:
            return None
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and same_token(given.strip(), self.token):
            return None
        return Denied(
            401,
            "token",
            "this needs the node's API token: send 'Authorization: Bearer TOKEN', or open /?token=TOKEN",
        )

    def _is_own_host(self, host: str) -> bool:
        name, port = split_host(host)
        own = name in ("127.0.0.1", "localhost", "::1") and port == self.port
        return own or host in self.host_names or name in self.host_names


def same_token(given: str, expected: str) -> bool:
    """Whether two tokens are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def split_host(host: str) -> tuple[str, int]:
    """Name and port of a Host header; ("", 0) when it is none."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return "", 0
    if parts.netloc != host or "@" in host:
        return "", 0
    return parts.hostname or "", 80 if port is None else port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

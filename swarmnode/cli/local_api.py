"""Talks to the node that runs in a data directory, through the API address that it wrote there."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from swarmnode.cli.errors import UserError
from swarmnode.data_directory import DataDirectory

API_FILE = "api.json"


def read_address(directory: DataDirectory) -> dict[str, Any] | None:
    """{"url", "token", "pid"} of the running node, None when none has written it."""
    path: Path = directory.root / API_FILE
    try:
        address: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return address
    except (OSError, ValueError):
        return None


def get(address: dict[str, Any], path: str, timeout_s: float = 5.0) -> Any:
    """GET a path of the API as JSON. Raises `UserError` when the node does not answer."""
    request = urllib.request.Request(address["url"] + path)
    if address.get("token"):
        request.add_header("Authorization", f"Bearer {address['token']}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.loads(reply.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UserError(
            f"the node does not answer at {address['url']} ({error}); is it running? "
            "start it with 'swarmnode run'"
        ) from error


def state(directory: DataDirectory) -> dict[str, Any]:
    """The running node's state. Raises `UserError`."""
    address = read_address(directory)
    if address is None:
        raise UserError(
            f"no node is running in {directory.root}; start it with 'swarmnode run --data {directory.root}'"
        )
    reply: dict[str, Any] = get(address, "/api/state")
    return reply

"""Where a running node's API is, written into its data directory for the commands of the same machine and
owner."""

import json
import os

from swarmnode.api import ApiServer
from swarmnode.data_directory import DataDirectory, atomic_write

API_FILE = "api.json"


def write_address(directory: DataDirectory, api: ApiServer, token: str | None) -> None:
    """Write {"url", "token", "pid"}, readable by the owner only."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(api.host, api.host)
    address = {"url": f"http://{host}:{api.port}", "token": token, "pid": os.getpid()}
    atomic_write(directory.root / API_FILE, json.dumps(address).encode(), mode=0o600)


def remove_address(directory: DataDirectory) -> None:
    """The node stops: no one should look for it here."""
    (directory.root / API_FILE).unlink(missing_ok=True)

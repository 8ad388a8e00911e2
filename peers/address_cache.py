"""The address book on disk: a small JSON file that helps to find the swarm again. Never needed or fatal."""

import json
import logging
import os
from pathlib import Path

from peers.address_book import AddressBook

log = logging.getLogger(__name__)


def load_addresses(path: Path, book: AddressBook) -> None:
    """Put what the file has into the book. A missing or broken file is only logged."""
    try:
        count = book.load(json.loads(path.read_text())["peers"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("the address cache %s is not usable and will be replaced: %s", path, error)
        return
    log.info("%d peers from the address cache %s", count, path)


def save_addresses(path: Path, addresses: dict[str, list[str]]) -> bool:
    """Write to a temporary name, flush, rename. A full disk costs the cache and nothing else; False then."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("w") as file:
            json.dump({"version": 1, "peers": addresses}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        log.warning("the address cache %s was not written: %s", path, error)
        return False
    return True

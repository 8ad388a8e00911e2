"""A node's data directory: where everything is, written so that a power cut loses nothing half-way."""

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from protocol.identity import Identity, IdentityError


class DataError(Exception):
    """The data directory cannot be used; the message is one line that says what to do."""


def atomic_write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write to a temporary name, fsync, rename, fsync the folder: `path` is the old or the new content,
    never a mix."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class DataDirectory:
    """Paths of one node. `lock()` keeps a second node out."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        self._lock_file: IO[bytes] | None = None

    identity_path = property(lambda self: self.root / "identity.pem")
    config_path = property(lambda self: self.root / "run.toml")
    spec_path = property(lambda self: self.root / "run.spec")
    address_book_path = property(lambda self: self.root / "peers.json")
    network_key_path = property(lambda self: self.root / "network.key")
    store_path = property(lambda self: self.root / "state.sqlite")
    policies_path = property(lambda self: self.root / "policies")
    model_path = property(lambda self: self.root / "model")
    logs_path = property(lambda self: self.root / "logs")
    metrics_path = property(lambda self: self.root / "metrics.jsonl")

    def create(self) -> None:
        """Make the directory, readable by its owner only. Raises `DataError`."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs_path.mkdir(exist_ok=True)
            self.policies_path.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{self.root}: cannot create it ({error.strerror}); choose another with --data"
            ) from error

    def lock(self) -> None:
        """Claim the directory for this process. Raises `DataError` when a node runs in it already."""
        self._lock_file = open(self.root / "lock", "wb")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"{self.root}: another node is running in this directory; stop it, or choose "
                "another directory with --data"
            ) from error

    def load_identity(self) -> Identity:
        """The node's key. Raises `DataError` if it is missing, readable by others, or not an Ed25519 PEM."""
        path = self.identity_path
        try:
            rights = stat.S_IMODE(path.stat().st_mode)
            pem = path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: there is no key here; make one with 'swarmnode init' or bring yours with "
                "'swarmnode key import FILE'"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: cannot read the key ({error.strerror})") from error
        if rights & 0o077:
            raise DataError(f"{path}: others may read this key (mode {rights:04o}); run: chmod 600 {path}")
        try:
            return Identity.from_pem(pem)
        except IdentityError as error:
            raise DataError(f"{path}: {error}") from error

    def load_network_key(self) -> bytes | None:
        """The private network's key; None when this node is in no private network. Raises `DataError`."""
        path = self.network_key_path
        if not path.exists():
            return None
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise DataError(f"{path}: others may read this key; run: chmod 600 {path}")
        try:
            key = bytes.fromhex(path.read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not 64 hexadecimal digits; join again with an invite") from error
        if len(key) != 32:
            raise DataError(
                f"{path}: holds {len(key)} bytes, a network key has 32; join again with an invite"
            )
        return key

    def save_network_key(self, key: bytes) -> None:
        """Make this node part of a private network."""
        atomic_write(self.network_key_path, key.hex().encode() + b"\n", mode=0o600)

    def load_or_create_identity(self) -> Identity:
        """The node's key, made now if there is none."""
        if not self.identity_path.exists():
            atomic_write(self.identity_path, Identity.generate().to_pem(), mode=0o600)
        return self.load_identity()

"""Directories that appear complete or not at all: written under a temporary name, then renamed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def new_directory(final: Path, *, flush: bool = True) -> Iterator[Path]:
    """Gives a temporary directory to fill; afterwards it stands at `final`, in place of whatever stood there.

    When the body raises nothing changes. A crash leaves at worst a temporary directory, see
    `remove_leftovers`. Without `flush` that is true of a crash of the process; one of the machine may leave
    any part of the directory until `flush_directory` has returned.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.parent / f".{final.name}{TEMPORARY_SUFFIX}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if flush:
        for path in temporary.iterdir():
            fsync(path)
        fsync(temporary)
    replaced = final.parent / f".{final.name}.replaced{TEMPORARY_SUFFIX}"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(temporary, final)
    if flush:
        fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def flush_directory(directory: Path) -> None:
    """Return when the directory's files, and its name, are on disk to stay."""
    for path in directory.iterdir():
        fsync(path)
    fsync(directory)
    fsync(directory.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete what a crash left half-written in `folder`."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path)


def version_directories(folder: Path) -> dict[int, Path]:
    """The `v<n>` directories of `folder` by version, ascending."""
    found = {
        int(path.name[1:]): path for path in folder.glob("v*") if path.name[1:].isdecimal() and path.is_dir()
    }
    return dict(sorted(found.items()))


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest `v<n>` directories."""
    for path in list(version_directories(folder).values())[:-keep]:
        # Renamed first, so that no reader takes a half-deleted one for complete.
        doomed = path.parent / f".{path.name}{TEMPORARY_SUFFIX}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def fsync(path: Path) -> None:
    """Force a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

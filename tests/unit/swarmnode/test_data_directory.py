"""The data directory: one node at a time, keys that only their owner may read, writes that are whole."""

import subprocess
from pathlib import Path

import pytest

from swarmnode.data_directory import DataDirectory, DataError, atomic_write


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory(tmp_path / "node")
    made.create()
    return made


def test_identity_is_made_once_with_owner_only_rights(directory: DataDirectory) -> None:
    first = directory.load_or_create_identity()
    assert directory.identity_path.stat().st_mode & 0o777 == 0o600
    assert directory.load_or_create_identity().key == first.key


def test_key_that_others_may_read_is_refused_with_the_command_that_mends_it(directory: DataDirectory) -> None:
    directory.load_or_create_identity()
    directory.identity_path.chmod(0o644)
    with pytest.raises(DataError, match=r"others may read this key \(mode 0644\); run: chmod 600 "):
        directory.load_identity()


def test_foreign_keys_are_refused_by_name(directory: DataDirectory) -> None:
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "RSA", "-out", directory.identity_path],
        check=True,
        capture_output=True,
    )
    directory.identity_path.chmod(0o600)
    with pytest.raises(DataError, match="expected Ed25519"):
        directory.load_identity()


def test_missing_key_says_how_to_get_one(directory: DataDirectory) -> None:
    with pytest.raises(DataError, match="swarmnode key import"):
        directory.load_identity()


def test_a_second_node_is_kept_out(directory: DataDirectory) -> None:
    directory.lock()
    with pytest.raises(DataError, match="another node is running in this directory"):
        DataDirectory(directory.root).lock()


def test_unusable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="choose another with --data"):
        DataDirectory(tmp_path / "file" / "node").create()


def test_atomic_write_replaces_whole_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "value"
    atomic_write(path, b"old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_network_key_is_kept_for_its_owner_only_and_damage_is_named(directory: DataDirectory) -> None:
    assert directory.load_network_key() is None
    directory.save_network_key(bytes(range(32)))
    assert directory.load_network_key() == bytes(range(32))
    path = directory.network_key_path
    assert path.stat().st_mode & 0o777 == 0o600
    for damaged, trouble in (
        ("00ff", "holds 2 bytes, a network key has 32"),
        ("secret", "not 64 hexadecimal digits"),
    ):
        path.write_text(damaged)
        with pytest.raises(DataError, match=trouble):
            directory.load_network_key()
    path.chmod(0o644)
    with pytest.raises(DataError, match="others may read this key"):
        directory.load_network_key()

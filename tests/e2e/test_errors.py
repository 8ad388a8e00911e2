"""Bad input at the command line: one line that says what, where and what to do; exit code 1; no traceback."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_swarm import run_cli

from peers.base import PeerId
from peers.libp2p_address import peer_id_to_text
from protocol.identity import Identity
from protocol.invite import Invite, format_invite
from swarmnode.data_directory import DataDirectory

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a run that was never started."""
    path = tmp_path_factory.mktemp("made") / "node"
    done = run_cli("init", "--data", str(path))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def node(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    path = tmp_path / "node"
    shutil.copytree(made, path)
    return path


def fails(*arguments: str, saying: str, timeout_s: float = 60.0, **environment: str) -> str:
    """Run the command and check that it fails with one line that contains `saying`."""
    done = run_cli(*arguments, timeout_s=timeout_s, **environment)
    errors = [line for line in done.stderr.strip().splitlines() if line.startswith("swarmnode: ")]
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    assert len(errors) == 1 and done.stderr.strip().splitlines()[-1] == errors[0], done.stderr
    assert saying in errors[0], errors[0]
    return errors[0]


def test_unknown_config_key(node: Path) -> None:
    with (node / "run.toml").open("a") as file:
        file.write("\n[lerner]\nseed = 1\n")
    fails("run", "--data", str(node), saying="run.toml: lerner: unknown key; known here: role, name")


def test_wrong_model_path(tmp_path: Path) -> None:
    fails(
        "init",
        "--data",
        str(tmp_path / "x"),
        "--model",
        str(tmp_path / "absent"),
        saying="run.model: model '",
    )


def test_model_that_is_not_the_runs(node: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(__file__).parents[2] / "swarmnode" / "models" / "tiny", other)
    (other / "config.json").write_text((other / "config.json").read_text().replace("{", '{ "extra": 1,', 1))
    text = (node / "run.toml").read_text()
    (node / "run.toml").write_text(text.replace('role = "learner"', f'role = "learner"\nmodel = "{other}"'))
    fails("run", "--data", str(node), "--api-port", "0", saying="is not the run's model 'tiny'")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


def test_page_port_in_use(node: Path, taken_port: int) -> None:
    fails("run", "--data", str(node), "--api-port", str(taken_port), saying=f"127.0.0.1:{taken_port}")
    fails("demo", "--port", str(taken_port), saying=f"port {taken_port} on 127.0.0.1 is in use")


def test_listening_port_in_use(node: Path, taken_port: int) -> None:
    fails(
        "run",
        "--data",
        str(node),
        "--api-port",
        "0",
        "--listen",
        f"/ip4/127.0.0.1/tcp/{taken_port}",
        saying=f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use",
    )


def test_page_beyond_loopback_needs_a_token(node: Path) -> None:
    fails("run", "--data", str(node), "--api-host", "0.0.0.0", "--api-port", "0", saying="needs a token")


def invite_to_nobody() -> str:
    """An invite whose only seed is a closed port of this machine."""
    nobody = peer_id_to_text(PeerId(Identity.generate().key))
    return format_invite(Invite(run_id=b"r" * 32, seeds=[f"/ip4/127.0.0.1/tcp/9/p2p/{nobody}"]))


def test_unreachable_seed(tmp_path: Path) -> None:
    invite = invite_to_nobody()
    line = fails(
        "join", invite, "--data", str(tmp_path / "n"), "--timeout", "3", saying="/ip4/127.0.0.1/tcp/9"
    )
    assert "refused" in line.lower()
    assert "swarmnode invite" in line


def test_malformed_invite(tmp_path: Path) -> None:
    fails("join", "hello", "--data", str(tmp_path / "n"), saying="an invite starts with 'swarm1-'")
    for text in ("swarm1-AAAAAAAA", "swarm1-" + "A" * 400):
        fails("join", text, "--data", str(tmp_path / "n"), saying="its checksum is wrong")
    fails(
        "join",
        str(tmp_path / "none.txt"),
        "--data",
        str(tmp_path / "n"),
        saying="there is no invite in this file",
    )


def test_key_file_with_wrong_rights(node: Path) -> None:
    (node / "identity.pem").chmod(0o644)
    fails("run", "--data", str(node), saying="others may read this key (mode 0644); run: chmod 600")


def test_key_that_is_no_key(node: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("not a key")
    fails(
        "key",
        "import",
        str(tmp_path / "key.pem"),
        "--data",
        str(node),
        saying="not a private key that can be used; expected Ed25519",
    )


def test_key_travels_through_export_and_import(node: Path, tmp_path: Path) -> None:
    exported = tmp_path / "backup.pem"
    assert run_cli("key", "export", str(exported), "--data", str(node)).returncode == 0
    assert exported.stat().st_mode & 0o777 == 0o600
    assert run_cli("key", "import", str(exported), "--data", str(tmp_path / "moved")).returncode == 0
    assert (tmp_path / "moved" / "identity.pem").read_bytes() == (node / "identity.pem").read_bytes()


def test_no_run_and_no_node_here(tmp_path: Path) -> None:
    fails("run", "--data", str(tmp_path / "n"), saying="make one with 'swarmnode init'")
    fails("status", "--data", str(tmp_path / "n"), saying="no node is running in")
    fails("export", str(tmp_path / "out"), "--data", str(tmp_path / "n"), saying="no run is here")


def test_damaged_run_description_and_ledger(node: Path) -> None:
    intact = (node / "run.spec").read_bytes()
    (node / "run.spec").write_bytes(b"rubbish")
    fails("run", "--data", str(node), "--api-port", "0", saying="run.spec: the run's description is damaged")
    (node / "run.spec").write_bytes(intact)
    (node / "state.sqlite").write_bytes(b"rubbish" * 1000)
    fails("run", "--data", str(node), "--api-port", "0", saying="state.sqlite: cannot open the ledger")


@pytest.mark.slow
def test_corrupt_checkpoint(node: Path) -> None:
    key = DataDirectory(node).load_identity().key
    folder = node / "checkpoints" / key.hex()[:16] / "v3"
    folder.mkdir(parents=True)
    for name in ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"):
        (folder / name).write_bytes(b"rubbish")
    fails("run", "--data", str(node), "--api-port", "0", saying=str(folder.parent), timeout_s=90)


def test_a_role_that_could_do_nothing_in_its_run(node: Path) -> None:
    text = (node / "run.toml").read_text()
    (node / "run.toml").write_text(text.replace('role = "learner"', 'role = "peer"'))
    fails(
        "run", "--data", str(node), "--api-port", "0", saying="does not train in this fleet; join as --role"
    )


def test_a_token_from_the_environment_is_not_written_down(tmp_path: Path) -> None:
    invite = invite_to_nobody()
    token = "a-token-that-nobody-guesses"
    fails(
        "join",
        invite,
        "--data",
        str(tmp_path / "n"),
        "--timeout",
        "1",
        saying="could not reach the run",
        SWARMNODE_API_TOKEN=token,
    )
    assert token not in (tmp_path / "n" / "run.toml").read_text()


def test_presets_and_modes_are_named_in_the_error(tmp_path: Path) -> None:
    fails(
        "init",
        "--preset",
        "herd",
        "--data",
        str(tmp_path / "n"),
        saying="there are two presets, fleet and swarm",
    )
    fails("demo", "--mode", "fast", saying="there are two modes, async and sequential")

"""`key export` and `key import`: a node's identity is a file that its owner can keep and move."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from protocol.identity import Identity, IdentityError
from swarmnode.cli.errors import UserError
from swarmnode.cli.options import DEFAULT_DATA, Data
from swarmnode.data_directory import DataDirectory, atomic_write

app = typer.Typer(no_args_is_help=True)


@app.command("export")
def export_key(
    file: Annotated[Path, typer.Argument(help="Where to write the key (standard PEM, mode 0600).")],
    data: Data = DEFAULT_DATA,
) -> None:
    """Copy this node's private key to a file. Whoever has it is this node."""
    directory = DataDirectory(data)
    identity = directory.load_identity()
    if file.exists():
        raise UserError(f"{file}: exists already; name a new file")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file.absolute().parent}: no such folder; make it first")
    atomic_write(file, identity.to_pem(), mode=0o600)
    typer.echo(f"The key of {identity.name} is in {file}; keep it secret and safe")


@app.command("import")
def import_key(
    file: Annotated[Path, typer.Argument(help="An Ed25519 private key in PEM (PKCS#8).")],
    data: Data = DEFAULT_DATA,
) -> None:
    """Make this key the identity of the data directory; an identity that is there is kept beside it."""
    try:
        identity = Identity.from_pem(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot read it ({error.strerror})") from error
    except IdentityError as error:
        raise UserError(f"{file}: {error}") from error
    directory = DataDirectory(data)
    directory.create()
    directory.lock()
    target = directory.identity_path
    if target.exists():
        kept = target.with_name(f"identity-{directory.load_identity().name}.pem")
        shutil.copy2(target, kept)
        typer.echo(f"The former key is kept as {kept}")
    atomic_write(target, identity.to_pem(), mode=0o600)
    typer.echo(f"This directory is now {identity.name}")

"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path,
    typer.Option("--data", envvar="SWARMNODE_DATA", help="The node's data directory.", show_default=True),
]
DEFAULT_DATA = Path("~/.swarmnode/default")

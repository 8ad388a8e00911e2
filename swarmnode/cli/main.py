"""The `swarmnode` command. Whatever a person can mend ends as one line on stderr and exit code 1, never as
a traceback."""

import sys

import typer
from rich.console import Console

from swarmnode import __version__
from swarmnode.cli import (
    demo,
    inspect_commands,
    keys,
    model_commands,
    plan_commands,
    run_commands,
    simulate_commands,
)
from swarmnode.cli.errors import UserError, as_user_error

app = typer.Typer(
    name="swarmnode",
    help="A node of a swarm that post-trains language models together with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"swarmnode {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("init")(run_commands.init)
app.command("run")(run_commands.run)
app.command("join")(run_commands.join)
app.command("invite")(inspect_commands.invite)
app.command("status")(inspect_commands.status)
app.command("health")(inspect_commands.health)
app.command("config")(inspect_commands.config)
app.command("plan")(plan_commands.plan)
app.command("simulate")(simulate_commands.simulate)
app.command("eval")(model_commands.evaluate)
app.command("export")(model_commands.export)
app.add_typer(keys.app, name="key", help="Back up this node's identity, or bring one.")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        known = as_user_error(error)
        if known is None:
            raise
        _print_error(known)
        sys.exit(1)


def _print_error(error: UserError) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"swarmnode: {error}", markup=False)


if __name__ == "__main__":
    main()

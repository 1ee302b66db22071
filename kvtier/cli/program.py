"""The `kvtier` command: finds the verb, and turns errors into one line and an exit status."""

import sys
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.cli.verbs import Verbs
from kvtier.service import Exit, harmless
from kvtier.tiers import ConfigError, KVTierError, MissingPackages

# Help and mistakes are plain text: rich alone would take twice the CPU time of all else.
app = typer.Typer(
    cls=Verbs,
    name="kvtier",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every verb, too
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {__version__}")
        raise typer.Exit(Exit.OK)


@app.callback()
def kvtier(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A hierarchical KV-cache offload service for LLM inference."""


def main() -> None:
    """Run the command line. What its user can fix is one line on stderr and status 2, another failure status 1."""
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {harmless(str(error))}", file=sys.stderr)
        can_fix = isinstance(error, ConfigError | MissingPackages)
        sys.exit(Exit.USAGE if can_fix else Exit.FAILED)

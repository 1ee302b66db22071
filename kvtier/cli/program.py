"""The `kvtier` command: finds the verb, and turns errors into one line and an exit status."""

import os
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
    """Run the command line. What its user can fix is one line on stderr and status 2, another failure status 1.

    So is output that cannot be written: nothing is said if nobody reads it any more, as behind `| head`.
    """
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {harmless(str(error))}", file=sys.stderr)
        can_fix = isinstance(error, ConfigError | MissingPackages)
        sys.exit(Exit.USAGE if can_fix else Exit.FAILED)
    except OSError:
        if not _output_fails("\n"):
            raise
        sys.exit(Exit.FAILED)
    finally:
        if _output_fails():
            sys.exit(Exit.FAILED)


def _output_fails(more: str = "") -> bool:
    """Whether what was printed cannot be written. Then it goes nowhere, or Python would say so once more at its end.

    Of a large text that could not be written nothing is left to try again: `more` is tried then.
    """
    if sys.stdout is None:  # closed from the beginning on
        return False
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"kvtier: standard output: {error.strerror}; write it to another place", file=sys.stderr)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False

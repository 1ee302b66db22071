"""The `kvtier` command: one file for each family of verbs."""

import sys
from typing import Any, Final

__all__ = ["app", "main"]

_INTERRUPTED: Final = 130  # as shells say it of Ctrl-C, and typer of a verb that it ends


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while it is loaded."""
    try:
        from kvtier.cli.program import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    run()


def __getattr__(name: str) -> Any:
    """`app`, typer's commands, imported at its first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.cli.program import app

    return app

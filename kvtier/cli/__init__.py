"""The `kvtier` command: one file for each family of verbs."""

import os
import sys
from typing import Any, Final

__all__ = ["app", "main"]

_INTERRUPTED: Final = 130  # as shells say it of Ctrl-C, and typer of a verb that it ends


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while it is loaded.

    torch's threads (OpenMP's) sleep while they wait, unless the environment says otherwise: threads that spin take the
    cores from what they wait for, if other processes want them, too.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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

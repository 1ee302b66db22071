"""What the verbs of the command line share: exit statuses and options."""

from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer


class Exit(IntEnum):
    """The exit statuses of every verb."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
]

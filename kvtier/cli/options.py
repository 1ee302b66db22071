"""The options that several verbs have, and what verbs print: JSON, a table, a progress bar.

Files of verbs import what does a verb's work when the verb is called, and rich when there is something to print: their
help is theirs alone, and cheap.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.tiers import ConfigError
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, ProgressColumn

    from kvtier.service.charts import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PngOption = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it as a picture, too.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one page with all of it, too.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
]
HttpOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where it answers; instead of the configured address.")
]
ExactOption = Annotated[bool, typer.Option("--exact", help="The same bits however a prompt was had; half as fast.")]


def given(**options: object) -> dict[str, object]:
    """Those of the options that were given: they override the configuration."""
    return {name: value for name, value in options.items() if value is not None}


def size_given(option: str, text: str) -> int:
    """Bytes of a size as a verb's option has it. ConfigError names the option."""
    try:
        return configuration.parse_size(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option} {text!r:.40}: {error}") from None


def show(value: object, table: "RenderableType", *, as_json: bool) -> None:
    """Print what a verb found, for programs or for people."""
    if as_json:
        print(json.dumps(value))
    else:
        from rich.console import Console

        Console().print(table)


def table_of(table: "Table") -> "RenderableType":
    """What was measured, for a terminal: the first column says what, the others are figures."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    made = RichTable(
        title=escape(table.title), title_justify="left", caption=escape(table.note) or None, caption_justify="left"
    )
    for index, column in enumerate(table.columns):
        made.add_column(escape(column), justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*map(escape, row))
    return made


def progress_bar(*columns: "ProgressColumn") -> "Progress":
    """A bar on stderr while something runs; none if that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

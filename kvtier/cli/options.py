"""The options that several verbs have, and what verbs print: JSON, a table, a progress bar.

Files of verbs import what does a verb's work when the verb is called, and rich when there is something to print: their
help is theirs alone, and cheap.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.service import harmless
from kvtier.tiers import ConfigError, require_extra
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, ProgressColumn

    from kvtier.service import Table


def writable_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The file that a verb draws to, tried before its work begins. ConfigError if it cannot be written."""
    if path is None:
        return None
    name = option.opts[0]
    require_extra(name, "charts")
    is_new = not os.path.lexists(path)
    try:
        # What is there stays; a pipe that nobody reads is refused, not waited for.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{name} {str(path)!r}: {error.strerror}; name a file that can be written") from None
    return path


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PngOption = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", callback=writable_file, help="Draw it as a picture, too.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", callback=writable_file, help="Write one page with all of it, too."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
]
HttpOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where it answers; instead of the configured address.")
]
ExactOption = Annotated[bool, typer.Option("--exact", help="The same bits however a prompt was had; half as fast.")]


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
PRICES: Final = (1e-9, 1e12)  # of an hour
DEADLINES: Final = (0.1, 86400.0)  # seconds


def given(**options: object) -> dict[str, object]:
    """Those of the options that were given: they override the configuration."""
    return {name: value for name, value in options.items() if value is not None}


def size_given(option: str, text: str) -> int:
    """Bytes of a size as a verb's option has it. ConfigError names the option."""
    return _size(option, text, configuration.parse_size)


def room_given(option: str, text: str) -> int:
    """The same of room for blocks: less than any block takes is refused, as a size whose unit was left out."""
    return _size(option, text, configuration.parse_room)


def _size(option: str, text: str, parsed: Callable[[object], int]) -> int:
    try:
        return parsed(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option} {text!r:.40}: {error}") from None


def check_figure(option: str, value: float | None, least: float, most: float) -> None:
    """ConfigError if an option's figure was given and is outside its range, or no number."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{option} {value:g}: use a number from {least:g} to {most:g}")


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

    def text(given: str) -> str:
        return escape(harmless(given))

    made = RichTable(
        title=text(table.title), title_justify="left", caption=text(table.note) or None, caption_justify="left"
    )
    for index, column in enumerate(table.columns):
        made.add_column(text(column), justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*map(text, row))
    return made


def progress_bar(*columns: "ProgressColumn") -> "Progress":
    """A bar on stderr while something runs; none if that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def on_signal(stop: Callable[[], None], *, once: bool = False) -> None:
    """Call `stop` at SIGTERM and at Ctrl-C. `once`: whoever insists ends the process at once."""

    def handle(*_: object) -> None:
        if once:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        stop()

    for number in _SIGNALS:
        signal.signal(number, handle)

"""Options that several verbs share, and the output of verbs: JSON, a table, a progress bar.

A verb's module imports the modules that do its work when the verb is called, and rich when it prints. So its help
needs nothing else, and is fast.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from kvtier.service import harmless, shown
from kvtier.tiers import ConfigError, require_extra

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

    from kvtier.service import Table


_DEFAULT: Final = 80  # columns that rich takes for a pipe or file, in which tables fold
_WIDE: Final = 240  # … and what they take

V = TypeVar("V")


def writable_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The file that a verb draws to, opened before its work begins. ConfigError if it cannot be written."""
    if path is None:
        return None
    name = option.opts[0]
    require_extra(name, "charts")
    is_new = not os.path.lexists(path)
    try:
        # The file keeps its content; a pipe without a reader is refused, not waited for.
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
ExactOption = Annotated[bool, typer.Option("--exact", help="The same bits, computed or loaded; half as fast.")]


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
PRICES: Final = (1e-9, 1e12)  # of an hour
DEADLINES: Final = (0.1, 86400.0)  # seconds


def given(**options: object) -> dict[str, object]:
    """The options that were given: they override the configuration."""
    return {name: value for name, value in options.items() if value is not None}


def parsed(option: str, text: str, parse: Callable[[object], V]) -> V:
    """An option's text, parsed as a size or a time. ConfigError names the option."""
    try:
        return parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option} {shown(text)}: {error}") from None


def check_figure(option: str, value: float | None, least: float, most: float) -> None:
    """ConfigError if an option's figure is outside its range, or not a number."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{option} {value:g}: use a number from {least:g} to {most:g}")


def show(value: object, table: "RenderableType", *, as_json: bool) -> None:
    """Print a verb's result, for programs or for people."""
    if as_json:
        print(json.dumps(value))
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal and console.width == _DEFAULT:
            console.width = _WIDE
        console.print(table)


def table_of(table: "Table") -> "RenderableType":
    """A table of measurements for a terminal: the first column is the label, the others are figures."""
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


def progress_bar(*, in_bytes: bool = False) -> "Progress":
    """A bar on stderr while something runs; none if stderr is no terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    counts = (
        [progress.DownloadColumn(), progress.TransferSpeedColumn()] if in_bytes else [progress.MofNCompleteColumn()]
    )
    columns = ("{task.description}", progress.BarColumn(), *counts, progress.TimeRemainingColumn())
    return progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def begin(bar: "Progress", name: str, total: int | None = None) -> Callable[[int, int], None]:
    """Show one more thing that is under way. Returns what tells how much of how much is done."""
    task = bar.add_task(name, total=total)
    return lambda done, total: bar.update(task, completed=done, total=total)


def on_signal(stop: Callable[[], None], *, once: bool = False) -> None:
    """Call `stop` at SIGTERM and at Ctrl-C. `once`: a second signal ends the process at once."""

    def handle(*_: object) -> None:
        if once:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        stop()

    for number in _SIGNALS:
        signal.signal(number, handle)


def on_reload(reload: Callable[[], object]) -> None:
    """Call `reload` on a thread of its own after each SIGHUP, and after one that came while the signal was blocked."""
    raised = os.eventfd(0, os.EFD_CLOEXEC)  # signals in a row are one

    def serve() -> None:
        while True:
            os.eventfd_read(raised)
            reload()

    threading.Thread(target=serve, name="kvtier-reload", daemon=True).start()
    signal.signal(signal.SIGHUP, lambda *_: os.eventfd_write(raised, 1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

"""Draws charts of lines with matplotlib, as a PNG or inside one self-contained HTML page beside tables."""

import html
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.tiers import KVTierError, require_extra

_INCHES: Final = (8.0, 4.5)  # of one chart
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}p{white-space:pre-line}"
)


class Line(NamedTuple):
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_dashed: bool = False  # what others are held against


class Chart(NamedTuple):
    title: str
    x_label: str  # with its unit
    y_label: str  # with its unit
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def draw(title: str, tables: Sequence[Table], charts: Sequence[Chart], png: Path | None, html: Path | None) -> None:
    if png is not None:
        save_png(png, charts)
    if html is not None:
        html_page(html, title, tables, charts)


def save_png(path: Path, charts: Sequence[Chart]) -> None:
    """All charts below each other as one picture. KVTierError without matplotlib, or if the file cannot be written."""
    _write(path, _drawn(charts, "png"))


def html_page(path: Path, title: str, tables: Sequence[Table], charts: Sequence[Chart]) -> None:
    """One page with everything in it: no script, nothing from elsewhere. Errors as `save_png`."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>")
    parts += map(_table, tables)
    for chart in charts:
        picture = _drawn([chart], "svg").decode()
        parts.append(f"<h2>{html.escape(chart.title)}</h2>{picture[picture.index('<svg') :]}")
    _write(path, "\n".join(parts).encode())


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"<h2>{html.escape(table.title)}</h2><table>{row(table.columns, 'th')}{rows}</table>{note}"


def _drawn(charts: Sequence[Chart], form: str) -> bytes:
    require_extra("drawing", "charts")
    from matplotlib.figure import Figure

    figure: Figure = Figure((_INCHES[0], _INCHES[1] * max(1, len(charts))), layout="constrained")
    panes = figure.subplots(max(1, len(charts)), 1, squeeze=False)[:, 0]
    for pane, chart in zip(panes, charts, strict=False):
        for line in chart.lines:
            pane.plot(line.xs, line.ys, "--" if line.is_dashed else ".-", label=line.label)
        pane.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.log_x:
            pane.set_xscale("log")
        if chart.log_y:
            pane.set_yscale("log")
        if chart.lines:
            pane.legend()
        pane.grid(visible=True, alpha=0.3)
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Creating legend")  # said where the machine is busy; it is done then
        figure.savefig(written, format=form, dpi=120)
    return written.getvalue()


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise KVTierError(f"{path}: {error.strerror}; choose another file") from None

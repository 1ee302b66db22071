"""The drawing of docs/architecture.md: where a block lies and what moves it. `block_way.py --save` runs it."""

from pathlib import Path
from typing import Final, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

_INK: Final = "#1f2933"
_STORE: Final = "#b4530a"
_LOAD: Final = "#1a6fb0"


class Place(NamedTuple):
    title: str
    text: str
    x: float
    y: float
    colour: str


_WIDTH: Final = 2.6
_HEIGHT: Final = 1.1
_PLACES: Final = (
    Place("engine", "llm.py  scheduler.py\nmodel_runner.py", 0.2, 5.2, "#e8edf2"),
    Place("connector", "scheduler.py  plan.py\nworker.py", 4.2, 5.2, "#e8edf2"),
    Place("hierarchy", "hierarchy.py  stores.py\npromotion.py  demote.py", 8.2, 5.2, "#e8edf2"),
    Place("L1  device memory", "copies/device.py", 0.2, 0.6, "#fdf1e3"),
    Place("L2  host memory", "pool/pool.py\nhost/host.py", 4.2, 0.6, "#fdf1e3"),
    Place("L3  file or Redis", "file/store.py\nredis/store.py", 8.2, 0.6, "#fdf1e3"),
)
_MOVES: Final = (  # start, end, text and its place
    ((2.8, 5.95), (4.2, 5.95), "lookup", (3.5, 6.1), _INK),
    ((6.8, 5.95), (8.2, 5.95), "submit  poll  lease", (7.5, 6.1), _LOAD),
    ((6.8, 5.55), (8.2, 5.55), "reserve  seal", (7.5, 5.2), _STORE),
    ((1.5, 5.2), (1.5, 1.7), "1  computed", (1.6, 3.5), _STORE),
    ((2.8, 1.4), (4.2, 1.4), "2  copied", (3.5, 1.55), _STORE),
    ((6.8, 1.4), (8.2, 1.4), "4  written", (7.5, 1.55), _STORE),
    ((8.2, 0.9), (6.8, 0.9), "5  read, verified", (7.5, 0.45), _LOAD),
    ((4.2, 0.9), (2.8, 0.9), "6  loaded", (3.5, 0.45), _LOAD),
    ((8.9, 5.2), (6.0, 1.7), "3  sealed:\nchecksum, name", (7.75, 3.3), _STORE),
    ((5.0, 5.2), (5.0, 1.7), "worker: copies\non its own stream", (5.1, 3.5), _INK),
)


def draw(path: Path) -> None:
    """Write the SVG. The same drawing every time: no date, no random ids."""
    matplotlib.rcParams.update({"svg.hashsalt": "kvtier", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = pyplot.subplots(figsize=(11, 6.6))
    axes.set(xlim=(0, 11), ylim=(0, 6.8))
    axes.axis("off")
    for title, text, x, y, fill in _PLACES:
        style = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y), _WIDTH, _HEIGHT, boxstyle=style, fc=fill, ec=_INK, lw=1.2))
        middle = {"x": x + _WIDTH / 2, "ha": "center", "va": "center", "color": _INK}
        axes.text(y=y + 0.82, s=title, fontsize=11, weight="bold", **middle)
        axes.text(y=y + 0.36, s=text, fontsize=9, **middle)
    for start, end, text, at, colour in _MOVES:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0})
        side = "left" if "\n" in text or text.startswith("1") else "center"
        axes.text(*at, text, ha=side, va="bottom", fontsize=9.5, color=colour)
    axes.text(0.2, 2.5, "store", color=_STORE, fontsize=10, weight="bold")
    axes.text(0.2, 2.15, "load", color=_LOAD, fontsize=10, weight="bold")
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)

"""Loading against computing a prompt, by length and tier; and charts and tables as a PNG or an HTML page."""

import html
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvtier.tiers import ConfigError, KVTierError, require_extra

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
    is_dashed: bool = False  # the line that others are compared with


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
    """All charts below each other in one picture. KVTierError without matplotlib, or if the file cannot be written."""
    _write(path, _drawn(charts, "png"))


def html_page(path: Path, title: str, tables: Sequence[Table], charts: Sequence[Chart]) -> None:
    """One page that contains everything: no script, no external files. Errors as `save_png`."""
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
        warnings.filterwarnings("ignore", message="Creating legend")  # warns if the machine is slow
        figure.savefig(written, format=form, dpi=120)
    return written.getvalue()


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise KVTierError(f"{path}: {error.strerror}; choose another file") from None


# --- loading against computing ---------------------------------------------------------------------------------------

FORM: Final = 1  # of the JSON: `kvtier_worth`
_PROMPTS: Final = 1000  # that prices are given for
_HOUR: Final = 3600.0  # seconds
_MOST_PRICE: Final = 1e12
_MOST: Final = 1e15  # of any figure


@dataclass(frozen=True, slots=True)
class Breakeven:
    """Seconds to the first token by length: computed, and with the prompt's KV in a tier."""

    model: str
    device: str
    bytes_per_token: float  # of KV
    compute: Mapping[int, float]
    by_tier: Mapping[str, Mapping[int, float]]
    gpu_hour: float | None = None  # price of an hour of that machine

    def __post_init__(self) -> None:
        if self.gpu_hour is not None and not 0 < self.gpu_hour < _MOST_PRICE:
            raise ConfigError(f"--gpu-hour {self.gpu_hour:g}: use a price above 0 and below {_MOST_PRICE:g}")

    def wins_from(self, tier: str) -> int | None:
        """The fewest tokens from which loading is faster (linear between lengths); None: never."""
        loaded = self.by_tier[tier]
        lengths = sorted(loaded)
        gains = [self.compute[length] - loaded[length] for length in lengths]
        if not lengths or gains[-1] <= 0:
            return None
        for at in range(len(lengths) - 1, 0, -1):
            if gains[at - 1] <= 0:
                share = -gains[at - 1] / (gains[at] - gains[at - 1])
                return round(lengths[at - 1] + share * (lengths[at] - lengths[at - 1]))
        return lengths[0]

    @property
    def json(self) -> dict[str, Any]:
        longest = max(self.compute)
        rates = {
            tier: max(length * self.bytes_per_token / seconds for length, seconds in times.items())
            for tier, times in self.by_tier.items()
            if times
        }
        return {
            "kvtier_worth": FORM,
            "model": self.model,
            "device": self.device,
            "bytes_per_token": self.bytes_per_token,
            "gpu_hour": self.gpu_hour,
            "prefill_tokens_per_second": longest / self.compute[longest],
            # rates of whole loads, with the first token's compute; `kvtier simulate --from` reads these names
            **{f"{tier}_bytes_per_second": rate for tier, rate in rates.items()},
            "wins_from_tokens": {tier: self.wins_from(tier) for tier in self.by_tier},
            "times": [
                {"tokens": length, "compute": seconds}
                | {tier: times[length] for tier, times in self.by_tier.items() if length in times}
                for length, seconds in self.compute.items()
            ],
        }

    @property
    def table(self) -> Table:
        columns = ["tokens", "computed, ms"]
        for tier in self.by_tier:
            columns += [f"{tier}, ms", f"saved, {'price of 1,000 prompts' if self.gpu_hour else 'ms'}"]
        rows = [self._row(length) for length in sorted(self.compute)]
        return Table(f"kvtier worth: {self.model} on {self.device}", columns, rows, self.verdict)

    @property
    def verdict(self) -> str:
        parts = []
        for tier, times in self.by_tier.items():
            what = "it did not have the prompts; give it more room"
            if times:
                least = self.wins_from(tier)
                what = f"computing is faster up to {max(times)} tokens"
                what = what if least is None else f"loading wins from {least} tokens on"
            parts.append(f"{tier}: {what}")
        return "; ".join(parts)

    @property
    def charts(self) -> list[Chart]:
        lines = [Line("computed", *_points(self.compute), is_dashed=True)]
        lines += [Line(f"from {tier}", *_points(times)) for tier, times in self.by_tier.items() if times]
        return [Chart("To the first token", "tokens of the prompt", "ms", lines, log_x=True, log_y=True)]

    def _row(self, length: int) -> Sequence[str]:
        cells = [str(length), f"{self.compute[length] * 1000:.1f}"]
        for tier in self.by_tier:
            seconds = self.by_tier[tier].get(length)
            if seconds is None:
                cells += ["–", "–"]
                continue
            saved = self.compute[length] - seconds
            price = None if self.gpu_hour is None else saved / _HOUR * self.gpu_hour * _PROMPTS
            cells += [f"{seconds * 1000:.1f}", f"{saved * 1000:.1f}" if price is None else f"{price:.4f}"]
        return cells


def measured_by(path: Path) -> dict[str, Any]:
    """The output of `kvtier worth --json`, not checked any further. ConfigError if the file is not its output."""
    try:
        measured: Any = json.loads(path.read_text())
    except OSError as error:
        raise _not_ours(path, f"{error.strerror}") from None
    except (ValueError, RecursionError):
        raise _not_ours(path, "not JSON") from None
    if not isinstance(measured, dict) or measured.get("kvtier_worth") != FORM:
        raise _not_ours(path, f'no "kvtier_worth": {FORM} there')
    return measured


_Positive = Annotated[float, Meta(gt=0, lt=_MOST)]


class _Measured(Struct):
    model: str
    device: str
    bytes_per_token: _Positive
    times: Annotated[list[dict[str, _Positive]], Meta(min_length=1)]  # each: tokens, and seconds by tier
    wins_from_tokens: dict[str, Any]  # by tier
    gpu_hour: _Positive | None = None


def breakeven_from(path: Path, gpu_hour: float | None) -> Breakeven:
    """What `kvtier worth --json` measured, at this price or its own. ConfigError if the file is not its output."""
    try:
        found = msgspec.convert(measured_by(path), _Measured)
        times = {int(each["tokens"]): each for each in found.times}
        compute = {length: each["compute"] for length, each in times.items()}
    except msgspec.ValidationError as error:
        raise _not_ours(path, str(error)) from None
    except KeyError as error:
        raise _not_ours(path, f"{error.args[0]}: missing") from None
    by_tier = {
        tier: {length: each[tier] for length, each in times.items() if tier in each} for tier in found.wins_from_tokens
    }
    price = found.gpu_hour if gpu_hour is None else gpu_hour
    return Breakeven(found.model, found.device, found.bytes_per_token, compute, by_tier, price)


def _points(times: Mapping[int, float]) -> tuple[list[float], list[float]]:
    lengths = sorted(times)
    return [float(length) for length in lengths], [times[length] * 1000 for length in lengths]


def _not_ours(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--from {path}: {why}; name what kvtier worth --json printed")

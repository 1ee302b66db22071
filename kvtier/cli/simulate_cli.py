"""The verb `kvtier simulate`: what memory and disk of other sizes would have found of a trace."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier.cli.options import (
    PRICES,
    HtmlOption,
    JsonOption,
    PngOption,
    check_figure,
    progress_bar,
    room_given,
    show,
    size_given,
    table_of,
)
from kvtier.service import simulation, traces
from kvtier.service.charts import html_page, save_png
from kvtier.tiers import ConfigError
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from kvtier.service.simulation import Capacity, SimulatedRun
    from kvtier.service.traces import RequestTrace

app = typer.Typer()

_POLICIES: Final = ("tail", "lru", "s3fifo")
_SWEEP: Final = (64, 16, 8, 4, 2, 1)  # memory as a part of all blocks of the trace, where none is given
_NONE: Final = "none"

SizesOption = Annotated[
    str | None, typer.Option(metavar="SIZES", help='As in "64GiB,256GiB"; else a part of the trace.')
]


@app.command()
def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Mooncake's JSON lines, kvtier trace, or LMCache's lookup logs.")
    ],
    memory: SizesOption = None,
    disk: Annotated[str, typer.Option(metavar="SIZES", help="Of the slab; none for no slab.")] = _NONE,
    redis: Annotated[str, typer.Option(metavar="SIZE", help="What Redis has room for; none for no Redis.")] = _NONE,
    redis_ttl: Annotated[str, typer.Option(metavar="TIME", help="How long Redis keeps a block nobody reads.")] = "24h",
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Of tail, lru and s3fifo.")] = "tail,lru",
    admit_after: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Sightings of a block before it is stored.")
    ] = 1,
    block_size: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Tokens of a block, if the trace tells none.")
    ] = None,
    token_bytes: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, max=1 << 30, help="KV of a token; the default is a Llama 3.1 8B's.")
    ] = 131072,
    limit: Annotated[int | None, typer.Option(metavar="NUMBER", min=1, help="Read so many requests.")] = None,
    prefill: Annotated[float, typer.Option(metavar="NUMBER", help="Tokens computed a second.")] = 10_000.0,
    l2_bandwidth: Annotated[str, typer.Option(metavar="SIZE", help="Loaded a second.")] = "20GB",
    file_bandwidth: Annotated[str, typer.Option(metavar="SIZE", help="Loaded a second.")] = "3GB",
    redis_bandwidth: Annotated[str, typer.Option(metavar="SIZE", help="Loaded a second.")] = "1GB",
    measured: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Rates that kvtier worth --json measured.")
    ] = None,
    gpu_hour: Annotated[float | None, typer.Option(metavar="PRICE", help="Of an hour of the GPU.")] = None,
    processes: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Side by side; 0 for one a core.")] = 0,
    as_json: JsonOption = False,
    png: PngOption = None,
    html: HtmlOption = None,
) -> None:
    check_figure("--prefill", prefill, 1e-3, 1e18)
    check_figure("--gpu-hour", gpu_hour, *PRICES)
    sizes = {
        "--memory": _sizes("--memory", memory),
        "--disk": _sizes("--disk", disk),
        "--redis": _sizes("--redis", redis),
    }
    bandwidths = [
        size_given(name, text)
        for name, text in (
            ("--l2-bandwidth", l2_bandwidth),
            ("--file-bandwidth", file_bandwidth),
            ("--redis-bandwidth", redis_bandwidth),
        )
    ]
    rates = simulation.LoadRates(prefill, *map(float, bandwidths))
    if measured is not None:
        rates = simulation.rates_from(measured, rates)
    ttl = _duration("--redis-ttl", redis_ttl)
    names = _policies(policy)
    requests = _load(trace, block_size, limit)
    block_bytes = token_bytes * requests.block_size
    swept = dict.fromkeys(max(1, requests.num_names // part) * block_bytes for part in _SWEEP)
    memories = sizes["--memory"] or [*swept]
    if min(memories) < block_bytes:
        raise ConfigError(f"--memory {min(memories)}: a block has {block_bytes} bytes; give room for one")
    each = product(sizes["--disk"] or [0], sizes["--redis"] or [0], memories, names)
    capacities = [simulation.Capacity(l2, slab, shared, ttl, name, admit_after) for slab, shared, l2, name in each]
    runs = _run(requests, block_bytes, capacities, processes)
    optimum = simulation.optimum_of(requests)
    values = [simulation.value_of(run, requests, optimum, block_bytes, rates, gpu_hour) for run in runs]
    assumed = [*requests.assumed, *_assumed(rates, token_bytes, measured)]
    told: dict[str, Any] = {
        "kvtier_simulate": 1,
        "trace": str(trace),
        "requests": len(requests),
        "block_size": requests.block_size,
        "token_bytes": token_bytes,
        "admit_after": admit_after,
        "prompt_tokens": int(requests.num_tokens.sum()),
        "prompt_blocks": int(requests.num_prompt.sum()),
        "different_blocks": requests.num_names,
        "rates": asdict(rates),
        "assumed": assumed,
        "rows": [asdict(value) for value in values],
    }
    table = simulation.table_of_runs(values, requests, assumed)
    show(told, table_of(table), as_json=as_json)
    charts = simulation.charts_of_runs(values) if png or html else []
    if png is not None:
        save_png(png, charts)
    if html is not None:
        html_page(html, f"kvtier simulate {trace.name}", [table], charts)


def _assumed(rates: "simulation.LoadRates", token_bytes: int, measured: Path | None) -> list[str]:
    """What the figures rest on beside the trace."""
    size = configuration.show_size
    loads = f"{size(rates.l2, 1000)}/s from L2, {size(rates.file, 1000)}/s from file, {size(rates.redis, 1000)}/s"
    return [
        f"rates: {rates.prefill:,.0f} tokens/s of prefill, {loads} from Redis"
        + ("" if measured is None else f", as {measured} says"),
        f"token_bytes: {token_bytes:,} bytes of KV a token",
        "requests: each is over as soon as it has come, every store succeeds, and one node has them all",
    ]


def _load(path: Path, block_size: int | None, limit: int | None) -> "RequestTrace":
    from rich.progress import BarColumn, DownloadColumn, TextColumn

    with progress_bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn()) as bar:
        task = bar.add_task(f"reading {path.name}", total=None)
        return traces.load_trace(
            path,
            block_size=block_size,
            limit=limit,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _run(
    requests: "RequestTrace", block_bytes: int, capacities: "Sequence[Capacity]", processes: int
) -> "list[SimulatedRun]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("simulating", total=len(capacities))
        replay = simulation.TraceReplay(requests, block_bytes)
        return simulation.sweep(
            replay, capacities, lambda done, total: bar.update(task, completed=done, total=total), processes
        )


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _POLICIES:
            raise ConfigError(f"--policy {name!r:.40}: use {', '.join(_POLICIES)}, or several separated by commas")
    return list(dict.fromkeys(names))


def _sizes(option: str, text: str | None) -> list[int]:
    """Sizes separated by commas, each once; none of them is no size."""
    given = [] if text is None or text == _NONE else text.split(",")
    return [*dict.fromkeys(room_given(option, part) for part in given)]


def _duration(option: str, text: str) -> float:
    try:
        return configuration.parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r:.40}: {error}") from None

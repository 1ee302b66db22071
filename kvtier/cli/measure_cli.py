"""The verbs that measure: `kvtier size`, `worth`, `bench` and `simulate`, as a table, JSON, a picture or a page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from kvtier.cli.options import (
    DEADLINES,
    PRICES,
    ConfigOption,
    HtmlOption,
    JsonOption,
    PngOption,
    begin,
    check_figure,
    parsed,
    progress_bar,
    show,
    table_of,
)
from kvtier.connector import transformers as checkpoints
from kvtier.service import Exit, draw, simulation, traces
from kvtier.tiers import ConfigError, host, require_extra
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from kvtier.service import Breakeven
    from kvtier.service.simulation import Capacity, SimulatedRun
    from kvtier.service.traces import RequestTrace


# --- kvtier size -----------------------------------------------------------------------------------------------------

app = typer.Typer()

_DEFAULT = "1GiB"  # of each tier, if no room is given

RoomOption = Annotated[str | None, typer.Option(metavar="SIZE", help='As in "64GiB".')]


@app.command()
def size(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's directory, or its config.json.")],
    memory: RoomOption = None,
    disk: RoomOption = None,
    redis: RoomOption = None,
    conversation: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Tokens of one.")] = 8192,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, max=1 << 20, help="Tokens of a block; else [cache] block_size's default."
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="GPUs that divide the model.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the KV: auto is the model's own; or fp8.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    given = {"l2": ("--memory", memory), "file": ("--disk", disk), "redis": ("--redis", redis)}
    rooms = {
        tier: parsed(option, text, configuration.parse_room)
        for tier, (option, text) in given.items()
        if text is not None
    }
    rooms = rooms or dict.fromkeys(given, parsed("", _DEFAULT, configuration.parse_room))
    checkpoints.read_config(model)  # report a wrong file at once: torch takes seconds to import
    require_extra("kvtier size", "transformers")
    from kvtier.service import sizing_of

    found = sizing_of(
        model,
        rooms,
        block_size=block_tokens or configuration.CacheConfig().block_size,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        conversation=conversation,
    )
    show(found.json, table_of(found.table), as_json=as_json)
    if memory is not None and rooms["l2"] > (here := host.limits()).most:
        typer.echo(f"kvtier: --memory {memory}: {here.by} has {configuration.show_size(here.most)}", err=True)


# --- kvtier worth ----------------------------------------------------------------------------------------------------

TokensOption = Annotated[list[int], typer.Option(metavar="NUMBER", help="Length of a prompt; may be repeated.")]


@app.command("worth")
def run_worth(
    model: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A checkpoint, or a config.json: random weights.")
    ] = None,
    tokens: TokensOption = [256, 1024, 4096],  # noqa: B006
    gpu_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price of an hour of this machine: saved money, too.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="torch's name of one; auto is a GPU where there is one.")
    ] = "auto",
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds for a prompt, and for its way to the tiers.")
    ] = 60,
    measured: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show what kvtier worth --json measured before.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    png: PngOption = None,
    html: HtmlOption = None,
) -> None:
    if (model is None) == (measured is None):
        raise ConfigError("DIR: name a checkpoint to measure, or --from FILE to show what was measured, one of them")
    check_figure("--gpu-hour", gpu_hour, *PRICES)
    check_figure("--deadline", deadline, *DEADLINES)
    if min(tokens) < 1:
        raise ConfigError(f"--tokens {min(tokens)}: use a whole number from 1 on")
    from kvtier.service import breakeven_from

    if measured is not None:
        found = breakeven_from(measured, gpu_hour)
    else:
        assert model is not None
        found = _measure(model, configuration.Config.load(config), tokens, device, deadline, gpu_hour)
    show(found.json, table_of(found.table), as_json=as_json)
    draw("kvtier worth", [found.table], found.charts if png or html else (), png, html)


def _measure(
    model: Path, config: "configuration.Config", tokens: list[int], device: str, deadline: float, gpu_hour: float | None
) -> "Breakeven":
    with progress_bar() as bar:
        task = bar.add_task("loading torch", total=None)
        require_extra("kvtier worth", "engine")
        from kvtier.engine import REPEATS, measure_prompts
        from kvtier.service import Breakeven

        bar.update(task, total=1 + REPEATS * len(set(tokens)), completed=-1)
        steps = measure_prompts(
            model,
            config,
            tokens,
            lambda what: bar.update(task, advance=1, description=what),
            device=device,
            deadline=deadline,
        )
    tiers = dict.fromkeys(["l2", *(tier for each in steps.times for tier in each.by_tier)])
    by_tier = {
        tier: {each.num_tokens: each.by_tier[tier] for each in steps.times if tier in each.by_tier} for tier in tiers
    }
    compute = {each.num_tokens: each.compute for each in steps.times}
    return Breakeven(steps.name, steps.device, steps.bytes_per_token, compute, by_tier, gpu_hour)


# --- kvtier bench ----------------------------------------------------------------------------------------------------


@app.command("bench")
def run_bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI server, as in http://127.0.0.1:8000")],
    compare: Annotated[str | None, typer.Option(metavar="URL", help="Another server, for the same requests.")] = None,
    pattern: Annotated[
        Literal["shared", "turns", "rag", "agents"],
        typer.Option(metavar="shared|turns|rag|agents", help="What prompts have in common."),
    ] = "shared",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Send this trace's requests instead.")] = None,
    speed: Annotated[float, typer.Option(metavar="NUMBER", help="How fast: 2 is twice as fast as the trace.")] = 1.0,
    requests: Annotated[int, typer.Option(metavar="NUMBER", help="So many in all, of each server.")] = 64,
    concurrency: Annotated[int, typer.Option(metavar="NUMBER", help="Sessions at once.")] = 4,
    rate: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Sessions a second instead, at random times (Poisson).")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(metavar="NUMBER", help="Of a session's first prompt, in short words.")
    ] = 512,
    turn_tokens: Annotated[int, typer.Option(metavar="NUMBER", help="That each further turn adds.")] = 64,
    answer_tokens: Annotated[int, typer.Option(metavar="NUMBER", help="Of each answer, at most.")] = 32,
    turns: Annotated[int, typer.Option(metavar="NUMBER", help="Of a session, with the patterns turns and agents.")] = 4,
    api: Annotated[
        Literal["chat", "completions"], typer.Option(metavar="chat|completions", help="Which of the two APIs is used.")
    ] = "chat",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; else the first that the server has.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar="KVTIER_ROUTER__TOKEN", help="The API key.")
    ] = None,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds for each request.")] = 120.0,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of all generated texts.")] = 0,
    as_json: JsonOption = False,
    png: PngOption = None,
    html: HtmlOption = None,
) -> None:
    check_figure("--deadline", deadline, *DEADLINES)
    check_figure("--rate", rate, 1e-6, 1e6)
    check_figure("--speed", speed, 1e-6, 1e6)
    from kvtier.service.bench import BenchOptions, LoadPace, Shape, run_bench

    urls = (url,) if compare is None else (url, compare)
    shape = Shape(pattern, requests, prompt_tokens, turn_tokens, answer_tokens, turns, seed)
    options = BenchOptions(urls, shape, LoadPace(concurrency, rate), api, model, token, deadline, trace, speed)
    with progress_bar() as bar:

        def begins(total: int) -> Callable[[], None]:
            task = bar.add_task("", total=total)
            return lambda: bar.advance(task)

        outcome = run_bench(options, begins)
    show(outcome.json, table_of(outcome.table), as_json=as_json)
    draw("kvtier bench", [outcome.table], outcome.charts if png or html else (), png, html)
    failed = all(0 < each.requests == sum(each.errors.values()) for each in outcome.figures)
    raise typer.Exit(Exit.FAILED if failed else Exit.OK if outcome.measured.is_whole else Exit.DEGRADED)


# --- kvtier simulate -------------------------------------------------------------------------------------------------

_POLICIES: Final = ("predicted", "lru", "s3fifo")
_SWEEP: Final = (64, 16, 8, 4, 2, 1)  # memory as a part of all blocks of the trace, if none is given
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
    redis_ttl: Annotated[str, typer.Option(metavar="TIME", help="How long Redis keeps an unread block.")] = "24h",
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Of predicted, lru and s3fifo.")] = "predicted,lru",
    admit_after: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Sightings of a block before it is stored.")
    ] = 1,
    block_size: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Tokens of a block, if the trace has none.")
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
        parsed(name, text, configuration.parse_size)
        for name, text in (
            ("--l2-bandwidth", l2_bandwidth),
            ("--file-bandwidth", file_bandwidth),
            ("--redis-bandwidth", redis_bandwidth),
        )
    ]
    rates = simulation.LoadRates(prefill, *map(float, bandwidths))
    if measured is not None:
        rates = simulation.rates_from(measured, rates)
    ttl = parsed("--redis-ttl", redis_ttl, configuration.parse_duration)
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
    options_used: dict[str, Any] = {
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
    show(options_used, table_of(table), as_json=as_json)
    charts = simulation.charts_of_runs(values) if png or html else ()
    draw(f"kvtier simulate {trace.name}", [table], charts, png, html)


def _assumed(rates: "simulation.LoadRates", token_bytes: int, measured: Path | None) -> list[str]:
    size = configuration.show_size
    loads = f"{size(rates.l2, 1000)}/s from L2, {size(rates.file, 1000)}/s from file, {size(rates.redis, 1000)}/s"
    return [
        f"rates: {rates.prefill:,.0f} tokens/s of prefill, {loads} from Redis"
        + ("" if measured is None else f", as {measured} says"),
        f"token_bytes: {token_bytes:,} bytes of KV a token",
        "requests: each ends as soon as it arrives, every store succeeds, and one node gets them all",
    ]


def _load(path: Path, block_size: int | None, limit: int | None) -> "RequestTrace":
    with progress_bar(in_bytes=True) as bar:
        progress = begin(bar, f"reading {path.name}")
        return traces.load_trace(path, block_size=block_size, limit=limit, progress=progress)


def _run(
    requests: "RequestTrace", block_bytes: int, capacities: "Sequence[Capacity]", processes: int
) -> "list[SimulatedRun]":
    with progress_bar() as bar:
        progress = begin(bar, "simulating", len(capacities))
        return simulation.sweep(simulation.TraceReplay(requests, block_bytes), capacities, progress, processes)


def _policies(text: str) -> list[str]:
    names = [{"tail": "predicted"}.get(name.strip(), name.strip()) for name in text.split(",")]  # as it was called
    for name in names:
        if name not in _POLICIES:
            raise ConfigError(f"--policy {name!r:.40}: use {', '.join(_POLICIES)}, or several separated by commas")
    return list(dict.fromkeys(names))


def _sizes(option: str, text: str | None) -> list[int]:
    """Sizes separated by commas, each once; `none` is no size."""
    given = [] if text is None or text == _NONE else text.split(",")
    return [*dict.fromkeys(parsed(option, part, configuration.parse_room) for part in given)]

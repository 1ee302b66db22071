"""`kvtier bench`: asks, measures, and says it as figures, charts and pages."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.service import Chart, Line, Table, html_page, save_png
from kvtier.service.bench.load import Answer, Api, LoadPace, MeasuredLoad, Server, drive
from kvtier.service.bench.patterns import ScriptedSession, Shape, sessions_of, sessions_of_trace

# --- what answers came to --------------------------------------------------------------------------------------------

FORM: Final = 1  # of the JSON: `kvtier_bench`


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if values else None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One server's. None: the server did not say, or nothing was measured."""

    url: str
    model: str
    requests: int
    errors: dict[str, int]  # by kind
    ttft: Percentiles | None
    inter_token: Percentiles | None
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def cached_share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @classmethod
    def of(cls, url: str, model: str, answers: Sequence[Answer], seconds: float) -> "LoadFigures":
        """`seconds` is how long the load ran."""
        good = [each for each in answers if each.error is None]
        output = sum(_num_output(each) for each in good)
        told = [each for each in good if each.num_prompt is not None]
        says = [each for each in told if each.num_cached is not None]
        return cls(
            url,
            model,
            len(answers),
            dict(Counter(each.error for each in answers if each.error is not None)),
            Percentiles.of([each.ttft for each in good if each.ttft is not None]),
            Percentiles.of([gap for each in good for gap in each.gaps]),
            output,
            output / seconds if seconds > 0 else 0.0,
            sum(each.num_prompt or 0 for each in told) if told else None,
            sum(each.num_cached or 0 for each in says) if says else None,
        )


def _num_output(answer: Answer) -> int:
    if answer.num_output is not None:
        return answer.num_output
    return len(answer.gaps) + (answer.ttft is not None)


def as_json(measured: MeasuredLoad, figures: Sequence[LoadFigures], asked: dict[str, Any]) -> dict[str, Any]:
    """The document of `--json`. `asked` is what was asked for, by option."""
    servers = [{**asdict(each), "cached_share": each.cached_share} for each in figures]
    return {
        "kvtier_bench": FORM,
        "asked": asked,
        "seconds": measured.seconds,
        "is_whole": measured.is_whole,
        "in_flight": measured.in_flight,
        "servers": servers,
        "ttft": [[answer.ttft for answer in answers if answer.error is None] for answers in measured.answers],
    }


def rows_of(figures: Sequence[LoadFigures]) -> list[tuple[str, ...]]:
    """The table: a label, and a text for each server."""
    rows: list[tuple[str, ...]] = [
        ("requests", *(str(each.requests) for each in figures)),
        ("failed", *(str(sum(each.errors.values())) for each in figures)),
    ]
    for name, label in (("ttft", "TTFT"), ("inter_token", "inter-token")):
        for share in ("p50", "p90", "p99"):
            texts = (_milliseconds(getattr(each, name), share) for each in figures)
            rows.append((f"{label} {share}, ms", *texts))
    rows.append(("output tokens/s", *(f"{each.output_tokens_per_second:.1f}" for each in figures)))
    rows.append(
        ("prompt tokens", *("?" if each.prompt_tokens is None else str(each.prompt_tokens) for each in figures))
    )
    rows.append(("cached, % of them", *(_percent(each.cached_share) for each in figures)))
    kinds = sorted({kind for each in figures for kind in each.errors})
    rows += [(kind, *(str(each.errors.get(kind, 0)) for each in figures)) for kind in kinds]
    return rows


def _milliseconds(percentiles: Percentiles | None, share: str) -> str:
    return "–" if percentiles is None else f"{getattr(percentiles, share) * 1000:.1f}"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.1%}".removesuffix("%")


# --- the whole -------------------------------------------------------------------------------------------------------

_SHARES: Final = np.linspace(0.0, 100.0, 101)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is asked of whom. The second URL is what the first is compared with."""

    urls: tuple[str, ...]
    shape: Shape
    pace: LoadPace
    api: Api = "chat"
    model: str | None = None
    token: str | None = None
    deadline: float = 120.0  # seconds for each request
    trace: Path | None = None  # asked instead of a pattern
    speed: float = 1.0  # of the trace


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured, in the forms in which it is shown."""

    measured: MeasuredLoad
    figures: list[LoadFigures]
    asked: dict[str, Any]

    @property
    def json(self) -> dict[str, Any]:
        return as_json(self.measured, self.figures, self.asked)

    @property
    def table(self) -> Table:
        note = "" if self.measured.is_whole else f"interrupted: {self.measured.in_flight} requests were under way"
        return Table("kvtier bench", ["", *(each.url for each in self.figures)], rows_of(self.figures), note)

    @property
    def charts(self) -> list[Chart]:
        by_server = zip(self.figures, self.measured.answers, strict=True)
        ttfts = [
            (each.url, [one.ttft for one in answers if one.ttft is not None and one.error is None])
            for each, answers in by_server
        ]
        lines = [
            Line(url, (np.percentile(times, _SHARES) * 1000).tolist(), _SHARES.tolist())
            for url, times in ttfts
            if times
        ]
        return [Chart("Time to the first token", "TTFT, ms", "% of requests within", lines, log_x=True)]

    def save(self, png: Path | None, html: Path | None) -> None:
        """Draw it where that was asked for. KVTierError if that cannot be done."""
        if png is not None:
            save_png(png, self.charts)
        if html is not None:
            html_page(html, "kvtier bench", [self.table], self.charts)


def run_bench(options: BenchOptions, begins: Callable[[int], Callable[[], None]]) -> BenchResult:
    """Ask everything. `begins` gets the number of requests, and returns what is called behind each.

    Ctrl-C ends it early, with what there is by then. ConfigError if a server does not answer at the start.
    """
    sessions = _sessions(options)  # outside of the loop: there Ctrl-C would wait until all are made
    return asyncio.run(_run(options, sessions, begins))


def _sessions(options: BenchOptions) -> list[ScriptedSession]:
    shape = options.shape
    if options.trace is None:
        return sessions_of(shape)
    return sessions_of_trace(options.trace, shape.num_requests, shape.answer_tokens, options.speed)


async def _run(
    options: BenchOptions, sessions: list[ScriptedSession], begins: Callable[[int], Callable[[], None]]
) -> BenchResult:
    async with AsyncExitStack() as opened:
        servers = []
        for url in options.urls:
            given = {"api": options.api, "model": options.model, "token": options.token, "deadline": options.deadline}
            server = Server(url, **given)  # type: ignore[arg-type]
            opened.push_async_callback(server.close)
            await server.find_model()
            servers.append(server)
        measured = await _driven(servers, sessions, options, begins)
    named = zip(servers, measured.answers, strict=True)
    figures = [LoadFigures.of(each.url, each.model, answers, measured.seconds) for each, answers in named]
    shape, pace = asdict(options.shape), asdict(options.pace)
    how = {"api": options.api, "deadline": options.deadline, "speed": options.speed}
    trace = None if options.trace is None else str(options.trace)
    return BenchResult(measured, figures, {**shape, **pace, **how, "trace": trace})


async def _driven(
    servers: list[Server],
    sessions: list[ScriptedSession],
    options: BenchOptions,
    begins: Callable[[int], Callable[[], None]],
) -> MeasuredLoad:
    advance = begins(len(servers) * sum(len(session.turns) for session in sessions))

    def done(_: Answer) -> None:
        advance()

    return await drive(servers, sessions, options.pace, done, options.shape.seed)

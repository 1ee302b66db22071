"""`kvtier bench`: asks, measures, and says it as figures, charts and pages."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.service.bench.asking import Answer, Api, Server
from kvtier.service.bench.figures import LoadFigures, as_json, rows_of
from kvtier.service.bench.from_trace import sessions_of_trace
from kvtier.service.bench.load import LoadPace, MeasuredLoad, drive
from kvtier.service.bench.patterns import ScriptedSession, Shape, sessions_of
from kvtier.service.charts import Chart, Line, Table, html_page, save_png

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

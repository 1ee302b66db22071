"""The verb `kvtier bench`: load on a server, as a table, JSON, a picture or a page."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtier.cli.options import DEADLINES, HtmlOption, JsonOption, PngOption, check_figure, progress_bar, show, table_of
from kvtier.service import Exit

app = typer.Typer()


@app.command("bench")
def run_bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI server, as in http://127.0.0.1:8000")],
    compare: Annotated[str | None, typer.Option(metavar="URL", help="Another one: asked the same, by turns.")] = None,
    pattern: Annotated[
        Literal["shared", "turns", "rag", "agents"],
        typer.Option(metavar="shared|turns|rag|agents", help="What prompts have in common."),
    ] = "shared",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Ask what this trace asked, instead.")] = None,
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
        Literal["chat", "completions"], typer.Option(metavar="chat|completions", help="Which of the two is asked.")
    ] = "chat",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; else the first that the server has.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar="KVTIER_ROUTER__TOKEN", help="The API key.")
    ] = None,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds for each request.")] = 120.0,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of all that is made up.")] = 0,
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
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with progress_bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:

        def begins(total: int) -> Callable[[], None]:
            task = bar.add_task("", total=total)
            return lambda: bar.advance(task)

        outcome = run_bench(options, begins)
    show(outcome.json, table_of(outcome.table), as_json=as_json)
    outcome.save(png, html)
    failed = all(0 < each.requests == sum(each.errors.values()) for each in outcome.figures)
    raise typer.Exit(Exit.FAILED if failed else Exit.OK if outcome.measured.is_whole else Exit.DEGRADED)

"""The verb `kvtier worth`: what loading is worth on this machine, as a table, JSON, a picture or a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import (
    DEADLINES,
    PRICES,
    ConfigOption,
    HtmlOption,
    JsonOption,
    PngOption,
    check_figure,
    progress_bar,
    show,
    table_of,
)
from kvtier.tiers import ConfigError, require_extra
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from kvtier.service.worth import Worth

app = typer.Typer()
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
    from kvtier.service.worth import worth_from

    if measured is not None:
        found = worth_from(measured, gpu_hour)
    else:
        assert model is not None
        found = _measure(model, configuration.Config.load(config), tokens, device, deadline, gpu_hour)
    show(found.json, table_of(found.table), as_json=as_json)
    found.save(png, html)


def _measure(
    model: Path,
    config: "configuration.Config",
    tokens: list[int],
    device: str,
    deadline: float,
    gpu_hour: float | None,
) -> "Worth":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("loading torch", total=None)
        require_extra("kvtier worth", "engine")
        from kvtier.engine import REPEATS, measure_prompts
        from kvtier.service.worth import Worth

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
    return Worth(steps.name, steps.device, steps.bytes_per_token, compute, by_tier, gpu_hour)

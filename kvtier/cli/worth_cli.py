"""The verb `kvtier worth`: what loading is worth on this machine, as a table, JSON, a picture or a page."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import ConfigOption, HtmlOption, JsonOption, PngOption, progress_bar, show, table_of
from kvtier.service import needing
from kvtier.tiers import ConfigError
from kvtier.tiers import config as configuration

app = typer.Typer()


@app.command("worth")
def run_worth(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a config.json: random weights.")],
    tokens: Annotated[list[int], typer.Option(help="Length of a prompt; may be repeated.")] = [256, 1024, 4096],  # noqa: B006
    gpu_hour: Annotated[float | None, typer.Option(help="Price of an hour of this machine: saved money, too.")] = None,
    device: Annotated[str, typer.Option(help="torch's name of one; auto is a GPU where there is one.")] = "auto",
    config: ConfigOption = None,
    as_json: JsonOption = False,
    png: PngOption = None,
    html: HtmlOption = None,
) -> None:
    if min(tokens) < 1:
        raise ConfigError(f"tokens {min(tokens)}: use a whole number from 1 on")
    with needing("kvtier worth"):
        from kvtier.engine import measure_prompts
        from kvtier.service.worth import Worth
    from rich.progress import BarColumn, MofNCompleteColumn

    loaded = configuration.Config.load(config)
    with progress_bar(BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=len(set(tokens)))
        measured = measure_prompts(model, loaded, tokens, lambda: bar.advance(task), device=device)
    tiers = dict.fromkeys(["host", *(tier for each in measured.times for tier in each.by_tier)])
    by_tier = {
        tier: {each.num_tokens: each.by_tier[tier] for each in measured.times if tier in each.by_tier} for tier in tiers
    }
    compute = {each.num_tokens: each.compute for each in measured.times}
    found = Worth(measured.name, measured.device, measured.bytes_per_token, compute, by_tier, gpu_hour)
    show(found.json, table_of(found.table), as_json=as_json)
    found.save(png, html)

"""The verb `kvtier size`: what a model's KV takes, and what memory, disk and Redis hold of it."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import JsonOption, room_given, show, table_of
from kvtier.connector.transformers import read_config
from kvtier.tiers import require_extra
from kvtier.tiers.config import show_size
from kvtier.tiers.host import limits

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
    block_tokens: Annotated[int, typer.Option(metavar="NUMBER", min=1, max=1 << 20, help="Tokens of a block.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="GPUs that divide the model.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the KV; auto is the model's own.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    given = {"l2": ("--memory", memory), "file": ("--disk", disk), "redis": ("--redis", redis)}
    rooms = {tier: room_given(option, text) for tier, (option, text) in given.items() if text is not None}
    rooms = rooms or dict.fromkeys(given, room_given("", _DEFAULT))
    read_config(model)  # a file that is wrong is told at once: torch takes seconds to import
    require_extra("kvtier size", "transformers")
    from kvtier.service.sizing import sizing_of

    found = sizing_of(
        model,
        rooms,
        block_size=block_tokens,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        conversation=conversation,
    )
    show(found.json, table_of(found.table), as_json=as_json)
    if memory is not None and rooms["l2"] > (here := limits()).most:
        typer.echo(f"kvtier: --memory {memory}: {here.by} has {show_size(here.most)}", err=True)

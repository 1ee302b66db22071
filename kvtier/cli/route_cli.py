"""`kvtier route`: the router on the command line."""

import logging
import threading
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.cli import serving
from kvtier.cli.options import ConfigOption, HttpOption, given
from kvtier.service import needing
from kvtier.tiers.config import Config

app = typer.Typer()

_SWITCH: Final = 0.001  # seconds the loop waits for the GIL beside a thread that reads events; Python's 5 ms are heard
_REPLICA: Final = (
    "http[s]://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N][,addresses=all]; once for each."
)


@app.command("route")
def route(
    replica: Annotated[list[str] | None, typer.Option(metavar="SPEC", help=_REPLICA)] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Whose tokenizer tells prompts apart; else replicas are asked.")
    ] = None,
    replicas_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More replicas, one a line; followed while it changes.")
    ] = None,
    http: HttpOption = None,
    config: ConfigOption = None,
) -> None:
    options = given(replicas=replica, replicas_file=replicas_file, model=model, http=http)
    settings = Config.load(config, router=options)
    serving.begin(_SWITCH)
    with needing("the router"):
        from kvtier.service.router import serve
    server = serve(settings.router, strict=settings.events.strict)
    stopping = threading.Event()
    serving.on_signal(stopping.set)
    server.start()
    num_replicas = len(settings.router.replicas)
    logging.getLogger(__name__).info("ready on %d replicas, http on %s", num_replicas, server.address)
    stopping.wait()
    server.stop()

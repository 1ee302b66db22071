"""`kvtier route`: the router on the command line."""

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.service import ConfigOption, log_to_stderr, needing, use_all_descriptors
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
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where it answers; instead of the configured address.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Send OpenAI's requests to the replica that holds most of their prompt, until SIGTERM or Ctrl-C."""
    options = {"replicas": replica, "replicas_file": replicas_file, "model": model, "http": http}
    settings = Config.load(config, router={name: value for name, value in options.items() if value is not None})
    log_to_stderr()
    with needing("the router"):
        from kvtier.service.router import serve
    server = serve(settings.router, strict=settings.events.strict)
    use_all_descriptors()
    sys.setswitchinterval(_SWITCH)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    server.start()
    num_replicas = len(settings.router.replicas)
    logging.getLogger(__name__).info("ready on %d replicas, http on %s", num_replicas, server.address)
    stopping.wait()
    server.stop()

"""`kvtier engine`: an OpenAI server on the command line."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.service import ConfigOption, log_to_stderr, needing, use_all_descriptors
from kvtier.tiers.config import Config

app = typer.Typer()

_SWITCH: Final = 0.001  # seconds a thread waits for the GIL: Python's 5 ms would be added to every token told


@app.command("engine")
def serve_engine(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A local checkpoint directory with its tokenizer.")],
    name: Annotated[str | None, typer.Option(help="The model's name for clients; instead of the directory's.")] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to answer; instead of the configured address.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="The same bits however a prompt was had; half as fast.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Answer OpenAI requests with an engine of this process, its KV in every tier, until SIGTERM or Ctrl-C."""
    given = {option: value for option, value in (("name", name), ("http", http)) if value is not None}
    settings = Config.load(config, server=given)
    log_to_stderr()
    with needing("the engine"):
        from kvtier.service.engine import EngineServer
    use_all_descriptors()
    server = EngineServer(model, settings, exact=exact)
    sys.setswitchinterval(_SWITCH)

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # who insists is obeyed at once
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run()

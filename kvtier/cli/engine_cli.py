"""`kvtier engine`: an OpenAI server on the command line."""

import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.cli import serving
from kvtier.cli.options import ConfigOption, ExactOption, HttpOption, given
from kvtier.service import needing
from kvtier.tiers.config import Config

app = typer.Typer()

_SWITCH: Final = 0.001  # seconds a thread waits for the GIL: Python's 5 ms would be added to every token told


@app.command("engine")
def serve_engine(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A local checkpoint directory with its tokenizer.")],
    name: Annotated[str | None, typer.Option(help="The model's name for clients; instead of the directory's.")] = None,
    http: HttpOption = None,
    exact: ExactOption = False,
    config: ConfigOption = None,
) -> None:
    settings = Config.load(config, server=given(name=name, http=http))
    serving.begin(_SWITCH)
    with needing("the engine"):
        from kvtier.service.engine import EngineServer
    server = EngineServer(model, settings, exact=exact)

    def stop() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # who insists is obeyed at once
        server.stop()

    serving.on_signal(stop)
    server.run()

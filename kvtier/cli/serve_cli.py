"""`kvtier serve`: the daemon on the command line."""

import logging
from contextlib import nullcontext
from typing import Annotated, Final

import typer

from kvtier.cli import serving
from kvtier.cli.options import ConfigOption, HttpOption, given
from kvtier.service import needing
from kvtier.service.node import Daemon
from kvtier.tiers import ConfigError, load_key
from kvtier.tiers.config import Config, format_size

app = typer.Typer()

_SWITCH: Final = 0.0002  # seconds the loop waits for the GIL beside a busy I/O thread; Python's 5 ms are a whole step
_DRAIN: Final = 10.0  # seconds from a signal to the end


@app.command("serve")
def serve(
    config: ConfigOption = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where engines connect; instead of the configured socket.")
    ] = None,
    http: HttpOption = None,
) -> None:
    settings = Config.load(config, service=given(socket=socket, http=http))
    path = settings.service.socket
    if path is None:
        raise ConfigError("[service] socket none: the daemon needs a place to listen; name one, or give --socket PATH")
    if settings.file.key_file is not None:
        load_key(settings.file.key_file, "[file] key_file")  # a wrong one is told now, not to the first engine
    serving.begin(_SWITCH)
    with needing("the daemon"):
        from kvtier.service.admin import Pages
        from kvtier.service.events import Publisher
        from kvtier.service.web import HttpSocket
    listening = HttpSocket(settings.service.http, names=settings.service.allowed_hosts)
    with Publisher(settings.events) if settings.events.publish is not None else nullcontext() as publisher:
        daemon = Daemon(settings, path, publisher=publisher)
        pages = Pages(daemon, listening)
        serving.on_signal(daemon.stop)
        pages.start()
        size = format_size(settings.host.size)
        logging.getLogger(__name__).info("ready on %s, %s of host memory, http on %s", path, size, pages.address)
        daemon.run()
        pages.stop()
        if not daemon.close(_DRAIN):
            logging.getLogger(__name__).warning("stores still waited after %g s: they are dropped", _DRAIN)

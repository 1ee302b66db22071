"""`kvtier serve`: the daemon on the command line."""

import logging
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.service import log_to_stderr, needing, use_all_descriptors
from kvtier.service.node import Daemon
from kvtier.tiers import ConfigError, load_key
from kvtier.tiers.config import Config, format_size

app = typer.Typer()

_SWITCH: Final = 0.0002  # seconds the loop waits for the GIL beside a busy I/O thread; Python's 5 ms are a whole step
_DRAIN: Final = 10.0  # seconds from a signal to the end


@app.command("serve")
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
    ] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where engines connect; instead of the configured socket.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where its pages are; instead of the configured address.")
    ] = None,
) -> None:
    """Serve host memory and the tiers below it to the engines of this node, until SIGTERM or Ctrl-C."""
    given = {name: value for name, value in (("socket", socket), ("http", http)) if value is not None}
    settings = Config.load(config, service=given)
    path = settings.service.socket
    if path is None:
        raise ConfigError("[service] socket none: the daemon needs a place to listen; name one, or give --socket PATH")
    if settings.file.key_file is not None:
        load_key(settings.file.key_file, "[file] key_file")  # a wrong one is told now, not to the first engine
    log_to_stderr()
    with needing("the daemon"):
        from kvtier.service.admin import Pages
        from kvtier.service.events import Publisher
        from kvtier.service.web import HttpSocket
    listening = HttpSocket(settings.service.http, names=settings.service.allowed_hosts)
    use_all_descriptors()
    sys.setswitchinterval(_SWITCH)
    with Publisher(settings.events) if settings.events.publish is not None else nullcontext() as publisher:
        daemon = Daemon(settings, path, publisher=publisher)
        pages = Pages(daemon, listening)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        pages.start()
        size = format_size(settings.host.size)
        logging.getLogger(__name__).info("ready on %s, %s of host memory, http on %s", path, size, pages.address)
        daemon.run()
        pages.stop()
        if not daemon.close(_DRAIN):
            logging.getLogger(__name__).warning("stores still waited after %g s: they are dropped", _DRAIN)

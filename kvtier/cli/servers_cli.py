"""The verbs that serve until a signal: `kvtier serve`, `engine` and `route`."""

import gc
import logging
import resource
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Annotated, Final

import typer

from kvtier import service
from kvtier.cli.options import ConfigOption, ExactOption, HttpOption, given, on_reload, on_signal
from kvtier.connector import ChatPrefix
from kvtier.service import LogFormat, LogLevel, log_to_stderr
from kvtier.tiers import ConfigError, require_extra, tracing
from kvtier.tiers import config as configuration
from kvtier.tiers.config import format_size, otlp_target

_COLLECT: Final = 20_000  # new objects before the collector visits the youngest; Python's are 700


def begin(switch_interval: float, settings: configuration.Config) -> None:
    """Log to stderr, allow as many open files as possible, and set how long a thread waits for the GIL.

    From here on SIGHUP waits for `on_reload`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    log_to_stderr(settings.log.level, settings.log.format)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each client needs one or more
    sys.setswitchinterval(switch_interval)


def settle() -> None:
    """Call it after all imports: the garbage collector then skips the existing objects, and visits others less often.

    Otherwise it visits all modules from time to time while a client waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT)


app = typer.Typer()

_log = logging.getLogger(__name__)

# Seconds that a thread waits for a busy thread to release the GIL. Python's 5 ms are a whole step of an engine with a
# daemon. They would delay every token sent, and every thread beside one that reads events.
_DAEMON_SWITCH: Final = 0.0002
_SWITCH: Final = 0.001
_DRAIN: Final = 10.0  # seconds from a signal to the end of the daemon
RequestLogOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Append a line of JSON for each request, and why it was no hit.")
]
LogLevelOption = Annotated[
    LogLevel | None, typer.Option(metavar="debug|info|warning|error", help="The least that is logged.")
]
LogFormatOption = Annotated[
    LogFormat | None, typer.Option(metavar="text|json", help="A line of text each, or an object of JSON.")
]
_REPLICA: Final = (
    "http[s]://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N][,addresses=all]; once for each."
)


@app.command("serve")
def serve(
    config: ConfigOption = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where engines connect; instead of the configured socket.")
    ] = None,
    http: HttpOption = None,
    request_log: RequestLogOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    options = {"service": given(socket=socket, http=http, request_log=request_log)}
    options["log"] = given(level=log_level, format=log_format)
    reloads = service.Reloads(lambda: configuration.Config.load(config, **options), service.DAEMON)
    settings, path = reloads.config, reloads.config.service.socket
    if path is None:
        raise ConfigError("[service] socket none: the daemon needs a place to listen; name one, or give --socket PATH")
    begin(_DAEMON_SWITCH, settings)
    tracing.start("kvtier-daemon", otlp_target(settings.tracing.endpoint))
    from kvtier.service.admin import Pages
    from kvtier.service.events import Publisher
    from kvtier.service.node import Daemon
    from kvtier.service.web import HttpSocket
    from kvtier.tiers.hierarchy import check_tiers

    tiers = check_tiers(settings)  # a wrong setting is reported now, not to the first engine
    listening = HttpSocket(settings.service.http, names=settings.service.allowed_hosts)
    has_peers = settings.peers.listen is not None
    publishes = settings.events.publish is not None
    with Publisher(settings.events, has_peers=has_peers) if publishes else nullcontext() as publisher:
        try:
            daemon = Daemon(settings, path, publisher=publisher, reloads=reloads)
        except BaseException:
            listening.close()
            raise
        pages = Pages(daemon, listening)
        reloads.prepare = pages.prepare
        on_signal(daemon.stop)
        pages.start()
        size = format_size(settings.host.size)
        settle()
        token = "" if pages.token.file is None else f", its token in {pages.token.file}"
        _log.info("ready on %s, %s of host memory%s, http on %s", path, size, token, pages.address)
        for each in tiers:
            _log.info("%s", each)
        on_reload(reloads.reload)
        daemon.run()
        pages.stop()
        if not daemon.close(_DRAIN):
            _log.warning("stores not finished after %g s: they are dropped", _DRAIN)


@app.command("engine")
def serve_engine(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A local checkpoint directory with its tokenizer.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name for clients; instead of the directory's.")
    ] = None,
    http: HttpOption = None,
    exact: ExactOption = False,
    request_log: RequestLogOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    tool_parser: Annotated[
        str | None, typer.Option(metavar="FORM", help="How answers call tools: hermes, llama, auto or none.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    options = {"server": given(name=name, http=http, request_log=request_log, tool_parser=tool_parser)}
    options["log"] = given(level=log_level, format=log_format)
    reloads = service.Reloads(lambda: configuration.Config.load(config, **options), service.ENGINE)
    settings = reloads.config
    begin(_SWITCH, settings)
    require_extra("kvtier engine", "engine")
    from kvtier.connector.models import require_checkpoint
    from kvtier.service.web import HttpSocket

    require_checkpoint(model)
    listening = HttpSocket(settings.server.http, "server", settings.server.allowed_hosts)
    from kvtier.service.engine import EngineServer  # and torch: errors so far are reported first

    tracing.start("kvtier-engine", otlp_target(settings.tracing.endpoint))
    server = EngineServer(model, settings, exact=exact, listening=listening, reloads=reloads)
    on_signal(server.stop, once=True)
    on_reload(reloads.reload)
    server.run()


@app.command("route")
def route(
    replica: Annotated[list[str] | None, typer.Option(metavar="SPEC", help=_REPLICA)] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Whose tokenizer reads prompts; else replicas tokenize them.")
    ] = None,
    replicas_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More replicas, one a line; changes take effect at once.")
    ] = None,
    http: HttpOption = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="Processes behind the address, a core each; instead of 1.")
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    config: ConfigOption = None,
) -> None:
    options = {"router": given(replicas=replica, replicas_file=replicas_file, model=model, http=http)}
    options["router"] |= given(processes=processes)
    options["log"] = given(level=log_level, format=log_format)
    reloads = service.Reloads(lambda: configuration.Config.load(config, **options), service.ROUTER)
    begin(_SWITCH, reloads.config)
    seat, stopping, router = None, Event(), reloads.config.router
    if router.processes > 1:
        from kvtier.service.router import RouterProcesses

        signals: list[None] = []
        on_signal(lambda: signals.append(None))
        several = RouterProcesses(reloads, lambda: len(signals))
        ready = f"ready on {len(router.replicas)} replicas, {router.processes} processes, http on {several.http}"
        if (seat := several.run(lambda: _log.info("%s", ready))) is None:
            return
        reloads.level = logging.DEBUG  # the parent has logged it
        router = reloads.config.router.model_copy(update={"http": several.http})
    from kvtier.service.router import serve as serve_router

    settings = reloads.config
    tracing.start("kvtier-router", otlp_target(settings.tracing.endpoint))
    prefix, strict = ChatPrefix.of(settings.chat), settings.events.strict
    server = serve_router(router, strict=strict, prefix=prefix, seat=seat, reloads=reloads)
    on_signal(stopping.set, once=seat is None)  # with several processes, the parent ends those that are slow
    server.start()
    if seat is None:
        _log.info("ready on %d replicas, http on %s", len(router.replicas), server.address)
    on_reload(reloads.reload)
    stopping.wait()
    server.stop()

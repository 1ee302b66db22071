"""A server's parts from a configuration to the end: model, tiers, loop, socket, in the order that they need."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from transformers.utils.logging import disable_progress_bar

from kvtier.connector.checkpoint import name_of
from kvtier.connector.local import LocalConnector
from kvtier.engine.demo import require_checkpoint
from kvtier.engine.llm import Engine
from kvtier.engine.local import open_engine
from kvtier.engine.server import Served, make_app
from kvtier.engine.server_loop import EngineLoop
from kvtier.service.events import Publisher, Source, TierFeed
from kvtier.service.http_server import HttpServer, HttpSocket
from kvtier.service.openai_errors import OpenAIError
from kvtier.service.prompts import Prompts
from kvtier.tiers.config import Config
from kvtier.tiers.events import EventSource, TierEvents
from kvtier.tiers.local_tiers import LocalTiers

_log = logging.getLogger(__name__)

_DRAIN: Final = 20.0  # seconds for the answers under way, from a signal on
_GRACE: Final = 2  # seconds for their last bytes
_SPARE: Final = 64  # connections beyond those that have something computed: pages, and who is told to come again
_STORES: Final = 10.0  # seconds for what is on its way to the tiers below
_CROWDED: Final = OpenAIError(503, "too many connections; come again later", code="overloaded").response


class Server:
    """`kvtier engine` in one process: `run` serves until `stop`."""

    def __init__(self, model: Path, config: Config, *, exact: bool = False) -> None:
        """ConfigError where address, model or tiers cannot be had; the address first, a model takes a while."""
        disable_progress_bar()  # type: ignore[no-untyped-call]
        require_checkpoint(model)
        prompts, settings = Prompts.open(model), config.server
        with ExitStack() as opened:
            listening = opened.enter_context(closing(HttpSocket(settings.http, "server")))
            self.publisher = Publisher(config.events) if config.events.publish is not None else None
            if self.publisher is not None:
                opened.callback(self.publisher.close)
            self.engine = open_engine(
                model,
                config,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                exact=exact,
            )
            opened.pop_all()
        self._feed = None if self.publisher is None else _feed(self.publisher, self.engine)
        self.loop = EngineLoop(self.engine, settings.max_waiting, self._feed)
        self.name = settings.name or name_of(model)
        app = make_app(Served(self.loop, prompts, self.name, settings, _events(self.publisher)))
        self._http = HttpServer(
            app, listening, max_connections=self.loop.capacity + _SPARE, crowded=_CROWDED, grace=_GRACE
        )
        self.address = self._http.address

    def run(self) -> None:
        """Serve until stopped: answers under way end first, stores reach the tiers below, then everything closes."""
        self._http.start()
        _log.info("ready on %s, http on %s", self.name, self.address)
        try:
            self.loop.run()
        finally:
            self._http.stop()
            if not self.engine.drain(_STORES):
                _log.warning("stores still waited after %g s: they are dropped", _STORES)
            self.engine.close()
            if self.publisher is not None and self._feed is not None:
                self._feed.close()
                self.publisher.close()

    def stop(self) -> None:
        """Take nothing more, end what is under way. From any thread, or a signal's handler."""
        self.loop.stop(_DRAIN)


def _feed(publisher: Publisher, engine: Engine) -> TierFeed:
    """Of L1, and of the tiers below where they are this process's: a daemon tells of its own."""
    sources: list[Source] = [TierEvents("l1", engine.pool)]
    connector = engine.connector
    if isinstance(connector, LocalConnector) and isinstance(connector.tiers, LocalTiers):
        sources.append(EventSource(connector.hierarchy))
    return publisher.feed(engine.identity.fingerprint(), *sources)


def _events(publisher: Publisher | None) -> Mapping[str, str | None] | None:
    return None if publisher is None else {"publish": publisher.endpoint, "replay": publisher.replay_endpoint}

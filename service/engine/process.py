"""Opens and closes what one engine server is made of: socket, model, tiers, engine loop."""

import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from transformers.utils.logging import disable_progress_bar

from kvtier.connector import ChatPrefix, LocalConnector
from kvtier.connector.models import name_of, require_checkpoint
from kvtier.engine import Engine, open_engine
from kvtier.service.engine.loop import EngineLoop
from kvtier.service.engine.request_parser import JsonGuides, Served, form_of
from kvtier.service.engine.server import make_app
from kvtier.service.events import Publisher, Source, TierFeed
from kvtier.service.explain import RequestLog
from kvtier.service.openai import Prompts, refusal
from kvtier.service.web import HttpServer, HttpSocket
from kvtier.tiers import L1
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import EventSource, Hierarchy, TierEvents, check_tiers

_log = logging.getLogger(__name__)

_GRACE: Final = 2  # seconds for the last bytes of these answers
_SPARE: Final = 64  # HTTP requests beyond those that are computed: pages, and refusals
_STORES: Final = 10.0  # seconds for stores on their way to lower tiers


class EngineServer:
    """`kvtier engine` in one process: `run` serves until `stop`."""

    def __init__(
        self, model: Path, config: Config, *, exact: bool = False, listening: HttpSocket | None = None
    ) -> None:
        """Binds the address first, unless `listening` is bound: a model takes long to load. Raises ConfigError."""
        disable_progress_bar()  # type: ignore[no-untyped-call]
        settings = config.server
        with ExitStack() as opened:
            if listening is not None:
                opened.enter_context(closing(listening))
            require_checkpoint(model)
            if config.service.socket is None:
                check_tiers(config)  # a daemon has looked at its own
            prompts = Prompts.open(model, ChatPrefix.of(config.chat))
            if listening is None:
                listening = opened.enter_context(closing(HttpSocket(settings.http, "server", settings.allowed_hosts)))
            self._log = RequestLog.opened(settings.request_log, "[server] request_log")
            if self._log is not None:
                opened.callback(self._log.close)
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
        self.engine.scheduler.calls_tool = prompts.calls_tool
        if config.cache.store_generated == "answers" and not self.engine.model.has_own_cache:
            self.engine.scheduler.reasoning = prompts.reasoning()
            if self.engine.scheduler.reasoning is None:
                _log.info("this model's chat template leaves no reasoning out: all of its answers are stored")
        self._feed = None if self.publisher is None else _feed(self.publisher, self.engine)
        self.loop = EngineLoop(self.engine, settings.max_waiting, self._feed, self._log)
        self.name, self._patience = settings.name or name_of(model), settings.patience
        guides = JsonGuides(prompts.tokenizer_json, self.engine.model.vocab_size, self.engine.model.eos_token_ids)
        form = form_of(settings.tool_parser, prompts)
        told, publisher = config.events, self.publisher
        events = None if publisher is None else {"publish": publisher.endpoint, "replay": publisher.replay_endpoint}
        node = None if told.node is None else {"publish": told.node, "replay": told.node_replay}
        app = make_app(Served(self.loop, prompts, self.name, settings, guides, events, node, form))
        room = self.loop.capacity + _SPARE
        self._http = HttpServer(app, listening, max_requests=room, refusal=refusal, grace=_GRACE)
        self.address = self._http.address

    def run(self) -> None:
        """Serve until stopped. Answers under way end first, then stores reach lower tiers, then everything closes."""
        self._http.start()
        _log.info("ready on %s, http on %s", self.name, self.address)
        try:
            self.loop.run()
        finally:
            self._http.stop()
            if not self.engine.drain(_STORES):
                _log.warning("stores still waited after %g s: they are dropped", _STORES)
            self.engine.close()
            if self._log is not None:
                self._log.close()
            if self.publisher is not None and self._feed is not None:
                self._feed.close()
                self.publisher.close()

    def stop(self) -> None:
        """Take nothing more, and end what is under way. May be called on any thread, or in a signal handler."""
        self.loop.stop(self._patience)


def _feed(publisher: Publisher, engine: Engine) -> TierFeed:
    """Events of L1, and of lower tiers if this process owns them: a daemon publishes its own."""
    sources: list[Source] = [TierEvents(L1, engine.pool)]
    connector = engine.connector
    if isinstance(connector, LocalConnector) and isinstance(connector.tiers, Hierarchy):
        sources.append(EventSource(connector.hierarchy))
    return publisher.feed(engine.identity.fingerprint(), *sources)

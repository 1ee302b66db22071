"""The router: requests come in, are known by their prompt, and go to the replica where least is left to compute."""

import asyncio
import time
from collections import Counter
from typing import Any, Final

from kvtier.service.openai_bodies import json_object
from kvtier.service.openai_errors import OpenAIError, unknown_model
from kvtier.service.prompts import Prompts
from kvtier.service.router_client import Deadlines, Headers
from kvtier.service.router_holdings import Held, Holdings
from kvtier.service.router_ledger import Ledger
from kvtier.service.router_prompts import read
from kvtier.service.router_proxy import NOT_ASKED, Asked, Proxy, passed
from kvtier.service.router_replicas import Fleet, Replica, Terms
from kvtier.service.router_reply import Reply
from kvtier.service.router_spec import Publishers, parse_replicas
from kvtier.tiers.config_router import RouterConfig

_BYTES: Final = 64  # of a body for each block, where the prompt is not known
_MAX_ITEMS: Final = 1 << 18  # in a body that is read: more take the only JSON parser there is over 20 ms, with the GIL
_LONG: Final = 1 << 15  # tokens; longer prompts are named on a thread


class Router:
    """Belongs to the event loop that calls `start`; `status` and the ledger are read there, too."""

    def __init__(self, config: RouterConfig, *, strict: bool = False) -> None:
        """ConfigError where the replicas' specs are wrong or can't stand side by side, or the tokenizer is.

        `strict`: events that contradict what was told before are errors.
        """
        self.fleet = Fleet(parse_replicas(config.replicas), _terms(config), self._joined)
        self.holdings = Holdings(strict=strict)
        self._prompts = None if config.model is None else Prompts.open(config.model)
        self.ledger = Ledger()
        deadlines = Deadlines(
            config.connect_timeout, config.first_byte_timeout, config.stall_timeout, config.request_timeout
        )
        self._proxy = Proxy(self.fleet, self.ledger, deadlines, config.weights)
        self._headers = _terms(config).headers
        self._started = time.time()

    async def start(self) -> None:
        """Look at every replica once; then look at them, and hear their events, until `stop`."""
        await self.fleet.start()

    async def stop(self) -> None:
        """Hang up everywhere."""
        await self.fleet.stop()
        await asyncio.to_thread(self.holdings.close)

    async def answer(self, path: str, headers: Headers, body: bytes, reply: Reply) -> None:
        """Answer a client's request, whatever it is."""
        try:
            asked = await self._asked(path, headers, body, asyncio.get_running_loop().time())
        except OpenAIError as error:
            self.ledger.errors[str(error.code)] += 1
            await reply.fail(error)
            return
        await self._proxy.forward(asked, reply)

    def status(self) -> dict[str, Any]:
        """What there is to say, as JSON."""
        ledger = self.ledger
        return {
            "uptime_s": time.time() - self._started,
            "block_size": self.fleet.block_size,
            "fingerprint": self.fleet.fingerprint,
            "replicas": [self._replica(replica) for replica in self.fleet.replicas],
            "decisions": list(ledger.decisions)[::-1],
            "requests": _by_reason(ledger.requests),
            "retries": dict(ledger.retries),
            "errors": dict(ledger.errors),
            "unknown_prompts": dict(ledger.untokenised),
            "tokens": {
                "prompt": ledger.prompt_tokens,
                "promised": ledger.promised_tokens,
                "told_prompt": ledger.told_prompt_tokens,
                "told_cached": ledger.told_cached_tokens,
                "told_tiers": dict(ledger.told_tiers),
            },
            "indexed_blocks": self.holdings.num_blocks,
            "cpu_s": time.process_time(),
        }

    def _replica(self, replica: Replica) -> dict[str, Any]:
        return {
            "name": replica.name,
            "url": replica.spec.url,
            "state": replica.state,
            "why": replica.why,
            "load": replica.load,
            "in_flight": replica.in_flight,
            "requests": replica.num_requests,
            "errors": dict(replica.errors),
            **self.holdings.state(replica.name),
        }

    def _joined(self, replica: Replica, publishers: Publishers) -> None:
        fingerprint = self.fleet.fingerprint
        self.holdings.follow(
            replica.name, publishers, self.fleet.block_size, None if fingerprint is None else bytes.fromhex(fingerprint)
        )

    async def _asked(self, path: str, headers: Headers, body: bytes, arrived: float) -> Asked:
        """The request, and what is known of its prompt. Raises OpenAIError where no replica need see it."""
        sent = [*passed(headers, NOT_ASKED), *self._headers]
        if body.count(b",") >= _MAX_ITEMS:
            return self._unknown("too_long", path, sent, body, arrived)
        asked = json_object(body)
        model, served = asked.get("model"), {str(model["id"]) for model in self.fleet.models()}
        if isinstance(model, str) and served and model not in served:
            raise unknown_model(model, ", ".join(sorted(served)))
        begun = time.perf_counter()
        known = await read(path, asked, len(body), self._prompts)
        self.ledger.seconds["tokenise"] += time.perf_counter() - begun
        if known.unknown is not None:
            return self._unknown(known.unknown, path, sent, body, arrived)
        begun, fleet = time.perf_counter(), self.fleet
        what = known.tokens, known.cache_salt, fleet.namespace, fleet.adapter(model)
        is_long = len(known.tokens) > _LONG
        names = await asyncio.to_thread(self.holdings.names, *what) if is_long else self.holdings.names(*what)
        held = self.holdings.of(len(known.tokens), names)
        self.ledger.seconds["score"] += time.perf_counter() - begun
        return Asked(path, sent, body, len(known.tokens), held, arrived)

    def _unknown(self, why: str, path: str, headers: Headers, body: bytes, arrived: float) -> Asked:
        self.ledger.untokenised[why] += 1
        return Asked(path, headers, body, 0, Held(-(-len(body) // _BYTES)), arrived)


def _terms(config: RouterConfig) -> Terms:
    token = config.replica_token
    headers = [] if token is None else [(b"authorization", b"Bearer " + token.get_secret_value().encode())]
    return Terms(config.probe_interval, config.probe_timeout, headers, config.max_requests)


def _by_reason(requests: Counter[tuple[str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, reason), count in requests.items():
        found[reason] += count
    return dict(found)

"""The router: requests come in, are known by their prompt, and go to the replica where least is left to compute."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kvtier.service.router_client import Deadlines, Headers
from kvtier.service.router_ledger import Ledger
from kvtier.service.router_proxy import NOT_ASKED, Asked, Proxy, passed
from kvtier.service.router_replicas import Fleet, Replica, Terms
from kvtier.service.router_reply import Refusal, Reply
from kvtier.service.router_spec import parse_replicas
from kvtier.tiers.config_router import RouterConfig

_BYTES: Final = 64  # of a body for each block, where the prompt is not known


class Router:
    """Belongs to the event loop that calls `start`; `status` and the ledger are read there, too."""

    def __init__(self, config: RouterConfig) -> None:
        """ConfigError where the replicas' specs are wrong or can't stand side by side."""
        self.fleet = Fleet(parse_replicas(config.replicas), _terms(config))
        self.ledger = Ledger()
        deadlines = Deadlines(
            config.connect_timeout, config.first_byte_timeout, config.stall_timeout, config.request_timeout
        )
        self._proxy = Proxy(self.fleet, self.ledger, deadlines, config.weights)
        self._headers = _terms(config).headers
        # Where the router has no token and the replicas' is not known here, clients bring it. Ours is nobody else's.
        self._left_out = NOT_ASKED if self._headers or config.token is not None else NOT_ASKED - {b"authorization"}
        self._started = time.time()

    @property
    def num_indexed(self) -> int:
        """Blocks the index knows."""
        return 0

    async def start(self) -> None:
        """Look at every replica once; then look at them, and hear their events, until `stop`."""
        await self.fleet.start()

    async def stop(self) -> None:
        """Hang up everywhere."""
        await self.fleet.stop()

    async def answer(self, path: str, headers: Headers, body: bytes, reply: Reply) -> None:
        """Answer a client's request, whatever it is."""
        try:
            asked = await self._asked(path, headers, body)
        except Unfit as error:
            self.ledger.errors[error.refusal.reason] += 1
            await reply.fail(error.refusal)
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
            },
            "indexed_blocks": self.num_indexed,
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
            "events": None,
            "blocks": {},
        }

    async def _asked(self, path: str, headers: Headers, body: bytes) -> Asked:
        """The request, and what is known of its prompt. Raises Unfit where no replica need see it."""
        asked = _object(body)
        model, known = asked.get("model"), {str(model["id"]) for model in self.fleet.models()}
        if isinstance(model, str) and known and model not in known:
            shown = ", ".join(f'"{name}"' for name in sorted(known))
            raise Unfit(404, "model_not_found", f'model "{model[:60]}": not served here; there is {shown}', "model")
        sent = [*passed(headers, self._left_out), *self._headers]
        return Asked(path, sent, body, 0, -(-len(body) // _BYTES))


class Unfit(Exception):
    """A request that no replica need see."""

    def __init__(self, status: int, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, reason, message, param=param)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unfit(400, "bad_json", f"body: no JSON, {error}; send one object") from None
    if not isinstance(value, dict):
        raise Unfit(400, "bad_json", 'body: not a JSON object; send one, as in {"model": …}')
    return value


def _terms(config: RouterConfig) -> Terms:
    token = config.replica_token
    headers = [] if token is None else [(b"authorization", b"Bearer " + token.get_secret_value().encode())]
    return Terms(config.probe_interval, config.probe_timeout, headers, config.max_requests)


def _by_reason(requests: Counter[tuple[str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, reason), count in requests.items():
        found[reason] += count
    return dict(found)

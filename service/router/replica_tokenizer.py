"""Tokens of prompts, from the replicas' own tokenizers: for a router that has none."""

import asyncio
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvtier.service import Json, openai
from kvtier.service.router.client import Deadlines, Headers, ReplicaFailed
from kvtier.service.router.fleet import Replica, ReplicaState

CHAT: Final = "/v1/chat/completions"
_MAX_PAGE: Final = 32 << 20  # bytes of an answer
_MAX_TOKENS: Final = 1 << 20  # of a prompt
_KEPT: Final = 1 << 22  # tokens of earlier prompts that are cached, four bytes each, …
_ENTRY: Final = 64  # … and the overhead of one prompt, in tokens
_LONG_PAGE: Final = 64 << 10  # bytes of an answer; a longer one is parsed on a thread
_AGAIN: Final = 30.0  # seconds until a replica without such a page, or a late one, is queried again
_LATE: Final = 3  # late answers in a row before a replica is left alone
_RENDER: Final = f"{CHAT}/render"
_TOKENIZE: Final = "/tokenize"
_ASKED: Final = ("model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message")
_FLAGS: Final = ("add_special_tokens", "chat_template")


@dataclass(slots=True)
class _Page:
    has_render: bool = True
    num_late: int = 0
    until: float = 0.0  # monotonic time at which it is queried again


class ReplicaTokenizer:
    """Asks replicas for the tokens of prompts, and caches them. Belongs to one event loop."""

    def __init__(self, timeout: float, headers: Headers) -> None:
        self.set_terms(timeout, headers)
        self._pages: dict[str, _Page] = {}
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_kept = 0

    def set_terms(self, timeout: float, headers: Headers) -> None:
        """`timeout` is seconds for one prompt; `headers` are sent with each question."""
        self._timeout = timeout
        self._deadlines = Deadlines(timeout, timeout, timeout)
        self._headers = [*headers, (b"content-type", b"application/json")]

    async def of(self, replicas: Sequence[Replica], path: str, body: bytes, value: Json) -> list[int] | None:
        """A request's tokens from whichever replica can give them, or None. Raises nothing, and returns in time."""
        key = xxhash.xxh3_128_digest(body, len(path))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key].tolist()
        replica = self._choose_replica(replicas)
        if replica is None:
            return None
        page = self._pages.setdefault(replica.name, _Page())
        try:
            async with asyncio.timeout(self._timeout):
                tokens = await self._ask(replica, page, path, body, value)
            page.num_late = 0
        except (TimeoutError, ReplicaFailed):
            page.num_late += 1
            if page.num_late >= _LATE:
                page.until = time.monotonic() + _AGAIN
            return None
        if tokens is not None:
            self._keep(key, tokens)
        return tokens

    def _choose_replica(self, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the fewest requests among those that may have such a page."""
        now, able = time.monotonic(), []
        for replica in replicas:
            page = self._pages.get(replica.name)
            if page is not None and page.until and page.until <= now:
                self._pages[replica.name] = page = _Page()
            if replica.state is ReplicaState.UP and (page is None or not page.until):
                able.append(replica)
        return min(able, key=lambda replica: replica.in_flight, default=None)

    async def _ask(self, replica: Replica, page: _Page, path: str, body: bytes, value: Json) -> list[int] | None:
        if path == CHAT and page.has_render:
            status, found = await self._page(replica, _RENDER, body)
            if status not in (403, 404, 405, 501):  # otherwise the page does not exist, or is switched off
                return _tokens(found, "token_ids") if status == 200 else None
            page.has_render = False
        status, found = await self._page(replica, _TOKENIZE, json.dumps(_question(value)).encode())
        tokens = _tokens(found, "tokens") if status == 200 else None
        if tokens is None and status in (200, 403, 404, 405, 501):  # 200 from some page that is not a tokenizer's
            page.until = time.monotonic() + _AGAIN
        return tokens

    async def _page(self, replica: Replica, path: str, body: bytes) -> tuple[int, Any]:
        answer = await replica.client.ask("POST", path, self._headers, body, self._deadlines)
        try:
            data = await answer.read(_MAX_PAGE)
        finally:
            answer.close()
        with suppress(ValueError, RecursionError):
            is_long = len(data) > _LONG_PAGE
            return answer.status, await asyncio.to_thread(json.loads, data) if is_long else json.loads(data)
        return answer.status, None

    def _keep(self, key: bytes, tokens: list[int]) -> None:
        self._known[key] = array("I", tokens)
        self._num_kept += len(tokens) + _ENTRY
        while self._num_kept > _KEPT:
            self._num_kept -= len(self._known.popitem(last=False)[1]) + _ENTRY


def _question(value: Mapping[str, Any]) -> dict[str, Any]:
    """A request's body for `/tokenize`. Fields it does not have become template variables."""
    wanted = {name: value[name] for name in (*_ASKED, *_FLAGS) if value.get(name) is not None}
    if "messages" not in wanted:
        return wanted
    given = value.get("chat_template_kwargs")
    variables = openai.template_variables(value, given if isinstance(given, dict) else {})
    messages = wanted["messages"] if isinstance(wanted["messages"], list) else []
    return {**wanted, "messages": [_renamed(message) for message in messages], "chat_template_kwargs": variables}


def _renamed(message: object) -> object:
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    renamed = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {"reasoning": message["reasoning_content"], **renamed}


def _tokens(page: Any, name: str) -> list[int] | None:
    tokens = page.get(name) if isinstance(page, dict) else None
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
        return None
    return tokens if all(type(token) is int and 0 <= token < 1 << 32 for token in tokens) else None

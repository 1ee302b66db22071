"""Reads a request's prompt as tokens, by the router's tokenizer or a replica's, and identifies its conversation.

vLLM has two pages that tokenize: `/tokenize`, and `/v1/chat/completions/render` (under `--enable-scale-out`), which
takes the request itself. The router waits only for a short time: without an answer the prompt counts as unknown.
"""

import asyncio
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import xxhash
from pydantic import ValidationError

from kvtier.service.openai import CompletionPrompt, OpenAIError, Prompts, RequestBody, chat_of, template_variables
from kvtier.service.router.client import Deadlines, Headers, ReplicaFailed
from kvtier.service.router.replicas import Replica, ReplicaState

# --- its conversation ------------------------------------------------------------------------------------------------

_MAX_VALUES: Final = 1024  # JSON values of a conversation's head that are hashed; later ones rarely differ
_MAX_TEXT: Final = 64 << 10  # characters of one text that are hashed
# The field with the turns, by path.
_TURNS: Final = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
_HEAD_FIELDS: Final = ("model", "cache_salt", "system", "instructions")  # hashed besides the first turns


def session_of(path: str, body: Mapping[str, Any]) -> bytes | None:
    """A digest of a request's `prompt_cache_key`, else of everything up to the first user turn; None if it has neither.

    Chats, Anthropic's messages and OpenAI's responses have turns. A plain prompt has none, so it has no conversation.
    """
    key = body.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest([body.get("cache_salt"), key])
    turns = body.get(_TURNS.get(path, ""))
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not turns:
        return None
    return _digest([*(body.get(name) for name in _HEAD_FIELDS), *_head(turns)])


def _head(turns: Sequence[Any]) -> Sequence[Any]:
    """The turns up to the first user's: those after it differ in every request."""
    first = next((at for at, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), 0)
    return turns[: first + 1]


def _digest(values: Sequence[Any]) -> bytes:
    hasher = xxhash.xxh3_128()
    left = list(reversed(values))
    for _ in range(_MAX_VALUES):
        if not left:
            break
        value = left.pop()
        if isinstance(value, dict):
            hasher.update(b"{%d" % len(value))
            left.extend(part for item in list(islice(value.items(), _MAX_VALUES))[::-1] for part in reversed(item))
        elif isinstance(value, list):
            hasher.update(b"[%d" % len(value))
            left.extend(value[:_MAX_VALUES][::-1])
        else:
            text = str(value)
            leading = text[:_MAX_TEXT].encode("utf-8", "surrogatepass")
            hasher.update(b"%s%d:%s" % (type(value).__name__.encode(), len(text), leading))
    return hasher.digest()


# --- its prompt, read here -------------------------------------------------------------------------------------------

_LONG_BODY: Final = 8 << 10  # bytes of a body; longer ones are tokenized on a thread, so that streams go on meanwhile
CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
READ: Final = (CHAT, COMPLETION)  # paths whose prompts are read; all others are forwarded unread


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    tokens: list[int]
    cache_salt: str | None = None
    unknown: str | None = None  # why there are no tokens: `unreadable`, or `no_tokenizer`


async def read_prompt(path: str, value: Mapping[str, Any], num_bytes: int, prompts: Prompts | None) -> KnownPrompt:
    """The first prompt of a request's JSON. Raises nothing: another engine may accept what this code cannot read."""
    if num_bytes > _LONG_BODY or "chat_template_kwargs" in value:  # chat_template_kwargs can make a template slow
        return await asyncio.to_thread(_read, path, value, prompts)
    return _read(path, value, prompts)


def _read(path: str, value: Mapping[str, Any], prompts: Prompts | None) -> KnownPrompt:
    try:
        cache_salt = RequestBody.model_validate(value).cache_salt
        if path == CHAT:
            chat = chat_of(value)
            return (
                _no_tokenizer(cache_salt) if prompts is None else KnownPrompt(prompts.chat(chat).token_ids, cache_salt)
            )
        if value.get("truncate_prompt_tokens") is not None or value.get("prompt_embeds") is not None:
            return KnownPrompt([], cache_salt, "unreadable")
        first = CompletionPrompt.model_validate(value).prompts[0]
        if isinstance(first, list):
            return KnownPrompt(first, cache_salt)
        if prompts is None:
            return _no_tokenizer(cache_salt)
        adds_special = value.get("add_special_tokens") is not False
        return KnownPrompt(prompts.prompt(first, add_special_tokens=adds_special).token_ids, cache_salt)
    except (ValidationError, OpenAIError):
        return KnownPrompt([], unknown="unreadable")


def _no_tokenizer(cache_salt: str | None) -> KnownPrompt:
    return KnownPrompt([], cache_salt, "no_tokenizer")


# --- its prompt, tokenized by a replica ------------------------------------------------------------------------------

_MAX_PAGE: Final = 32 << 20  # bytes of an answer
_MAX_TOKENS: Final = 1 << 20  # of a prompt
_KEPT: Final = 1 << 22  # tokens of earlier prompts that are cached, four bytes each, …
_ENTRY: Final = 64  # … and the overhead of one prompt, in tokens
_LONG_PAGE: Final = 64 << 10  # bytes of an answer; a longer one is parsed on a thread
_AGAIN: Final = 30.0  # seconds until a replica without such a page, or a late one, is asked again
_LATE: Final = 3  # late answers in a row before a replica is left alone
_RENDER: Final = f"{CHAT}/render"
_TOKENIZE: Final = "/tokenize"
_ASKED: Final = ("model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message")
_FLAGS: Final = ("add_special_tokens", "chat_template")


@dataclass(slots=True)
class _Page:
    has_render: bool = True
    num_late: int = 0
    until: float = 0.0  # monotonic time at which it is asked again


class ReplicaTokenizer:
    """Asks replicas for the tokens of prompts, and caches them. Belongs to one event loop."""

    def __init__(self, timeout: float, headers: Headers) -> None:
        """`timeout` is seconds for one prompt; `headers` are sent with each question."""
        self._timeout = timeout
        self._deadlines = Deadlines(timeout, timeout, timeout)
        self._headers = [*headers, (b"content-type", b"application/json")]
        self._pages: dict[str, _Page] = {}
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_kept = 0

    async def of(
        self, replicas: Sequence[Replica], path: str, body: bytes, value: Mapping[str, Any]
    ) -> list[int] | None:
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

    async def _ask(
        self, replica: Replica, page: _Page, path: str, body: bytes, value: Mapping[str, Any]
    ) -> list[int] | None:
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
        try:
            return answer.status, await asyncio.to_thread(json.loads, data) if len(data) > _LONG_PAGE else json.loads(
                data
            )
        except (ValueError, RecursionError):
            return answer.status, None

    def _keep(self, key: bytes, tokens: list[int]) -> None:
        self._known[key] = array("I", tokens)
        self._num_kept += len(tokens) + _ENTRY
        while self._num_kept > _KEPT:
            self._num_kept -= len(self._known.popitem(last=False)[1]) + _ENTRY


def _question(value: Mapping[str, Any]) -> dict[str, Any]:
    """A request's body for `/tokenize`. Fields it does not have become template variables."""
    asked = {name: value[name] for name in (*_ASKED, *_FLAGS) if value.get(name) is not None}
    if "messages" not in asked:
        return asked
    given = value.get("chat_template_kwargs")
    variables = template_variables(value, given if isinstance(given, dict) else {})
    messages = asked["messages"] if isinstance(asked["messages"], list) else []
    return {**asked, "messages": [_renamed(message) for message in messages], "chat_template_kwargs": variables}


def _renamed(message: object) -> object:
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    renamed = {name: told for name, told in message.items() if name != "reasoning_content"}
    return {"reasoning": message["reasoning_content"], **renamed}


def _tokens(page: Any, name: str) -> list[int] | None:
    """The tokens in an answer; None if it has no valid ones."""
    tokens = page.get(name) if isinstance(page, dict) else None
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
        return None
    return tokens if all(type(token) is int and 0 <= token < 1 << 32 for token in tokens) else None

"""Identifies a conversation by what its turns have in common, so that they can stay at one replica."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import xxhash

_MAX_VALUES: Final = 1024  # JSON values of a conversation's head that are hashed; later ones rarely differ
_MAX_TEXT: Final = 64 << 10  # characters of one text that are hashed
# The field with the turns, by path.
_TURNS: Final = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
_FIELDS: Final = ("model", "cache_salt", "system", "instructions")  # hashed besides the first turns


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
    return _digest([*(body.get(name) for name in _FIELDS), *_head(turns)])


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

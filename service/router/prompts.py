"""A request's prompt as tokens, for a guess at who holds it. What cannot be told here, a replica will say or do."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kvtier.service.openai_bodies import ChatPrompt, CompletionPrompt
from kvtier.service.openai_errors import OpenAIError
from kvtier.service.prompts import Prompts

_LONG: Final = 8 << 10  # bytes of a body; longer ones are tokenised on a thread, so that streams go on meanwhile
_CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a prompt."""

    tokens: list[int]
    cache_salt: str | None = None
    unknown: str | None = None  # why there are no tokens


async def read(path: str, value: Mapping[str, Any], num_bytes: int, prompts: Prompts | None) -> Known:
    """The (first) prompt of a request's JSON. Raises nothing: it may be right for an engine that is not ours."""
    if num_bytes > _LONG:
        return await asyncio.to_thread(_read, path, value, prompts)
    return _read(path, value, prompts)


def _read(path: str, value: Mapping[str, Any], prompts: Prompts | None) -> Known:
    try:
        body = ChatPrompt.model_validate(value) if path == _CHAT else CompletionPrompt.model_validate(value)
        if prompts is not None:
            return Known(prompts.tokens(body), body.cache_salt)
        if isinstance(body, CompletionPrompt) and isinstance(body.prompts[0], list):
            return Known(body.prompts[0], body.cache_salt)
    except (ValidationError, OpenAIError):
        return Known([], unknown="unreadable")
    return Known([], unknown="no_tokenizer")

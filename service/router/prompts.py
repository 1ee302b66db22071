"""Reads a request's prompt as tokens, to find out who holds it. A prompt that cannot be read is no error here."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kvtier.service.openai import CompletionPrompt, OpenAIError, Prompts, RequestBody, chat_of

_LONG: Final = 8 << 10  # bytes of a body; longer ones are tokenized on a thread, so that streams go on meanwhile
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
    if num_bytes > _LONG or "chat_template_kwargs" in value:  # chat_template_kwargs can make a template slow
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

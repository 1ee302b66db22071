"""What a prompt must be: token ids that the model has, not too many; and what its blocks are called."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.engine.config import EngineConfig
from kvtier.engine.sequence import NamedPrompt, SamplingParams
from kvtier.tiers import RequestError
from kvtier.tiers.naming import HashCache, TokenChain, root_hash, token_array

if TYPE_CHECKING:
    from kvtier.engine.model import Model  # it needs torch, this module does not


def checked_tokens(prompt: ArrayLike, vocab_size: int) -> list[int]:
    """The prompt as a list of token ids; RequestError says what is wrong with it."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:  # a third of what numpy takes for a long one
        with suppress(TypeError, ValueError):
            ids = token_array(prompt)
            if np.frombuffer(ids, np.uintc).max() < vocab_size:
                return ids.tolist()
    try:
        tokens: NDArray[Any] = np.asarray(prompt)
    except ValueError as error:
        raise RequestError("the prompt is not one list; give a list of token ids") from error
    if tokens.size == 0:
        raise RequestError("the prompt is empty; give at least one token id")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"the prompt is a {tokens.ndim}-dimensional {tokens.dtype}; give a list of token ids")
    if (bad := np.flatnonzero((tokens < 0) | (tokens >= vocab_size))).size:
        token, position = int(tokens[bad[0]]), int(bad[0])
        raise RequestError(f"token id {token} at position {position}: this model's are 0 to {vocab_size - 1}")
    listed: list[int] = tokens.tolist()
    return listed


def is_text(value: object) -> bool:
    """A string that can be encoded, which one with lone surrogates cannot."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def require_room(num_tokens: int, max_tokens: int, context: int, fit_l1: int) -> None:
    """RequestError if prompt and answer together are more than the model's context, or than fits L1."""
    room = min(context, fit_l1)
    if num_tokens + max_tokens > room:
        limit = f"the model's context of {room}" if room == context else f"the {room} that fit L1"
        asked = f"{num_tokens} prompt tokens and max_tokens {max_tokens}"
        raise RequestError(f"{asked}: together more than {limit}; shorten one of them")


def require_possible(params: SamplingParams, model: "Model", config: EngineConfig) -> None:
    """RequestError if this model or its engine cannot answer as the parameters ask."""
    if params.logit_bias and (largest := max(params.logit_bias)) >= model.vocab_size:
        raise RequestError(f"logit_bias {largest}: this model's token ids are 0 to {model.vocab_size - 1}")
    if params.prompt_logprobs is not None and (config.exact or model.has_own_cache):
        what = "an exact engine" if config.exact else f"model kind {model.kind!r}"
        raise RequestError(f"prompt_logprobs {params.prompt_logprobs}: {what} computes none; leave it out")


class PromptNames:
    """Names the blocks of one engine's prompts. What it named lately it does not hash again. Thread-safe."""

    def __init__(self, fingerprint: bytes, config: EngineConfig) -> None:
        self._fingerprint = fingerprint
        self._config = config
        self._kept = HashCache()

    def named(self, token_ids: list[int], cache_salt: str | None) -> NamedPrompt:
        """The prompt with the names of its blocks, which no other salt has. RequestError: the salt is no text."""
        config = self._config
        cache_salt = config.cache_salt if cache_salt is None else cache_salt
        if cache_salt is not None and not is_text(cache_salt):
            raise RequestError(f"cache_salt {cache_salt!r}: use a string of Unicode characters")
        if not config.enable_prefix_caching:
            return NamedPrompt(token_ids, None)
        root = root_hash(self._fingerprint, cache_salt=cache_salt)
        chain = TokenChain(root, config.block_size, config.hash_scheme, kept=self._kept)
        chain.extend(token_ids)
        return NamedPrompt(token_ids, chain)

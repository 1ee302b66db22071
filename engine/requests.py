"""A request's input and output: prompt, sampling parameters, guides, and the results of steps."""

import math
import sys
from collections import Counter, abc
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.engine.config import EngineConfig
from kvtier.tiers import ChainHash, RequestError
from kvtier.tiers.naming import HashCache, TokenChain, root_hash, token_array
from kvtier.tiers.reuse import Hint, hint_of


class GuidedAnswer(Protocol):
    @property
    def is_cut(self) -> bool:
        """Whether it cannot be completed: `allowed` ends it here, unfinished."""

    def allowed(self) -> NDArray[np.uint32]:
        """The allowed next tokens: a bit each, the lowest first, at least one set."""


class Guide(Protocol):
    """Constrains answers. Immutable; one guide may serve any number of requests."""

    def start(self, token_ids: abc.Sequence[int], num_prompt_tokens: int) -> GuidedAnswer:
        """Follow an answer: the tokens after the prompt in `token_ids`, which grows. Some may exist already."""


SEED_RANGE: Final = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Temperature 0 is greedy. Raises RequestError for values out of range.

    With a `seed` the answer depends on prompt, parameters and logits alone, whatever else is in the batch.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0  # keep the likeliest tokens whose probabilities sum to this
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0  # keep tokens of at least this times the likeliest one's probability; 0: all
    presence_penalty: float = 0.0  # for tokens in the answer: see `sampler.py`, also for the next three
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: abc.Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    seed: int | None = None  # None: a random one per request
    stop_token_ids: abc.Collection[int] = ()
    min_tokens: int = 0  # before so many no end-of-sequence or stop token is sampled
    ignore_eos: bool = False
    keep_logits: bool = False  # every Output has its row of logits
    logprobs: int | None = None  # every Output has its token's, and those of so many likeliest tokens
    prompt_logprobs: int | None = None  # the same for the prompt's tokens: then all of it is computed, without a lookup
    guide: Guide | None = field(default=None, hash=False)  # constrains the answer
    is_call: bool = False  # the answer calls a tool, whatever its text, because of a guide
    hint: Hint | None = None  # whether the conversation continues, which decides the retention of its blocks
    has_penalties: bool = field(init=False, default=False)
    adjusts: bool = field(init=False, default=False)  # whether its logits are changed before sampling

    def __post_init__(self) -> None:
        for name, least, most in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise RequestError(f"{name} {value!r}: use a whole number from {least} to {most}")
        for name, lowest, highest, wanted in _NUMBERS:
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not lowest <= number <= highest:
                raise RequestError(f"{name} {number!r}: use {wanted}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEED_RANGE):
            raise RequestError(f"seed {self.seed!r}: use a whole number from 0 to 2**64 - 1, or None")
        biases: abc.Mapping[Any, Any] = self.logit_bias
        if not isinstance(biases, abc.Mapping):
            raise RequestError(f"logit_bias {biases!r}: use numbers by token id")
        for token_id, bias in biases.items():
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if type(token_id) is not int or token_id < 0 or not is_number or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias {token_id!r}: {bias!r}: use token ids, and numbers from -100 to 100")
        stops: Any = self.stop_token_ids
        if not isinstance(stops, abc.Collection) or any(type(each) is not int or each < 0 for each in stops):
            raise RequestError(f"stop_token_ids {stops!r}: use a list of token ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise RequestError(f"{name} {value!r}: use a whole number of at least 0, or None")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens}: more than max_tokens {self.max_tokens}; lower it")
        if self.min_tokens and self.guide is not None:
            raise RequestError(
                f"min_tokens {self.min_tokens}: a guide decides where an answer ends; leave out one of them"
            )
        penalises = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        object.__setattr__(self, "has_penalties", bool(penalises))
        object.__setattr__(
            self, "adjusts", bool(penalises or self.logit_bias or self.min_tokens or self.guide is not None)
        )
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        if self.hint is not None:
            object.__setattr__(self, "hint", hint_of(self.hint))


_INTEGERS: Final = (("max_tokens", 1, 2**31), ("min_tokens", 0, 2**31), ("top_k", 0, 2**31))
_NUMBERS: Final = (
    ("temperature", 0.0, sys.float_info.max, "0 (greedy) or a positive number"),
    ("top_p", math.ulp(0.0), 1.0, "a number above 0 and up to 1"),
    ("min_p", 0.0, 1.0, "a number from 0 to 1"),
    ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("repetition_penalty", 0.01, 100.0, "a number from 0.01 to 100"),  # beyond these, fp32 logits overflow
)


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A validated prompt and the names of its blocks, for any number of requests. Read-only."""

    token_ids: list[int]
    chain: TokenChain | None  # None without prefix caching
    cache_salt: str | None = None
    fingerprint: bytes = b""  # of the model it was named for


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's, and those of the likeliest tokens at its position, likeliest first."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, and its row of logits if the request keeps it ([vocab], fp32)."""

    token_id: int
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One step's result for one request: a token, its end, or both."""

    request_id: str
    token_id: int | None  # None only for an abort
    finish_reason: FinishReason | None = None
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)  # [vocab], if requested
    logprobs: TokenLogprobs | None = None  # the same


def checked_tokens(prompt: ArrayLike, vocab_size: int) -> list[int]:
    """The prompt as a list of token ids; RequestError if it is invalid."""
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
    """Whether it is a string that can be encoded, i.e. without lone surrogates."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


class PromptNames:
    """Names the blocks of one engine's prompts, with a cache of recent names. Thread-safe."""

    def __init__(self, fingerprint: bytes, config: EngineConfig) -> None:
        self._fingerprint = fingerprint
        self._config = config
        self._kept = HashCache()
        self._last: tuple[str | None, ChainHash] | None = None  # a salt, and its root

    def named(self, token_ids: list[int], cache_salt: str | None) -> NamedPrompt:
        """The prompt with its blocks' names, which depend on the salt. RequestError if the salt is not text."""
        config = self._config
        cache_salt = config.cache_salt if cache_salt is None else cache_salt
        if cache_salt is not None and not is_text(cache_salt):
            raise RequestError(f"cache_salt {cache_salt!r}: use a string of Unicode characters")
        if not config.enable_prefix_caching:
            return NamedPrompt(token_ids, None)
        last = self._last
        if last is None or last[0] != cache_salt:
            last = self._last = cache_salt, root_hash(self._fingerprint, cache_salt=cache_salt)
        chain = TokenChain(last[1], config.block_size, config.hash_scheme, kept=self._kept)
        chain.extend(token_ids)
        return NamedPrompt(token_ids, chain, cache_salt, self._fingerprint)

    def current(self, prompt: NamedPrompt) -> NamedPrompt:
        """The prompt under its present names: weights may have changed since it was named."""
        return prompt if prompt.fingerprint == self._fingerprint else self.named(prompt.token_ids, prompt.cache_salt)


class UsedTokens:
    """A request's tokens for its penalties. Derived from its token list alone, so a repeated step leaves no trace."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, *, repeats: bool) -> None:
        """`token_ids`: the request's own list, which grows. `repeats`: count its prompt, too."""
        self._token_ids = token_ids
        self._counts: Counter[int] = Counter()  # of the answer
        self._num_seen = num_prompt_tokens
        self._prompt = np.unique(token_ids[:num_prompt_tokens]) if repeats else np.empty(0, np.int64)

    def answer(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self._counts.update(self._token_ids[self._num_seen :])
        self._num_seen = len(self._token_ids)
        return np.fromiter(self._counts.keys(), np.int64), np.fromiter(self._counts.values(), np.int64)

    def all(self, answer: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.union1d(self._prompt, answer)


@dataclass(slots=True)
class Sampling:
    seed: int
    scores: dict[int, TokenLogprobs] | None  # `prompt_logprobs` so far, by position; the first token has none
    used: UsedTokens | None = None  # with penalties, from the first token on
    guided: GuidedAnswer | None = None  # with a guide, likewise

"""One request as the engine sees it: its tokens, its blocks, how far it is computed, how to continue it."""

import math
import secrets
import sys
import time
from collections import abc
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.guided import Guide, GuidedAnswer
from kvtier.engine.used_tokens import UsedTokens
from kvtier.tiers import L1, L2, TIERS, ChainHash, RequestError
from kvtier.tiers.hierarchy import Attribution
from kvtier.tiers.naming import TokenChain
from kvtier.tiers.pool import Causes
from kvtier.tiers.reuse import Hint, hint_of

if TYPE_CHECKING:  # it needs torch, this module does not
    from kvtier.tiers.copies import BlockPool

ALL: Final = sys.maxsize  # tokens: more than any sequence has
_SEED_RANGE: Final = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Temperature 0 is greedy. Raises RequestError for values out of range.

    With a `seed` the answer depends on prompt, parameters and logits alone, whatever else is in the batch.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0  # keep tokens that are at least so likely as this times the likeliest; 0: all
    presence_penalty: float = 0.0  # of tokens that the answer has: see `adjusting.py`, also for the next three
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: abc.Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    seed: int | None = None  # None: another one for each request
    stop_token_ids: abc.Collection[int] = ()
    ignore_eos: bool = False
    keep_logits: bool = False  # every Output carries its row of logits
    logprobs: int | None = None  # every Output carries its token's, and those of so many likeliest tokens
    prompt_logprobs: int | None = None  # the same of the prompt's tokens: then all of it is computed, nothing looked up
    guide: Guide | None = field(default=None, hash=False)  # what the answer may be
    is_call: bool = False  # the answer calls a tool, whatever its text: a guide has it so
    hint: Hint | None = None  # whether the conversation goes on: by this its blocks are kept, or go
    has_penalties: bool = field(init=False, default=False)
    adjusts: bool = field(init=False, default=False)  # whether its logits are changed before a token is chosen

    def __post_init__(self) -> None:
        for name, least, most in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise RequestError(f"{name} {value!r}: use a whole number from {least} to {most}")
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise RequestError(f"temperature {self.temperature!r}: use 0 (greedy) or a positive number")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p {self.top_p!r}: use a number above 0 and up to 1")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < _SEED_RANGE):
            raise RequestError(f"seed {self.seed!r}: use a whole number from 0 to 2**64 - 1, or None")
        self._check_adjustments()
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        if self.hint is not None:
            object.__setattr__(self, "hint", hint_of(self.hint))

    def _check_adjustments(self) -> None:
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most:
                raise RequestError(f"{name} {value!r}: use a number from {least:g} to {most:g}")
        for token_id, bias in self.logit_bias.items():
            if type(token_id) is not int or token_id < 0 or not _is_number(bias) or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias {token_id!r}: {bias!r}: use token ids, and numbers from -100 to 100")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise RequestError(f"{name} {value!r}: use a whole number of at least 0, or None")
        penalises = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        object.__setattr__(self, "has_penalties", bool(penalises))
        object.__setattr__(self, "adjusts", bool(penalises or self.logit_bias or self.guide is not None))


_INTEGERS: Final = (("max_tokens", 1, 2**31), ("top_k", 0, 2**31))
_NUMBERS: Final = (
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),  # beyond these no logits of fp32 are left
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt that an engine has looked at, and the names of its blocks: for any number of requests. Read only."""

    token_ids: list[int]
    chain: TokenChain | None  # None where nothing is cached


class SequenceState(Enum):
    """WAITING → (LOADING →) RUNNING → FINISHED; preemption leads back to WAITING, an abort to FINISHED."""

    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds its blocks; a copy from L2 is under way
    RUNNING = "running"  # holds its blocks; computed chunk by chunk, then token by token
    FINISHED = "finished"  # holds no block


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's, and those of the likeliest tokens in its place, likeliest first."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, and the row of logits it was drawn from where the request keeps it ([vocab], fp32)."""

    token_id: int
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought one request: a token, its end, or both."""

    request_id: str
    token_id: int | None  # None only for an abort
    finish_reason: FinishReason | None = None
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)  # [vocab], if asked for
    logprobs: TokenLogprobs | None = None  # the same


class Reuse(Protocol):
    """KV that a sequence takes from elsewhere than its own prefix, as the scheduler sees it: `SegmentReuse`."""

    @property
    def is_waiting(self) -> bool:
        """Whether what it reuses is still being loaded or computed."""

    @property
    def is_due(self) -> bool:
        """Whether it is to be blended: behind its exact tokens, up to the last one."""

    @property
    def is_early(self) -> bool:
        """Whether it was admitted, and some of its segments are still to come."""

    def may_start(self, num_seats: int) -> bool:
        """Whether it may be admitted now; before its segments are there only once, and if they have seats, too."""

    def allocate(self, pool: "BlockPool", num_blocks: int, leaving: int) -> list[int] | None:
        """The sequence's own blocks, as `BlockPool.allocate`; holds what it is going to copy until `let_go`."""

    def settle(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused behind `num_cached` tokens; returns where that begins, None if nothing is."""

    def claim(self, sequence: "Sequence", budget: int) -> int:
        """How many of the step's tokens its blend takes, the last token with it; 0: it waits for segments."""

    def let_go(self, pool: "BlockPool") -> None:
        """Give back what it holds, and drop its blend. Idempotent."""


class Sequence:
    """A request's tokens and the blocks that hold their KV. `chain` names the prompt's.

    While it runs, its block table covers all of its tokens; num_named and num_stored only grow until it is preempted.
    """

    chain: TokenChain  # the hashes of its tokens so far; only where something is cached

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, chain: TokenChain | None, order: int
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = secrets.randbelow(_SEED_RANGE) if params.seed is None else params.seed
        self.order = order  # of arrival
        self.token_ids = prompt  # prompt, then answer
        self.num_prompt_tokens = self.num_tokens = len(prompt)  # num_tokens: prompt and answer so far
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0  # tokens whose KV is in the blocks
        self.num_named = 0  # leading blocks offered to L1's index
        self.num_stored = 0  # leading blocks handed to the connector, or that came from it
        self.num_loading = 0  # tokens of the load under way
        self.is_in_pieces = False  # more is held than L2 takes at once: the rest is loaded behind it
        self.num_passed_over = 0  # later requests admitted before this one
        self.num_preempted = 0
        self.num_l1_tokens = 0  # cached tokens at the first admission, by where they were
        self.num_external_tokens = 0
        self.found: Attribution | None = None  # where the tiers below L1 had its blocks then, if some were loaded
        self.causes: Causes = {}  # why the others of its blocks were nowhere then
        self.found_in_part: str | None = None  # the tier of the block of which only the beginning was loaded
        self.num_generated = 0  # tokens of the answer so far
        self.arrived = time.monotonic()
        self.ttft: float | None = None  # seconds from arrival to the first token
        self.reuse: Reuse | None = None  # of segments
        self.is_segment = False  # a segment by itself, nobody's request
        self.num_exact = ALL  # leading tokens whose KV is exact: of the others nothing is named
        self.num_lasting = ALL  # leading tokens that the next turn has, too: it lacks reasoning, and what follows moves
        self.num_shareable = ALL  # leading tokens of which others may find the blocks
        self.num_segment_tokens = 0  # of the prompt: taken from segments for its first token
        self.num_repaired_tokens = 0  # of these: computed anew
        self.cache: Any = None  # transformers' own, while it runs: of a model that has one for each sequence
        self.states: Any = None  # of a model with recurrent states: `RequestStates`
        self.used: UsedTokens | None = None  # of a request with penalties, from its first token on
        self.guided: GuidedAnswer | None = None  # of one with a guide, likewise
        # Of a request that asks for its prompt's logprobs: what was computed so far, by position. The first has none.
        self.scores: dict[int, TokenLogprobs] | None = None if params.prompt_logprobs is None else {}
        self._is_named = chain is not None
        if chain is not None:
            self.chain = chain
        # Chain hashes of its full blocks, which the chain itself extends; empty where nothing is cached.
        self.hashes: abc.Sequence[ChainHash] = () if chain is None else chain.hashes

    @property
    def cached_tokens(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by the tier they came from; what was found and not loaded was computed.

        Valid once it has a token.
        """
        in_part = self.num_external_tokens % self.chain.block_size if self.found_in_part else 0
        cached, left = {L1: self.num_l1_tokens}, self.num_external_tokens - in_part
        for tier in (name for name in TIERS if name != L1):  # nearest first
            num_found = 0 if self.found is None else self.found[tier] * self.chain.block_size
            cached[tier] = min(left, num_found)
            left -= cached[tier]
        cached[L2] += left  # came to L2 meanwhile: whatever is loaded comes from there
        if self.found_in_part:
            cached[self.found_in_part] += in_part
        return {TIERS[tier].label: num_tokens for tier, num_tokens in cached.items()}

    @property
    def looks_up(self) -> bool:
        """Whether cached blocks are of use to it: not where every token of its prompt is to be scored."""
        return self.scores is None or self.num_generated > 0

    @property
    def is_cut(self) -> bool:
        """Whether its guide could follow the answer no further, and ends it unfinished."""
        return self.guided is not None and self.guided.is_cut

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """One more generated token; its KV is computed by the next step."""
        if self.ttft is None:
            self.ttft = time.monotonic() - self.arrived
        self.token_ids.append(token_id)
        self.num_tokens += 1
        self.num_generated += 1
        if self._is_named:
            self.chain.extend((token_id,))

"""One request inside the engine: its tokens and blocks, its part of a step, its finished answer. No torch."""

import secrets
import sys
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.connector import ConnectedRequest, StepPlan
from kvtier.engine.requests import SEED_RANGE, FinishReason, Sampling, SamplingParams, TokenLogprobs
from kvtier.tiers import L1, TIERS, ChainHash
from kvtier.tiers.naming import TokenChain
from kvtier.tiers.pool import Causes

ALL: Final = sys.maxsize  # tokens: more than any sequence has


class SequenceState(Enum):
    """WAITING → (LOADING →) RUNNING → FINISHED; preemption leads back to WAITING, an abort to FINISHED."""

    WAITING = "waiting"  # has no block
    LOADING = "loading"  # has its blocks; a copy from L2 is under way
    RUNNING = "running"  # has its blocks; computed chunk by chunk, then token by token
    FINISHED = "finished"  # has no block


class Reuse(Protocol):
    """KV that a sequence reuses from elsewhere than its own prefix, as the scheduler sees it: `SegmentReuse`."""

    num_reused: int  # tokens of the prompt, when the first token was computed
    num_repaired: int  # of these: recomputed

    @property
    def is_waiting(self) -> bool:
        """Whether its segments are still being loaded or computed."""

    @property
    def is_due(self) -> bool:
        """Whether it is to be blended: after its exact tokens, up to the last one."""

    @property
    def is_early(self) -> bool:
        """Whether it was admitted while some of its segments are still missing."""

    def may_start(self, num_seats: int) -> bool:
        """Whether it may be admitted now; before its segments arrive only once, and if they get seats, too."""

    def allocate(self, num_blocks: int, leaving: int) -> list[int] | None:
        """The sequence's own blocks, as `BlockPool.allocate`; references the blocks to copy until `release`."""

    def resolve(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused after `num_cached` tokens; returns where that begins, None if nothing is."""

    def claim(self, sequence: "Sequence", budget: int) -> int:
        """How many of the step's tokens its blend takes, including the last token; 0: it waits for segments."""

    def release(self) -> None:
        """Release its blocks, and drop its blend. Idempotent."""


Find = Callable[["Sequence", int], Reuse | None]
"""Finds what a sequence may reuse after so many cached tokens."""


class Sequence:
    """A request's tokens and the blocks that hold their KV. `chain` names the prompt's.

    While it runs, its block table covers all of its tokens; num_named and num_stored only grow until it is preempted.
    """

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, chain: TokenChain | None, order: int
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.order = order  # of arrival
        self.token_ids = prompt  # prompt, then answer
        self.num_prompt_tokens = self.num_tokens = len(prompt)  # num_tokens: prompt and answer so far
        self.num_generated = 0  # tokens of the answer so far
        self.is_named = chain is not None
        if chain is not None:
            self.chain = chain  # the hashes of its tokens so far; only with prefix caching
        # Chain hashes of its full blocks, extended by the chain itself; empty without prefix caching.
        self.hashes: abc.Sequence[ChainHash] = () if chain is None else chain.hashes
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0  # tokens whose KV is in the blocks
        self.num_named = 0  # leading blocks offered to L1's index
        self.num_stored = 0  # leading blocks handed to the connector, or that came from it
        self.num_loading = 0  # tokens of the load under way
        self.is_in_pieces = False  # L2 cannot load all of it at once: the rest is loaded next
        self.num_exact = ALL  # leading tokens whose KV is exact: later blocks are not named
        self.num_shareable = ALL  # leading tokens whose blocks other requests may find
        self.looks_up = params.prompt_logprobs is None  # else every token of its prompt is computed, and scored
        self.num_passed_over = 0  # later requests admitted before this one
        self.num_preempted = 0
        self.num_l1_tokens = 0  # cached tokens at the first admission, by source
        self.num_external_tokens = 0
        self.lookup: ConnectedRequest | None = None  # the lower tiers' lookup then
        self.arrived = time.monotonic()
        self.ttft: float | None = None  # seconds from arrival to the first token
        self.stats: Counter[str] = Counter()  # the scheduler's counters for requests, or those for segments
        self.reuse: Reuse | None = None  # segment reuse
        self.find: Find | None = None  # of a prompt without marks, until its exact prefix is known
        self.only_loads = False  # it ends if the tiers lack a block of it
        self.cache: Any = None  # transformers' cache while it runs, if the model has one per sequence
        seed = secrets.randbelow(SEED_RANGE) if params.seed is None else params.seed
        self.sampling = Sampling(seed, None if params.prompt_logprobs is None else {})

    @property
    def cached_tokens(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by the tier they came from.

        Valid once it has a token.
        """
        external = self.num_external_tokens
        loaded = dict.fromkeys(TIERS, 0) if self.lookup is None else self.lookup.loaded_by_tier(external)
        return {TIERS[tier].label: num + (tier == L1) * self.num_l1_tokens for tier, num in loaded.items()}

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def causes(self) -> Causes:
        """Why blocks of it were missing in all tiers at its first admission."""
        return {} if self.lookup is None else self.lookup.missed


@dataclass(frozen=True, slots=True)
class Chunk:
    sequence: Sequence
    start: int
    end: int
    samples: bool  # whether its last row samples the next token
    blends: int = 0  # of the step's tokens: those for its blend, which fills the KV up to `start`


@dataclass(slots=True)
class Batch:
    """One step's work. Empty if all requests wait."""

    chunks: list[Chunk]
    num_tokens: int  # that the step computes
    plan: StepPlan
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks of L1, source and target, before it computes
    started: float = field(default_factory=time.perf_counter)
    has_blended: bool = False  # its duration does not measure prefill
    arrived: bool = True  # set by the runner: False if a layerwise load failed or was late

    def blended(self, unfinished: abc.Collection[Chunk]) -> None:
        """Blends used their part of the step; drop chunks after a blend that is not finished."""
        self.has_blended = True
        self.chunks = [chunk for chunk in self.chunks if chunk not in unfinished]
        self.num_tokens = sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. Tokens from reused segments are approximate, and not counted as cached."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: list[NDArray[np.float32]] = field(default_factory=list, repr=False)  # one row per token, if requested
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # one for each token, if requested
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # from the second token on, likewise
    num_prompt_tokens: int = 0
    num_l1_tokens: int = 0  # of the prompt: found in L1
    num_external_tokens: int = 0  # of the prompt: loaded from the tiers below
    num_segment_tokens: int = 0  # of the prompt: taken from segments
    num_repaired_tokens: int = 0  # of those from segments: recomputed
    ttft: float | None = None  # seconds from arrival to the first token

    @property
    def repair_share(self) -> float | None:
        """The share of the tokens from segments that was recomputed; None: there are none."""
        return self.num_repaired_tokens / self.num_segment_tokens if self.num_segment_tokens else None

"""One request inside the engine: its tokens and blocks, its part of a step, its finished answer. No torch."""

import sys
import time
from collections import Counter, abc
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.connector import ConnectedRequest, StepPlan
from kvtier.engine.requests import FinishReason, Output, Sampling, SamplingParams, TokenLogprobs
from kvtier.tiers import L1, L2, TIERS, ChainHash
from kvtier.tiers.naming import TokenChain
from kvtier.tiers.pool import Causes

if TYPE_CHECKING:
    pass


ALL: Final = sys.maxsize  # tokens: more than any sequence has


class SequenceState(Enum):
    """WAITING → (LOADING →) RUNNING → FINISHED; preemption leads back to WAITING, an abort to FINISHED."""

    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds its blocks; a copy from L2 is under way
    RUNNING = "running"  # holds its blocks; computed chunk by chunk, then token by token
    FINISHED = "finished"  # holds no block


class Reuse(Protocol):
    """KV that a sequence takes from elsewhere than its own prefix, as the scheduler sees it: `SegmentReuse`."""

    num_reused: int  # tokens of the prompt, for the first one of the answer
    num_repaired: int  # of these: computed anew

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

    def allocate(self, num_blocks: int, leaving: int) -> list[int] | None:
        """The sequence's own blocks, as `BlockPool.allocate`; holds what it is going to copy until `release`."""

    def resolve(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused behind `num_cached` tokens; returns where that begins, None if nothing is."""

    def claim(self, sequence: "Sequence", budget: int) -> int:
        """How many of the step's tokens its blend takes, the last token with it; 0: it waits for segments."""

    def release(self) -> None:
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
        self.order = order  # of arrival
        self.token_ids = prompt  # prompt, then answer
        self.num_prompt_tokens = self.num_tokens = len(prompt)  # num_tokens: prompt and answer so far
        self.num_generated = 0  # tokens of the answer so far
        if chain is not None:
            self.chain = chain
        # Chain hashes of its full blocks, which the chain itself extends; empty where nothing is cached.
        self.hashes: abc.Sequence[ChainHash] = () if chain is None else chain.hashes
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0  # tokens whose KV is in the blocks
        self.num_named = 0  # leading blocks offered to L1's index
        self.num_stored = 0  # leading blocks handed to the connector, or that came from it
        self.num_loading = 0  # tokens of the load under way
        self.is_in_pieces = False  # more is held than L2 takes at once: the rest is loaded behind it
        self.num_exact = ALL  # leading tokens whose KV is exact: of the others nothing is named
        self.num_shareable = ALL  # leading tokens of which others may find the blocks
        self.looks_up = params.prompt_logprobs is None  # else every token of its prompt is computed, and scored
        self.num_passed_over = 0  # later requests admitted before this one
        self.num_preempted = 0
        self.num_l1_tokens = 0  # cached tokens at the first admission, by where they were
        self.num_external_tokens = 0
        self.lookup: ConnectedRequest | None = None  # what the tiers below L1 had of it then
        self.arrived = time.monotonic()
        self.ttft: float | None = None  # seconds from arrival to the first token
        self.stats: Counter[str] = Counter()  # what it counts in: the scheduler's own, or that of segments
        self.reuse: Reuse | None = None  # of segments
        self.cache: Any = None  # transformers' own, while it runs: of a model that has one for each sequence
        self.sampling = Sampling(params)

    @property
    def cached_tokens(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by the tier they came from; what was found and not loaded was computed.

        Valid once it has a token.
        """
        tier_in_part = None if self.lookup is None else self.lookup.found_in_part
        found = None if self.lookup is None else self.lookup.found
        in_part = self.num_external_tokens % self.chain.block_size if tier_in_part else 0
        cached, left = {L1: self.num_l1_tokens}, self.num_external_tokens - in_part
        for tier in (name for name in TIERS if name != L1):  # nearest first
            num_found = 0 if found is None else found[tier] * self.chain.block_size
            cached[tier] = min(left, num_found)
            left -= cached[tier]
        cached[L2] += left  # came to L2 meanwhile: whatever is loaded comes from there
        if tier_in_part:
            cached[tier_in_part] += in_part
        return {TIERS[tier].label: num_tokens for tier, num_tokens in cached.items()}

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def causes(self) -> Causes:
        """Why blocks of it were in no tier at its first admission."""
        return {} if self.lookup is None else self.lookup.missed

    def append(self, token_id: int) -> None:
        """One more generated token; its KV is computed by the next step."""
        if self.ttft is None:
            self.ttft = time.monotonic() - self.arrived
        self.token_ids.append(token_id)
        self.num_tokens += 1
        self.num_generated += 1
        self.looks_up = True
        if hasattr(self, "chain"):
            self.chain.extend((token_id,))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end` of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    end: int
    samples: bool  # whether its last row brings the next token
    blends: int = 0  # of the step's tokens that it has for a blend before it; that fills what is left up to `start`


@dataclass(slots=True)
class Batch:
    """One step's work. Empty where everybody waits."""

    chunks: list[Chunk]
    num_tokens: int  # that the step computes
    plan: StepPlan
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks of L1, source and target, before it computes
    started: float = field(default_factory=time.perf_counter)
    has_blended: bool = False  # what it took says nothing of its tokens
    arrived: bool = True  # set by the runner: False where a layerwise load failed or was late

    def blended(self, unfinished: abc.Collection[Chunk]) -> None:
        """Blends took their part of the step; what stands behind one that goes on in another step is not computed."""
        self.has_blended = True
        self.chunks = [chunk for chunk in self.chunks if chunk not in unfinished]
        self.num_tokens = sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def position(self) -> float:
        """How many tokens those that it computes follow, on average."""
        seen = sum((chunk.start + chunk.end) / 2 * (chunk.end - chunk.start) for chunk in self.chunks)
        return seen / max(1, self.num_tokens)


@dataclass(slots=True)
class Completion:
    """A finished answer. Reused segments are approximate, and so beside the cached tokens, never among them."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: list[NDArray[np.float32]] = field(default_factory=list, repr=False)  # one row per token, if asked for
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # one for each token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # from the second token on, likewise
    num_prompt_tokens: int = 0
    num_l1_tokens: int = 0  # of the prompt: found in L1
    num_external_tokens: int = 0  # of the prompt: loaded from the tiers below
    num_segment_tokens: int = 0  # of the prompt: taken from segments
    num_repaired_tokens: int = 0  # of those from segments: computed anew
    ttft: float | None = None  # seconds from arrival to the first token

    def add(self, output: Output) -> None:
        """One more step's."""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.logits is not None:
            self.logits.append(output.logits)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.finish_reason = output.finish_reason

    def account(self, request: Sequence) -> None:
        """Take over what the request's end left of it."""
        self.num_l1_tokens = request.num_l1_tokens
        self.num_external_tokens = request.num_external_tokens
        if request.reuse is not None:
            self.num_segment_tokens = request.reuse.num_reused
            self.num_repaired_tokens = request.reuse.num_repaired
        self.ttft = request.ttft
        if (scores := request.sampling.scores) is not None:
            self.prompt_logprobs = [scores[position] for position in sorted(scores)]

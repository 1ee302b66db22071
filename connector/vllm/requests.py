"""What the scheduler half remembers: of each live vLLM request, of each copy under way, of the next message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from kvtier.connector import BlockChain
from kvtier.connector.vllm.drafts import AheadChain
from kvtier.connector.vllm.keys import OwnChain, VllmChain
from kvtier.connector.vllm.slots import GroupLane
from kvtier.connector.vllm.states import ClosedRequest, StateRequest
from kvtier.tiers import ChainHash

Tables = Sequence[Sequence[int]]
"""A request's block ids, one table for each KV group."""

NULL: Final = 0  # vLLM's block that stands for "not kept", e.g. behind a sliding window


@dataclass(slots=True)
class Awaited:
    """What a prefill node says it has stored, and until when a request waits for it."""

    num_tokens: int
    names: list[ChainHash]  # of the blocks, and of the states behind them
    until: float  # on the monotonic clock
    look_at: float = 0.0


@dataclass(slots=True)
class TrackedRequest:
    """A live request of vLLM's. Implements the scheduler side's `Request`."""

    request: Any
    request_id: str
    keys: VllmChain | AheadChain | OwnChain
    stored: int | None = None  # leading blocks stored, loaded or found; None: not scheduled yet
    refused: int | None = None  # the first of them that got no slot: offered again with the next ones, or at the end
    adapter: bytes | None = None  # the weights it is named by, beside the model's
    asked: int = 0  # tokens vLLM had at the last lookup
    answer: tuple[int | None, bool] | None = None
    good_until: float = 0.0
    patient_until: float | None = None  # for stores of others that are under way; None: not asked for yet
    synchronous: bool = False  # how the answer's load would be made
    tables: Tables = ()  # as of its last load or store
    closed: ClosedRequest | None = None  # what was looked up for it, if the model has states
    states: StateRequest | None = None  # if the model has states
    has_guessed: bool = False  # tiers that nodes share were asked for its last border
    gives_up: bool = False  # nothing more is loaded for it with its states: a load failed once
    is_counted: bool = False  # its misses, where nothing could be asked for
    awaited: Awaited | None = None  # what a prefill node says it stored, until that is here or took too long
    border: int = 0  # the last one, in its prompt, behind which all blocks and states were offered to the tiers

    @property
    def chain(self) -> BlockChain:
        return self.keys.current()

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)


@dataclass(slots=True)
class NextStep:
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)  # blocks that loads write to, by vLLM's ids


def whole_runs(
    lanes: Sequence[tuple[int, GroupLane]], tables: Tables, blocks: range, block_size: int
) -> list[Sequence[int]]:
    """The runs among kvtier's blocks of which vLLM has all that a prompt needs to go on behind them.

    Of nearly every request that is one run of all. `lanes` are those of K and V; `block_size` is in tokens.
    """
    first, last = blocks.start, blocks.stop
    if all(NULL not in tables[lane.group][first * lane.count : last * lane.count] for _, lane in lanes):
        return [blocks]

    def is_whole(block: int) -> bool:
        return all(
            tables[lane.group][lane.position(block)] != NULL or not lane.is_needed(block, block_size)
            for _, lane in lanes
        )

    return [list(run) for kept, run in groupby(blocks, is_whole) if kept]


def touched(output: Any) -> set[int]:
    """Blocks that vLLM zeroes, or copies others to, before a step's compute."""
    copied = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
    return copied.union(output.new_block_ids_to_zero or ())


def handed_out(output: Any, group_sizes: Sequence[int]) -> set[int]:
    """Blocks that vLLM gives out anew in this step: only those can be written to while a store still reads them.

    Among them are those that it zeroes or copies others to. `group_sizes` are the tokens in a block of each KV group.
    """
    others = touched(output)
    new: list[tuple[Tables, int]] = [(data.block_ids, data.num_computed_tokens) for data in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    for request_id, tables, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if tables is not None:
            new.append((tables, num_computed if request_id in cached.resumed_req_ids else 0))
    return others | {
        block
        for tables, num_computed in new
        for table, size in zip(tables, group_sizes, strict=True)
        for block in table[num_computed // size :]
    }

"""The scheduler side of models with recurrent states: prompts go on from borders where blocks and states are held."""

from collections.abc import Sequence

from kvtier.connector import SchedulerSide
from kvtier.connector.vllm.requests import TrackedRequest
from kvtier.connector.vllm.states import ClosedRequest, StateRequest, last_border
from kvtier.tiers.hierarchy import Attribution, Pending

_NULL = 0  # vLLM's block that stands for "not kept"


def exactly(block: int) -> int:
    """A worker's block among positions of tables, and back: below zero, where no position is."""
    return -1 - block


class StateSide:
    """What `SchedulerHalf` asks and tells of states. Blocks without their states are never promised."""

    def __init__(self, side: SchedulerSide, groups: Sequence[int], num_blocks: int, block_size: int) -> None:
        """`groups` are vLLM's numbers of the groups that have a state, `num_blocks` its number of blocks."""
        self._side = side
        self._groups = groups
        self._num_blocks = num_blocks
        self._size = block_size

    def lookup(self, row: TrackedRequest) -> int | Pending:
        """How many tokens beyond the `row.asked` in L1 can be loaded with the states behind them, or PENDING."""
        first = row.asked // self._size
        if row.gives_up:
            return 0
        if row.closed is None or row.closed.border <= first:
            self.let_go(row)
            usable = min(len(row.chain.hashes), (row.num_tokens - 1) // self._size)
            border = last_border(self._side.tiers, row.chain, range(first + 1, usable + 1), self._groups)
            if not border:
                self._count_misses(row, usable)
                return 0
            row.closed = ClosedRequest.of(row.request_id, row.chain, border, self._groups)
        promised = self._side.lookup(row.closed, row.asked)
        if isinstance(promised, Pending):
            return promised
        num_blocks = row.closed.border - first
        if promised == (num_blocks + len(self._groups)) * self._size:
            return num_blocks * self._size
        self.let_go(row)
        return 0

    def load(self, row: TrackedRequest, num_tokens: int) -> int:
        """The request got its blocks: load what was promised. Returns `num_tokens`, or 0 if it is gone."""
        closed = row.closed
        if closed is None:
            row.gives_up = True
            return 0
        at = [row.tables[group][closed.border - 1] for group in self._groups]
        in_all = num_tokens + len(at) * self._size
        is_whole = row.asked + num_tokens == closed.border * self._size and _NULL not in at
        blocks = [*range(closed.border), *self._exact(at)]
        loading = self._side.allocated(closed.request_id, blocks, in_all if is_whole else 0)
        row.gives_up = loading != in_all
        return 0 if row.gives_up else num_tokens

    def offer(self, row: TrackedRequest, handed: Sequence[tuple[int, int, int]], *, prompt_only: bool) -> None:
        """Plan stores of the states that vLLM has at the end of blocks: (its group, its block, tokens before it)."""
        num_named = (row.request.num_prompt_tokens if prompt_only else row.num_tokens) // self._size
        for group, block, num_tokens in handed:
            border = num_tokens // self._size
            if num_tokens % self._size or not 0 < border <= min(num_named, len(row.chain.hashes)):
                continue
            if row.states is None:
                row.states = StateRequest.of(row.request_id, row.chain, self._groups)
                self._side.admit(row.states)
            at = row.states.chain.index(border - 1, group)
            self._side.store(row.states.request_id, at, [exactly(group * self._num_blocks + block)])

    def targets(self, row: TrackedRequest) -> list[int]:
        """The workers' blocks that the request's states are loaded to, as `exactly` names them."""
        border = 0 if row.closed is None else row.closed.border
        return self._exact([row.tables[group][border - 1] for group in self._groups]) if border else []

    def let_go(self, row: TrackedRequest) -> None:
        """Drop what was promised to the request."""
        if row.closed is not None:
            self._side.finished(row.closed.request_id)
            row.closed = None

    def _exact(self, blocks: Sequence[int]) -> list[int]:
        return [exactly(group * self._num_blocks + block) for group, block in zip(self._groups, blocks, strict=True)]

    def _count_misses(self, row: TrackedRequest, num_blocks: int) -> None:
        if not row.is_counted:
            row.is_counted = True
            self._side.tiers.count(Attribution(num_blocks, miss=num_blocks))

"""The scheduler side of models with recurrent states: prompts go on from borders where blocks and states are held."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.connector import SchedulerSide
from kvtier.connector.vllm.requests import TrackedRequest
from kvtier.connector.vllm.states import ClosedRequest, StateRequest, last_border
from kvtier.tiers.hierarchy import Attribution, Pending

if TYPE_CHECKING:
    from kvtier.connector.vllm.model import SlotPlan  # it needs vLLM, this module does not

_NULL: Final = 0  # vLLM's block that stands for "not kept"


def exactly(block: int) -> int:
    """A worker's block among positions of tables, and back: below zero, where no position is."""
    return -1 - block


class StateSide:
    """What `SchedulerHalf` asks and tells of states. Blocks without their states are never promised."""

    def __init__(self, side: SchedulerSide, plan: "SlotPlan", num_blocks: int, *, keeps_answers: bool) -> None:
        """`num_blocks` is vLLM's number of blocks. `keeps_answers`: also what lies behind the prompts is kept."""
        self._side = side
        self._groups = [state.group for state in plan.states]
        self._num_blocks = num_blocks
        self._size = plan.block_size
        self._keeps_answers = keeps_answers

    def admit(self, row: TrackedRequest) -> None:
        """Know a request's states from its first moment: a reset drops them as it drops its blocks."""
        row.states = StateRequest.of(row.request_id, row.chain, self._groups)
        self._side.admit(row.states)

    def lookup(self, row: TrackedRequest) -> int | Pending:
        """How many tokens beyond the `row.asked` in L1 can be loaded with the states behind them, or PENDING."""
        first = row.asked // self._size
        if row.gives_up:
            return 0
        if row.closed is None or row.closed.border <= first:
            self.let_go(row)
            usable = min(len(row.chain.hashes), (row.num_tokens - 1) // self._size)
            border = last_border(self._side.tiers, row.chain, range(first + 1, usable + 1), self._groups)
            if not border and usable > first and not row.has_guessed and self._side.tiers.has_lower:
                row.has_guessed, row.is_counted, border = (
                    True,
                    True,
                    usable,
                )  # perhaps tiers that nodes share have this very prompt
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

    def offer(self, row: TrackedRequest, num_scheduled: int, state: Any) -> None:
        """Plan stores of the states that a step leaves behind, if it ends where a block ends.

        vLLM itself keeps those of few such ends. Its table says where each is now; a later step may reuse the place.
        """
        computed = row.request.num_computed_tokens + num_scheduled
        border = computed // self._size
        if computed % self._size or border > self._most(row):
            return
        tables = state.get_block_ids(row.request_id)
        for group in self._groups:
            block = tables[group][border - 1] if tables is not None and border <= len(tables[group]) else _NULL
            if block == _NULL:
                continue
            assert row.states is not None
            at = row.states.chain.index(border - 1, group)
            self._side.store(row.states.request_id, at, [exactly(group * self._num_blocks + block)])

    def _most(self, row: TrackedRequest) -> int:
        """Borders of the request that have names and are to be kept."""
        kept = row.num_tokens if self._keeps_answers else int(row.request.num_prompt_tokens)
        return min(len(row.chain.hashes), kept // self._size)

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

"""The scheduler side for models with recurrent states: prompts continue at borders with stored blocks and states.

vLLM has a group's state at the end of some blocks, where a step ended. A prompt can continue after a border if its
blocks up to there are stored, and the state of every such group at it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.connector import ClosedChain, ClosedRequest, SchedulerSide
from kvtier.connector.vllm import requests
from kvtier.tiers.hierarchy import Attribution, Pending

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan


def exactly(block: int) -> int:
    """Encode a worker's block among positions of tables, and decode it: as a negative number."""
    return -1 - block


class StateSide:
    """The part of `SchedulerHalf` for states. Blocks without their states are never promised."""

    def __init__(self, side: SchedulerSide, plan: "SlotPlan", num_blocks: int, *, keeps_answers: bool) -> None:
        """`num_blocks` is vLLM's number of blocks. `keeps_answers`: states after the prompts are kept, too."""
        self._side = side
        self._groups = [state.group for state in plan.states]
        self._lanes = [state.lane for state in plan.states]
        self._per_block = [plan.block_size // state.block_size for state in plan.states]  # positions of its table
        self._keeps_blocks = bool(plan.attention)  # or states alone
        self._num_blocks = num_blocks
        self._size = plan.block_size
        self._keeps_answers = keeps_answers
        self._unnamed: dict[str, requests.UnnamedStates] = {}  # this step's unnamed states, by request
        self._of_last_step: dict[str, requests.UnnamedStates] = {}  # the previous step's

    def admit(self, row: requests.TrackedRequest) -> None:
        """Register a request's states at admission: a reset drops them together with its blocks."""
        row.states = requests.StateRequest(requests.part_id(row.request_id, "states"), row.chain)
        self._side.admit(row.states)

    def lookup(self, row: requests.TrackedRequest) -> int | Pending:
        """How many tokens beyond the `row.num_l1_tokens` in L1 can be loaded with the states after them, or PENDING."""
        first = row.num_l1_tokens // self._size
        if row.gives_up:
            return 0
        if row.closed is None or row.closed.chain.border <= first:
            self.release(row)
            usable = min(len(row.chain.hashes), (row.num_tokens - 1) // self._size)
            among = range(first + 1, usable + 1)
            border = requests.last_border(
                self._side.tiers, row.chain, among, self._groups, keeps_blocks=self._keeps_blocks
            )
            if not border and usable > first and not row.has_guessed and self._side.tiers.has_lower:
                row.has_guessed = row.is_counted = True  # a shared tier may have this very prompt
                border = usable
            if not border:
                self._count_misses(row, usable)
                return 0
            chain = ClosedChain(row.chain, border, self._groups, keeps_blocks=self._keeps_blocks)
            row.closed = ClosedRequest(requests.part_id(row.request_id, border), chain)
        closed = row.closed
        promised = self._side.lookup(closed, row.num_l1_tokens if self._keeps_blocks else 0, spares=closed.chain.spares)
        if isinstance(promised, Pending):
            return promised
        num_blocks = row.closed.chain.border - first
        num_records = len(self._groups) + (num_blocks if self._keeps_blocks else 0)
        if promised == num_records * self._size:
            return num_blocks * self._size
        self.release(row)
        return 0

    def load(self, row: requests.TrackedRequest, num_tokens: int) -> int:
        """The request got its blocks: load what was promised. Returns `num_tokens`, or 0 if the promise is gone."""
        closed = row.closed
        if closed is None:
            row.gives_up = True
            return 0
        at = self._at(row.tables, closed.chain.border)
        in_all = len(at) * self._size + (num_tokens if self._keeps_blocks else 0)
        is_whole = row.num_l1_tokens + num_tokens == closed.chain.border * self._size and requests.NULL not in at
        blocks = [*range(closed.chain.border if self._keeps_blocks else 0), *self._exact(at)]
        loading = self._side.allocated(closed.request_id, blocks, in_all if is_whole else 0)
        row.gives_up = loading != in_all
        return 0 if row.gives_up else num_tokens

    def begin_step(self) -> None:
        """A step was scheduled: `offer` comes next for each of its requests."""
        self._of_last_step, self._unnamed = self._unnamed, {}

    def offer(self, row: requests.TrackedRequest, num_scheduled: int, output: Any) -> list[int]:
        """Plan stores of the states after a step, if it ends at the end of a block.

        vLLM itself keeps the states of few such ends. Its table says where each is now; a later step may reuse the
        place. With asynchronous scheduling the step's last token may not be known yet, so the states have no name. Then
        the next step's call names and stores them, and returns the ids of those ops. They must read before that step
        computes, since vLLM may have reused the places.
        """
        of_last_step = self._name(row, output)
        computed = row.request.num_computed_tokens + num_scheduled
        border = computed // self._size
        if computed % self._size or border > self._most(row, computed):
            return of_last_step
        tables = output.kv_connector_block_state.get_block_ids(row.request_id)
        at = self._at(tables, border) if tables is not None else ()
        left = tuple((group, block) for group, block in zip(self._groups, at, strict=False) if block != requests.NULL)
        if border > len(row.chain.hashes):
            self._unnamed[row.request_id] = requests.UnnamedStates(border, left)
            return of_last_step
        self._store(row, border, left)
        if len(left) == len(self._groups) and border * self._size < row.request.num_prompt_tokens:
            row.border = border
        return of_last_step

    def _name(self, row: requests.TrackedRequest, output: Any) -> list[int]:
        """Store the previous step's states, if the token before them is known and still the request's."""
        unnamed = self._of_last_step.pop(row.request_id, None)
        if unnamed is None or unnamed.border > len(row.chain.hashes):
            return []
        is_behind = row.request.num_computed_tokens >= unnamed.border * self._size  # else vLLM removed tokens
        if not is_behind or row.request_id in output.scheduled_cached_reqs.resumed_req_ids:
            return []
        return self._store(row, unnamed.border, unnamed.blocks)

    def _store(self, row: requests.TrackedRequest, border: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        assert row.states is not None
        states, request_id = requests.GroupStates(row.chain, border, self._groups), row.states.request_id
        stores = [(self._groups.index(group), block) for group, block in blocks]
        return [
            self._side.store(request_id, at, [exactly(self._lanes[at] * self._num_blocks + block)], states)
            for at, block in stores
        ]

    def _at(self, tables: requests.Tables, border: int) -> list[int]:
        """vLLM's block of each group's state at a border; NULL if its table is too short."""
        positions = [border * per_block - 1 for per_block in self._per_block]
        return [
            tables[group][position] if position < len(tables[group]) else requests.NULL
            for group, position in zip(self._groups, positions, strict=True)
        ]

    def _most(self, row: requests.TrackedRequest, computed: int) -> int:
        """How many borders of the request are kept."""
        kept = computed if self._keeps_answers else int(row.request.num_prompt_tokens)
        return kept // self._size

    def targets(self, row: requests.TrackedRequest) -> list[int]:
        """The workers' blocks that the request's states are loaded to, encoded by `exactly`."""
        return self._exact(self._at(row.tables, row.closed.chain.border)) if row.closed is not None else []

    def release(self, row: requests.TrackedRequest) -> None:
        """Cancel the request's promise."""
        if row.closed is not None:
            self._side.finished(row.closed.request_id)
            row.closed = None

    def _exact(self, blocks: Sequence[int]) -> list[int]:
        return [exactly(lane * self._num_blocks + block) for lane, block in zip(self._lanes, blocks, strict=True)]

    def _count_misses(self, row: requests.TrackedRequest, num_blocks: int) -> None:
        if not row.is_counted:
            row.is_counted = True
            self._side.tiers.count(Attribution(num_blocks, miss=num_blocks))

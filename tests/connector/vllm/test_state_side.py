"""States beside a request's blocks, without vLLM: how they are named, and from which border a prompt may go on."""

import random
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, MemoryTier, chain_of, fill_slots, hierarchy_of, payload_of, record_of

from kvtier.connector.daemon.wire import MAX_BLOCK_SIZE
from kvtier.connector.plan import WorkerReport
from kvtier.connector.request import ClosedChain
from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.vllm.requests import NULL, TrackedRequest, last_border, owner, whole_runs
from kvtier.connector.vllm.slots import GroupLane
from kvtier.connector.vllm.states import StateSide, exactly
from kvtier.tiers.checksum import checksum
from kvtier.tiers.hierarchy import Hierarchy, Pending
from kvtier.tiers.naming import TokenChain, state_name
from kvtier.tiers.tier import BlockRecord

GROUPS = (0, 2)  # of three: group 1 keeps K and V
NUM_BLOCKS = 100


@dataclass
class Keys:
    """`TrackedRequest.keys` over kvtier's own chain."""

    chain: TokenChain

    def current(self) -> TokenChain:
        return self.chain


@dataclass
class Story:
    """Six blocks on the slab, and states of both groups behind some of them."""

    slots: int = 32
    tier: MemoryTier = field(default_factory=MemoryTier)
    chain: TokenChain = field(default_factory=lambda: chain_of(6))
    keeps_blocks: bool = True  # or states alone
    state_size: int = BLOCK_SIZE  # tokens in a block of the groups with states

    def __post_init__(self) -> None:
        self.hierarchy: Hierarchy = hierarchy_of(self.slots, self.tier)
        self.side = SchedulerSide(self.hierarchy)
        states = [SimpleNamespace(group=group, lane=group, block_size=self.state_size) for group in GROUPS]
        attention = [(1, None)] if self.keeps_blocks else []
        plan: Any = SimpleNamespace(states=states, block_size=BLOCK_SIZE, attention=attention)
        self.states = StateSide(self.side, plan, NUM_BLOCKS, keeps_answers=True)
        request = SimpleNamespace(
            num_tokens=6 * BLOCK_SIZE + 1, num_computed_tokens=0, num_prompt_tokens=25, kv_transfer_params=None
        )
        keys: Any = Keys(self.chain)
        self.row = TrackedRequest(request, "r", keys)
        self.side.admit(self.row)
        self.states.admit(self.row)
        self.tier.fill(self.chain)

    def hold(self, border: int, *groups: int) -> None:
        for group in groups:
            record = record_of(self.chain, border - 1)
            name = state_name(record.chain_hash, group)
            self.tier.blocks[name] = (
                BlockRecord(name, record.chain_hash, record.tokens, record_checksum(name)),
                payload_of(name),
            )

    def asked(self) -> int:
        """The answer, once the tiers have given it."""
        for _ in range(200):
            answer = self.states.lookup(self.row)
            if not isinstance(answer, Pending):
                return answer
            self.side.wait(0.05)
        raise AssertionError("no answer")

    def step(self, tables: list[list[int]], num_tokens: int, *resumed: str) -> list[int]:
        """vLLM computes so many tokens of the request. Returns the stores of what the step before left behind."""
        state = SimpleNamespace(get_block_ids=lambda request_id: tables)
        cached = SimpleNamespace(resumed_req_ids=set(resumed))
        output = SimpleNamespace(kv_connector_block_state=state, scheduled_cached_reqs=cached)
        self.states.begin_step()
        return self.states.offer(self.row, num_tokens, output)

    def close(self) -> None:
        for known in (self.row, self.row.closed, self.row.states):
            if known is not None:
                self.side.finished(known.request_id)
        self.side.close()
        assert self.hierarchy.drain(60)
        self.hierarchy.check()
        counts = self.hierarchy.host.pool.counts()
        assert (counts.leased, counts.filling) == (0, 0)
        self.hierarchy.close()


def record_checksum(name: bytes) -> int:
    return checksum(memoryview(payload_of(name)))


@pytest.fixture
def story() -> Any:
    made = Story()
    yield made
    made.close()


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_states_are_weighed_by_all_tokens_before_them(keeps_blocks: bool) -> None:
    story = Story(keeps_blocks=keeps_blocks)
    story.hold(5, *GROUPS)
    tokens, records = 5 * BLOCK_SIZE, len(GROUPS) + 5 * keeps_blocks
    rates = story.hierarchy.rates
    rates.policy = "auto"
    rates.loaded("file", SLOT_BYTES, 1.0)
    rates.computed(tokens, 0.9 * records)  # loading takes `records` seconds
    assert story.asked() == 0
    story.row.gives_up = False
    story.states.release(story.row)
    rates.computed(tokens, 100.0 * records)
    assert story.asked() == tokens
    story.close()


def test_a_state_spares_no_more_than_the_daemons_protocol_takes() -> None:
    blocks = chain_of(2)
    assert ClosedChain(blocks, 2, (0,), keeps_blocks=False).spares == 2 * BLOCK_SIZE
    assert ClosedChain(blocks, 2, (0, 1), keeps_blocks=True).spares == 2 * BLOCK_SIZE // 4
    long: Any = SimpleNamespace(hashes=blocks.hashes, block_size=1 << 20, root=blocks.root, tenant=blocks.tenant)
    assert ClosedChain(long, 2, (0,), keeps_blocks=False).spares < MAX_BLOCK_SIZE


def test_the_last_border_is_where_every_group_has_a_state(story: Story) -> None:
    story.hold(2, *GROUPS)
    story.hold(4, *GROUPS)
    story.hold(5, GROUPS[0])  # the other group's is lost
    assert last_border(story.hierarchy, story.chain, range(1, 7), GROUPS) == 4
    assert last_border(story.hierarchy, story.chain, range(5, 7), GROUPS) == 0
    assert last_border(story.hierarchy, story.chain, range(1, 4), GROUPS) == 2
    del story.tier.blocks[story.chain.hashes[2]]  # a block: what lies behind it is of no use
    assert last_border(story.hierarchy, story.chain, range(1, 7), GROUPS) == 2


def test_what_is_promised_are_the_blocks_up_to_a_border_with_its_states(story: Story) -> None:
    story.hold(4, *GROUPS)
    assert story.asked() == 4 * BLOCK_SIZE
    story.row.tables = [[0, 0, 0, 7, 8], [1, 2, 3, 4, 5], [0, 0, 0, 9, 10]]
    assert story.states.load(story.row, 4 * BLOCK_SIZE) == 4 * BLOCK_SIZE
    [load] = story.side.build_plan().loads
    assert owner(load.request_id) == "r"
    assert load.device_blocks == (0, 1, 2, 3, exactly(7), exactly(2 * NUM_BLOCKS + 9))
    assert story.states.targets(story.row) == [exactly(7), exactly(2 * NUM_BLOCKS + 9)]
    assert story.hierarchy.host.pool.lookup([state_name(story.chain.hashes[3], 2)]) == 1


def test_blocks_without_a_state_are_never_promised(story: Story) -> None:
    assert story.asked() == 0
    story.hold(6, GROUPS[1])
    assert story.asked() == 0
    misses = 'kvtier_lookup_blocks_total{tier="miss"}'
    assert story.hierarchy.stats()[misses] == 2  # the states of the last border; once, however often it is asked


def test_a_state_that_cannot_be_read_is_no_promise(story: Story) -> None:
    story.hold(6, *GROUPS)
    broken = state_name(story.chain.hashes[5], GROUPS[1])
    record, payload = story.tier.blocks[broken]
    story.tier.blocks[broken] = (record, bytes(len(payload)))
    assert story.asked() == 0
    assert story.row.closed is None


def test_a_load_that_failed_is_not_tried_again(story: Story) -> None:
    story.hold(4, *GROUPS)
    assert story.asked() == 4 * BLOCK_SIZE
    story.row.tables = [[0, 0, 0, 0, 8], [1, 2, 3, 4, 5], [0, 0, 0, 9, 10]]  # vLLM gave the first group's state no room
    assert story.states.load(story.row, 4 * BLOCK_SIZE) == 0
    assert not story.side.build_plan().loads
    assert story.asked() == 0


@pytest.mark.parametrize(("step", "stored"), [(BLOCK_SIZE, [0]), (3 * BLOCK_SIZE, [2]), (BLOCK_SIZE + 1, [])])
def test_a_step_that_ends_where_a_block_ends_leaves_states_to_be_stored(
    story: Story, step: int, stored: list[int]
) -> None:
    tables = [[0, 0, 7, 0], [1, 2, 3, 4], [5, 0, 9, 0]]
    assert story.step(tables, step) == []
    stores = story.side.build_plan().stores
    blocks = [store.device_blocks for store in stores]
    expected = {0: [(exactly(2 * NUM_BLOCKS + 5),)], 2: [(exactly(7),), (exactly(2 * NUM_BLOCKS + 9),)]}
    assert blocks == [each for border in stored for each in expected[border]]
    every = [state_name(story.chain.hashes[border], group) for border in stored for group in GROUPS]
    names = every[len(every) - len(stores) :]
    for store, name in zip(stores, names, strict=True):
        fill_slots(story.hierarchy, store.host_slots, [name])
    story.side.update(WorkerReport(tuple(store.op_id for store in stores)))
    assert story.hierarchy.drain(60)
    assert all(name in story.tier.blocks for name in names)


def test_a_reset_drops_the_states_of_requests_that_were_there_before(story: Story) -> None:
    """As it drops their blocks: both were perhaps computed with other weights."""
    tables = [[0, 0, 7, 0], [1, 2, 3, 4], [0, 0, 9, 0]]
    story.hierarchy.reset()
    assert story.step(tables, 3 * BLOCK_SIZE) == []
    assert not story.side.build_plan().stores


def test_a_states_record_follows_its_block(story: Story) -> None:
    tables = [[0, 0, 7, 0], [1, 2, 3, 4], [0, 0, 9, 0]]
    assert story.step(tables, 3 * BLOCK_SIZE) == []
    stores = story.side.build_plan().stores
    for store, group in zip(stores, GROUPS, strict=True):
        fill_slots(story.hierarchy, store.host_slots, [state_name(story.chain.hashes[2], group)])
    story.side.update(WorkerReport(tuple(store.op_id for store in stores)))
    assert story.hierarchy.drain(60)
    for group in GROUPS:
        record, _ = story.tier.blocks[state_name(story.chain.hashes[2], group)]
        assert record.parent == story.chain.hashes[2]
        assert record.tokens == story.chain.block_tokens(2)


# --- states whose names come later -----------------------------------------------------------------------------------


def half_known() -> Story:
    """vLLM schedules ahead: the last token of its sixth block is being sampled."""
    tokens = list(range(6 * BLOCK_SIZE))
    made = Story(chain=TokenChain(chain_of(6).root, BLOCK_SIZE))
    made.chain.extend(tokens[:-1])
    made.row.request.num_computed_tokens = 6 * BLOCK_SIZE - 1
    return made


TABLES = [[0, 0, 0, 0, 0, 7], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 9]]


def test_states_after_a_token_that_is_being_sampled_are_stored_a_step_later() -> None:
    story = half_known()
    assert story.step(TABLES, 1) == []
    assert not story.side.build_plan().stores  # nobody knows yet what they are behind
    story.chain.extend([6 * BLOCK_SIZE - 1])
    story.row.request.num_computed_tokens += 1
    ops = story.step([[0] * 7, [1, 2, 3, 4, 5, 6, 10], [0] * 7], 1)  # vLLM has given the places up
    stores = story.side.build_plan().stores
    assert [store.op_id for store in stores] == ops
    assert [store.device_blocks for store in stores] == [(exactly(7),), (exactly(2 * NUM_BLOCKS + 9),)]
    names = [state_name(story.chain.hashes[5], group) for group in GROUPS]
    for store, name in zip(stores, names, strict=True):
        fill_slots(story.hierarchy, store.host_slots, [name])
    story.side.update(WorkerReport(tuple(ops)))
    assert story.hierarchy.drain(60)
    assert all(name in story.tier.blocks for name in names)
    story.close()


@pytest.mark.parametrize("between", ["taken back", "resumed", "a step without it", "still unknown"])
def test_states_are_not_stored_under_a_name_they_were_perhaps_not_computed_for(between: str) -> None:
    story = half_known()
    assert story.step(TABLES, 1) == []
    if between != "still unknown":
        story.chain.extend([6 * BLOCK_SIZE - 1])
    if between == "a step without it":
        story.states.begin_step()
    if between != "taken back":  # vLLM preempted it, and what was being sampled is sampled again
        story.row.request.num_computed_tokens += 1
    assert story.step([[0] * 7, [1, 2, 3, 4, 5, 6, 10], [0] * 7], 1, *(["r"] if between == "resumed" else [])) == []
    assert not story.side.build_plan().stores
    story.close()


# --- models of states alone, and groups whose blocks differ ----------------------------------------------------------


def test_a_model_with_only_states_claims_only_states() -> None:
    story = Story(keeps_blocks=False)
    for name in story.chain.hashes:
        del story.tier.blocks[name]  # it has no blocks of K and V
    story.hold(2, *GROUPS)
    story.hold(3, GROUPS[0])
    assert story.asked() == 2 * BLOCK_SIZE
    story.row.tables = [[0, 7, 8], [], [0, 9, 10]]
    assert story.states.load(story.row, 2 * BLOCK_SIZE) == 2 * BLOCK_SIZE
    [load] = story.side.build_plan().loads
    assert load.device_blocks == (exactly(7), exactly(2 * NUM_BLOCKS + 9))
    story.side.update(WorkerReport((load.op_id,)))
    story.close()


def test_a_state_is_at_the_end_of_its_groups_blocks() -> None:
    """Of blocks half as large as kvtier's, it is every other one's."""
    story = Story(state_size=BLOCK_SIZE // 2)
    tables = [[0, 0, 0, 0, 0, 7], [1, 2, 3], [0, 0, 0, 0, 0, 9]]
    assert story.step(tables, 3 * BLOCK_SIZE) == []
    blocks = [store.device_blocks for store in story.side.build_plan().stores]
    assert blocks == [(exactly(7),), (exactly(2 * NUM_BLOCKS + 9),)]
    story.side.close()
    story.hold(4, *GROUPS)
    assert story.asked() == 4 * BLOCK_SIZE
    story.row.tables = [[0] * 7 + [3], [1, 2, 3, 4], [0] * 7 + [5]]
    assert story.states.load(story.row, 4 * BLOCK_SIZE) == 4 * BLOCK_SIZE
    [load] = story.side.build_plan().loads
    assert load.device_blocks[-2:] == (exactly(3), exactly(2 * NUM_BLOCKS + 5))
    story.close()


# Which of a request's blocks may be stored: the quick look at whole tables against the look at every block.


SIZE = 64  # tokens of kvtier's block
KINDS = {
    "one table": (GroupLane(0),),
    "a window": (GroupLane(0), GroupLane(1, window=128)),
    "smaller blocks behind a window": (GroupLane(0), *(GroupLane(1, place, 4, window=32) for place in range(4))),
    "chunks": (GroupLane(0), *(GroupLane(1, place, 2, chunk=64) for place in range(2))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_runs_are_those_of_the_look_at_every_block(kind: str, share: float) -> None:
    draw = random.Random(f"{kind} {share}")
    lanes = tuple(enumerate(KINDS[kind]))
    for _ in range(50):
        last = draw.randint(1, 30)
        first = draw.randrange(last)
        counts = {lane.group: lane.count for _, lane in lanes}
        # more blocks than asked for stand in the tables, since a step allocates ahead; what is not kept is NULL
        tables = [
            [NULL if draw.random() < share else draw.randint(1, 99) for _ in range(count * (last + 2))]
            for count in counts.values()
        ]

        # of each block alone: is there all of it, or only what no prompt needs missing?
        def is_whole(block: int, tables: list[list[int]] = tables) -> bool:
            return all(
                tables[lane.group][lane.position(block)] != NULL or not lane.is_needed(block, SIZE) for _, lane in lanes
            )

        expected = [list(run) for whole, run in groupby(range(first, last), is_whole) if whole]
        assert [list(run) for run in whole_runs(lanes, tables, range(first, last), SIZE)] == expected

"""What a prefill node's answer says and what a decode node makes of it, without vLLM."""

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import BLOCK_SIZE, MemoryTier, chain_of, hierarchy_of

from kvtier.connector.vllm.requests import Handovers, PrefillClock, TrackedRequest, prefilled_by
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.hierarchy import Hierarchy

STORE = b"s" * 32
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


class SharedTier(MemoryTier):
    """A tier that other nodes fill, too."""

    is_shared = True


class Node:
    """One engine's hand-overs, over tiers of its own and one that is shared."""

    def __init__(
        self, tier: MemoryTier, groups: tuple[int, ...] = (), store: bytes = STORE, policy: Any = "auto"
    ) -> None:
        states = [SimpleNamespace(group=group) for group in groups]
        plan: Any = SimpleNamespace(block_size=BLOCK_SIZE, states=states, lookahead=0, attention=(0,))
        self.hierarchy: Hierarchy = hierarchy_of(16, tier)
        self.time = 0.0
        self.prefill = PrefillClock(lambda: self.time)
        cache = CacheConfig(prefetch_deadline=60.0, load_or_recompute=policy)
        self.handovers = Handovers(self.hierarchy, plan, store, cache, self.prefill)

    def step(self, seconds: float, num_tokens: int = 0, position: float = 0.0) -> tuple[int, float, float] | None:
        """One step of vLLM alone."""
        self.prefill.began(num_tokens, position)
        self.time += seconds
        return self.prefill.ended()

    def row(self, params: Any, num_blocks: int = 4) -> TrackedRequest:
        request = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=num_blocks * BLOCK_SIZE + 1)
        chain = chain_of(num_blocks)
        keys: Any = SimpleNamespace(current=lambda: chain)
        return TrackedRequest(request, "r", keys)

    def admitted(self, params: Any, num_requests: int = 1) -> TrackedRequest:
        row = self.row(params)
        self.handovers.admit(row, num_requests)
        return row

    def close(self) -> None:
        self.hierarchy.drain(5)
        self.hierarchy.check()
        self.hierarchy.close()


@pytest.fixture
def tier() -> MemoryTier:
    return SharedTier()


@pytest.fixture
def node(tier: MemoryTier) -> Iterator[Node]:
    node = Node(tier)
    yield node
    node.close()


def prefilled(tier: MemoryTier, **more: Any) -> dict[str, Any]:
    node = Node(tier, **more)
    row = node.row(ASKED)
    row.stored, row.border = 9, 3  # with blocks of its answer
    said = node.handovers.offer(row)
    assert said is not None
    assert node.handovers.offer(row) is None  # another kvtier of this engine says it no second time
    assert "kvtier" not in ASKED
    node.close()
    return said


def test_it_names_the_prompts_blocks_or_the_last_border_with_states(tier: MemoryTier) -> None:
    assert prefilled(tier)["kvtier"]["blocks"] == 4
    assert prefilled(tier, groups=(0, 2))["kvtier"]["blocks"] == 3


@pytest.mark.parametrize(
    "params",
    [None, {}, [], ["kvtier"], "do_remote_decode", 7, {"do_remote_decode": False}, {"do_remote_prefill": True}],
)
def test_an_answer_without_a_hand_over_request_has_no_parameters(params: Any, node: Node) -> None:
    row = node.row(params)
    row.stored = 4
    node.handovers.admit(row)
    assert (row.awaited, row.most_loaded, row.most_stored) == (None, None, None)
    assert node.handovers.offer(row) is None
    row = node.row(ASKED)  # and nothing of what was not stored
    assert node.handovers.offer(row) is None


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (0, 0),
        (7, 7),
        (1 << 62, 1 << 62),
        (-1, None),
        (True, None),
        (1.0, None),
        (float("nan"), None),
        ("7", None),
        ([], None),
    ],
)
def test_a_bound_is_a_number_of_tokens_or_none(
    value: object, bound: int | None, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    row = node.row({"max_load_tokens": value, "max_offload_tokens": value})
    assert (row.most_loaded, row.most_stored) == (bound, bound)
    assert ("use a number of tokens from 0 on" in caplog.text) == (bound is None)
    node.row({"max_load_tokens": "7" * 1_000_000})
    assert len(caplog.text) < 2000  # a client writes no log


def test_it_waits_until_all_is_there_and_looks_now_and_then(node: Node, tier: MemoryTier) -> None:
    said = prefilled(tier)
    row = node.admitted(said)
    now = time.monotonic()
    assert node.handovers.is_coming(row, now)
    tier.fill(chain_of(4))
    assert node.handovers.is_coming(row, now + 0.001)  # it does not look at every step
    assert not node.handovers.is_coming(row, now + 0.1)
    assert not node.handovers.is_coming(row, now + 0.2)


def test_a_tier_that_stays_away_is_given_up_after_its_first_probe(
    node: Node, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    said = prefilled(tier)
    row = node.admitted(said)
    now = time.monotonic()
    node.hierarchy.ports[0].breakers["read"].trip()
    assert node.handovers.is_coming(row, now)
    assert node.handovers.is_coming(row, now + 1.4)
    assert not node.handovers.is_coming(row, now + 1.6)
    assert "answers" in caplog.text


def test_it_does_not_wait_for_ever_nor_for_what_l1_has(
    node: Node, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    said = prefilled(tier)
    late, known = node.admitted(said), node.admitted(said)
    known.num_l1_tokens = 4 * BLOCK_SIZE
    assert not node.handovers.is_coming(known, time.monotonic())
    assert node.handovers.is_coming(late, time.monotonic())
    assert not node.handovers.is_coming(late, time.monotonic() + 61)
    assert "prefetch_deadline" in caplog.text


def test_with_no_tier_that_nodes_share_nothing_can_come(tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    said = prefilled(tier)
    node = Node(MemoryTier())
    for _ in range(2):
        row = node.admitted(said)
        assert not node.handovers.is_coming(row, time.monotonic())
    assert caplog.text.count("answers") == 1
    node.close()


@pytest.mark.parametrize(
    "change",
    [
        *({"blocks": number} for number in (0, 5, -1, 10**9, "4", None)),
        *({"store": store} for store in ("00", 5, "x" * 100_000)),
        *({"last": last} for last in ("00", 7)),
    ],
)
def test_what_does_not_fit_is_not_waited_for(
    change: dict[str, Any], node: Node, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    said = prefilled(tier)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            row = node.admitted({"kvtier": said["kvtier"] | change})
            assert not node.handovers.is_coming(row, time.monotonic())
    assert len(caplog.records) == (0 if "blocks" in change else 1)


@pytest.mark.parametrize("more", [{"do_remote_prefill": True}, {"do_remote_decode": True}])
def test_kv_that_another_connector_delivers_is_not_waited_for(
    more: dict[str, Any], node: Node, tier: MemoryTier
) -> None:
    row = node.admitted(prefilled(tier) | more)
    assert not node.handovers.is_coming(row, time.monotonic())


def test_it_waits_no_longer_than_computing_would_delay_all_requests(node: Node, tier: MemoryTier) -> None:
    said = prefilled(tier)
    waits = {}
    for speed in (None, 1.0, 100.0):
        if speed is not None:
            node.step(64 / speed, 64)
        for num_requests in (1, 3, 100):
            row = node.admitted(said, num_requests)
            assert row.awaited is not None
            waits[speed, num_requests] = row.awaited.patience
        node.prefill = node.handovers._prefill = PrefillClock(lambda: node.time)
    tokens = 4 * BLOCK_SIZE
    assert {waits[None, n] for n in (1, 3, 100)} == {60.0}  # not measured yet
    assert [waits[1.0, n] for n in (1, 3, 100)] == [min(60.0, tokens), min(60.0, 3 * tokens), 60.0]
    assert waits[100.0, 1] == 0.5  # computed in less, but every store takes a while
    assert waits[100.0, 100] == pytest.approx(min(60.0, tokens))


@pytest.mark.parametrize(("policy", "wait"), [("load", 60.0), ("recompute", None)])
def test_a_configured_choice_is_not_weighed(policy: str, wait: float | None, tier: MemoryTier) -> None:
    node = Node(tier, policy=policy)
    node.step(0.001, 64)
    row = node.admitted(prefilled(tier))
    assert (row.awaited and row.awaited.patience) == wait
    assert node.handovers.is_coming(row, time.monotonic()) == (wait is not None)
    node.close()


def test_a_tier_that_goes_away_while_a_request_waits_may_be_back_in_time(node: Node, tier: MemoryTier) -> None:
    said = prefilled(tier)
    row = node.admitted(said)
    now = time.monotonic()
    [port] = node.hierarchy.ports
    port.breakers["read"].trip()
    assert node.handovers.is_coming(row, now)
    later = node.admitted(said)  # but one that comes now does not wait
    assert not node.handovers.is_coming(later, time.monotonic())
    tier.fill(chain_of(4))
    assert node.handovers.is_coming(row, now + 0.1)
    assert port.breakers["read"].take_probe(at_once=True)
    port.breakers["read"].probed(True)
    assert not node.handovers.is_coming(row, now + 0.2)


def test_it_does_not_wait_for_what_is_slower_to_load_than_to_compute(node: Node, tier: MemoryTier) -> None:
    node.hierarchy.rates.policy = "auto"
    node.hierarchy.rates.loaded(tier.name, 1, 1.0)
    for seconds in (1e-3, 1e9):
        node.hierarchy.rates.computed(64, seconds)
        row = node.admitted(prefilled(tier))
        assert node.handovers.is_coming(row, time.monotonic()) == (seconds > 1)


def test_prefill_is_measured_from_one_steps_results_to_the_next_ones(tier: MemoryTier) -> None:
    node = Node(tier)
    assert node.step(1.0) is None
    assert node.prefill.ended() is None  # vLLM takes more results than it built steps
    assert node.prefill.seconds(100) is None
    assert node.step(2.0, 100, 50) == (100, 2.0, 50)
    assert node.prefill.seconds(100) == pytest.approx(2.0)
    node.prefill.began(100, 0)
    node.prefill.began(100, 0)  # scheduled while the first one runs
    for _ in range(2):
        node.time += 2.0
        assert node.prefill.ended() == (100, 2.0, 0)
    node.close()


def output_of(drafts: int = 0, **scheduled: int) -> Any:
    """A step of vLLM: request `a` is new, behind 16 tokens; the others run, behind 500."""
    cached = [request_id for request_id in scheduled if request_id != "a"]
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={request_id: [1] * drafts for request_id in cached} if drafts else {},
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=16)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_computed_tokens=[500] * len(cached)),
    )


def test_only_steps_that_mostly_prefill_measure_it() -> None:
    assert prefilled_by(output_of(a=60, b=1, c=4)) == (64, pytest.approx((60 * 46 + 4 * 502) / 64))
    assert prefilled_by(output_of(a=60, b=1, c=3))[0] == 0  # too little
    decoding = {f"r{number}": 1 for number in range(70)}
    assert prefilled_by(output_of(**decoding))[0] == 0
    assert prefilled_by(output_of(a=69, **decoding))[0] == 0
    assert prefilled_by(output_of(a=70, **decoding)) == (70, 51.0)
    drafting = {f"r{number}": 4 for number in range(70)}
    assert prefilled_by(output_of(3, **drafting))[0] == 0

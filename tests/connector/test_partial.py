"""Stories of promises that end inside a block: of which block, what is loaded, and what becomes of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from connector_rig import Bench
from doubles import BLOCK_SIZE, FakeClock, MemoryTier, chain_over, payload_of, record_of, store, wait_until

from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim
from kvtier.tiers.naming.chain import root_hash
from kvtier.tiers.tier import ChainHash, ChildBlock, Outcome

ROOT = root_hash(b"f" * 32)
PREFIX = list(range(100, 100 + 2 * BLOCK_SIZE))  # two blocks that all share


@dataclass
class Prompt:
    request_id: str
    tokens: list[int]

    def __post_init__(self) -> None:
        self.chain = chain_over(self.tokens)
        self.num_tokens = len(self.tokens)


class TellingTier(MemoryTier):
    """A lower tier that knows its children."""

    def children(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        records = [record for record, _ in self.blocks.values()]
        found = [each for each in records if each.parent == parent and each.tokens.startswith(start)]
        return [ChildBlock(each.chain_hash, each.tokens) for each in found][:limit]


class PartialBench(Bench):
    """One whose scheduler side may promise a part of a block."""

    def __init__(self, tier: MemoryTier | None = None, clock: FakeClock | None = None) -> None:
        super().__init__(tier, clock, partial_blocks=True)
        self.asked: list[Sequence[ChainHash]] = []
        real = self.hierarchy.submit

        def ask(hashes: Sequence[ChainHash], *question: Any, **options: Any) -> Claim:
            self.asked.append(hashes)
            return real(hashes, *question, **options)

        self.hierarchy.submit = ask  # type: ignore[method-assign]

    def loaded(self, first: int, tokens: int, request_id: str = "a") -> list[bytes]:
        """Take a promise up; the L1 blocks it filled, from block `first` on, by their bytes."""
        table = list(range(8))
        assert self.scheduler.allocated(request_id, table, tokens) == tokens
        (op,) = self.step().loads
        assert op.device_blocks[0] == first
        self.stream.complete_all()
        assert self.update().loaded == (request_id,)
        return [self.l1[block].tobytes() for block in op.device_blocks]


@pytest.fixture
def bench() -> Iterator[PartialBench]:
    bench = PartialBench()
    yield bench
    bench.close()


def held(bench: Bench, *tokens: list[int]) -> list[ChainHash]:
    """Store prompts; the names of their last blocks."""
    for each in tokens:
        store(bench.hierarchy, chain_over(each))
    return [chain_over(each).hashes[-1] for each in tokens]


def test_the_child_that_shares_most_is_loaded_after_the_own_blocks(bench: PartialBench) -> None:
    _, best, _ = held(bench, [*PREFIX, 1, 9, 9, 9], [*PREFIX, 1, 2, 3, 9], [*PREFIX, 1, 2, 9, 9])
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE + 3
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE + 3  # idempotent: the claim is of the view by now
    assert len(bench.asked) == 2
    names = [*prompt.chain.hashes[:2], best]
    assert bench.loaded(0, 2 * BLOCK_SIZE + 3) == [payload_of(name) for name in names]
    assert bench.scheduler.found_in_part("a") == "l2"
    bench.scheduler.finished("a")
    stats = bench.hierarchy.stats()
    assert stats['kvtier_lookup_blocks_total{tier="l2"}'] == 2  # the blocks of the request alone are counted
    assert stats['kvtier_lookup_blocks_total{tier="miss"}'] == 1


def test_a_prompt_inside_one_stored_block_computes_only_its_last_token(bench: PartialBench) -> None:
    [name] = held(bench, [1, 2, 3, 4])
    short, whole = Prompt("a", [1, 2, 3]), Prompt("b", [1, 2, 3, 4])  # the second ends where its own block does
    assert bench.scheduler.lookup(short, 0) == 2
    assert bench.scheduler.lookup(whole, 0) == 3
    assert bench.loaded(0, 3, "b") == [payload_of(name)]


def test_an_engine_that_did_not_ask_for_it_gets_whole_blocks() -> None:
    bench = Bench()
    held(bench, [*PREFIX, 1, 2, 3, 9])
    assert bench.scheduler.lookup(Prompt("a", [*PREFIX, 1, 2, 3, 4, 5]), 0) == 2 * BLOCK_SIZE
    bench.close()


def test_no_view_for_what_l1_has_in_part(bench: PartialBench) -> None:
    held(bench, [*PREFIX, 1, 2, 9, 9])
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, 2 * BLOCK_SIZE, 2) == 0
    assert len(bench.asked) == 1
    assert bench.scheduler.lookup(prompt, 2 * BLOCK_SIZE, 1) == 2  # L1 lost the better one
    assert bench.scheduler.lookup(prompt, 2 * BLOCK_SIZE, 2) == 0  # and has it again
    assert bench.scheduler.allocated("a", [0, 1, 2], 0) == 0


def test_a_child_evicted_between_question_and_claim_leaves_the_own_blocks(bench: PartialBench) -> None:
    [child] = held(bench, [*PREFIX, 1, 2, 3, 9])
    ask = bench.hierarchy.submit

    def evict_first(hashes: Sequence[ChainHash], *args: object, **options: object) -> Claim:
        if child in hashes:
            bench.hierarchy.host.pool.evict([child])
        return ask(hashes, *args, **options)  # type: ignore[arg-type]

    bench.hierarchy.submit = evict_first  # type: ignore[method-assign]
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE
    assert bench.loaded(0, 2 * BLOCK_SIZE) == [payload_of(name) for name in prompt.chain.hashes[:2]]
    assert bench.scheduler.found_in_part("a") is None


def test_a_view_goes_on_when_l1_grows_and_is_asked_anew_when_l1_shrinks_or_passes_it(bench: PartialBench) -> None:
    [child] = held(bench, [*PREFIX, 1, 2, 3, 9])
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, BLOCK_SIZE) == BLOCK_SIZE + 3
    assert bench.scheduler.lookup(prompt, 2 * BLOCK_SIZE) == 3  # L1 grew: the same promise
    assert len(bench.asked) == 2
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE + 3  # L1 lost its blocks: another
    assert len(bench.asked) == 4
    assert bench.scheduler.lookup(prompt, 3 * BLOCK_SIZE) == 0  # L1 has the very block
    assert bench.scheduler.lookup(prompt, 2 * BLOCK_SIZE) == 3
    assert bench.loaded(2, 3) == [payload_of(child)]


def test_room_for_the_own_blocks_alone_loads_those(bench: PartialBench) -> None:
    held(bench, [*PREFIX, 1, 2, 3, 9])
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE + 3
    assert len(bench.loaded(0, BLOCK_SIZE)) == 1
    assert bench.scheduler.found_in_part("a") is None


def test_a_pending_view_is_of_the_view() -> None:
    """A claim under way, once taken for one of the request's own blocks, gave wrong bytes."""
    tier = TellingTier()
    bench = PartialBench(tier)
    prompt, other = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5]), chain_over([*PREFIX, 1, 2, 3, 9])
    store(bench.hierarchy, other, 0, 2)
    tier.fill(other, 2)
    tier.gate.clear()
    assert bench.scheduler.lookup(prompt, 0) is PENDING  # its own two blocks are there: the child is not yet
    assert bench.scheduler.lookup(prompt, 0) is PENDING
    tier.gate.set()
    wait_until(lambda: bench.hierarchy.host.pool.lookup(other.hashes) == 3)
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE + 3
    assert bench.loaded(0, 2 * BLOCK_SIZE + 3)[2] == payload_of(other.hashes[2])
    assert bench.scheduler.found_in_part("a") == "file"
    bench.scheduler.finished("a")
    assert bench.hierarchy.drain(60)
    bench.close()


@pytest.mark.parametrize("outcome", [Outcome.CHECKSUM, Outcome.EVICTED])
def test_a_child_that_cannot_be_read_leaves_the_own_blocks(outcome: Outcome) -> None:
    tier = TellingTier()
    bench = PartialBench(tier)
    prompt, other = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5]), chain_over([*PREFIX, 1, 2, 3, 9])
    store(bench.hierarchy, other, 0, 2)
    tier.fill(other, 2)
    tier.read_fails[other.hashes[2]] = outcome
    wait_until(lambda: bench.scheduler.lookup(prompt, 0) is not PENDING)
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE
    assert bench.loaded(0, 2 * BLOCK_SIZE) == [payload_of(name) for name in prompt.chain.hashes[:2]]
    bench.close()


def test_a_refused_view_falls_back_to_the_own_blocks_for_good(bench: PartialBench) -> None:
    held(bench, [*PREFIX, 1, 2, 3, 9])
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    start, lease_whole = bench.hierarchy.promoter.start, bench.hierarchy.promoter.lease_whole
    others = [prompt.chain.hashes[:2], []]

    def no_slot_for_the_view(claim: Any, run: list[ChainHash], *args: Any) -> None:
        if run in others:
            start(claim, run, *args)
        else:
            claim.refusal = Outcome.NO_SLOT

    bench.hierarchy.promoter.start = no_slot_for_the_view  # pyrefly: ignore[bad-assignment] # named otherwise
    bench.hierarchy.promoter.lease_whole = lambda claim, run: lease_whole(claim, run) if run in others else None
    for _ in range(3):
        assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE
    assert len(bench.asked) == 3  # own, view, own


def test_a_promise_that_lapsed_and_a_load_that_failed() -> None:
    clock = FakeClock()
    bench = PartialBench(clock=clock)
    held(bench, [*PREFIX, 1, 2, 3, 9])
    lapsed, failed = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5]), Prompt("b", [*PREFIX, 1, 2, 3, 4, 6])
    assert bench.scheduler.lookup(lapsed, 0) == 2 * BLOCK_SIZE + 3
    clock.advance(60)
    assert bench.scheduler.lookup(failed, BLOCK_SIZE) == BLOCK_SIZE + 3
    assert bench.scheduler.allocated("a", [0, 1, 2, 3], 2 * BLOCK_SIZE + 3) == 0
    assert bench.scheduler.allocated("b", [4, 5, 6, 7], BLOCK_SIZE + 3) == BLOCK_SIZE + 3
    bench.step()
    bench.stream.fail_next()
    assert bench.update().failed == (("b", 1),)
    assert bench.scheduler.lookup(failed, 0) == 0  # final for this request
    bench.close()


@pytest.mark.parametrize("point", ["looked up", "allocated", "copied"])
def test_an_abort_leaks_nothing(bench: PartialBench, point: str) -> None:
    held(bench, [*PREFIX, 1, 2, 3, 9])
    bench.scheduler.lookup(Prompt("a", [*PREFIX, 1, 2, 3, 4, 5]), 0)
    if point != "looked up":
        bench.scheduler.allocated("a", [0, 1, 2, 3], 2 * BLOCK_SIZE + 3)
        bench.step()
    if point == "copied":
        bench.stream.complete_all()
    bench.scheduler.finished("a")
    bench.step()
    bench.stream.complete_all()
    bench.update()


def test_a_name_that_tokens_alone_do_not_explain_is_nobodys_child(bench: PartialBench) -> None:
    store(bench.hierarchy, chain_over([*PREFIX, 1, 2, 3, 9], extra_keys={2: [("image", b"cat")]}))
    prompt = Prompt("a", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(prompt, 0) == 2 * BLOCK_SIZE
    held(bench, [*PREFIX, 1, 9, 9, 9])
    plain, image = Prompt("b", [*PREFIX, 1, 2, 3, 4, 5]), Prompt("c", [*PREFIX, 1, 2, 3, 4, 5])
    assert bench.scheduler.lookup(plain, 0) == 2 * BLOCK_SIZE + 1  # the worse one, but its tokens explain it
    image.chain = chain_over(image.tokens, extra_keys={2: [("image", b"dog")]})
    assert bench.scheduler.lookup(image, 0) == 2 * BLOCK_SIZE


def test_tails_are_named_by_their_tokens() -> None:
    chain = chain_over([*PREFIX, 1, 2, 3])
    tail = chain.partial_block(2 * BLOCK_SIZE + 2)
    assert tail is not None
    assert np.frombuffer(tail.tokens, "<u4").tolist() == [1, 2]
    assert tail.parent == chain.hashes[1]
    assert chain.is_plain(ChildBlock(tail.chain_hash, tail.tokens), tail.parent)
    assert chain.partial_block(2 * BLOCK_SIZE) is None
    assert record_of(chain, 1).chain_hash == chain_over(PREFIX).hashes[1]

"""Stories of a request's question: what nobody local has is asked of shared tiers once, in the background."""

from collections.abc import Callable, Iterator, Sequence
from threading import Event

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, hand_in, payload_of, store, wait_until

from kvtier.tiers.checksum import checksum
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution, Claim, Overlap
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, LoadPolicy, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome


class SharedTier(MemoryTier):
    """What others put there too: nothing is known before it was asked about."""

    name = "redis"
    is_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.known: set[ChainHash] = set()
        self.questions: list[int] = []  # blocks in each question
        self.answer: Callable[[Sequence[ChainHash]], int | Outcome] = self._count

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        self.questions.append(len(hashes))
        self.gate.wait(30)
        return self.answer(hashes)

    def _count(self, hashes: Sequence[ChainHash]) -> int:
        held = super().lookup(hashes)
        self.known.update(hashes[:held])
        return held

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self.known), len(hashes))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [h in self.known for h in hashes]


class Bench:
    """L2 of 32 slots over a file tier and a shared one."""

    def __init__(self, clock: FakeClock, load_policy: LoadPolicy = "load", failures: int = 2) -> None:
        self.file, self.shared, self.clock = MemoryTier(), SharedTier(), clock
        metrics, rates = Metrics(), Rates(load_policy)
        host = HostTier(HostRegion.allocate(32, SLOT_BYTES, huge_pages=False, prefault=False))
        patience = PortSettings(deadline=5.0, failures=failures, retry_after=1.0, num_threads=2)
        ports = [
            TierPort("file", lambda: self.file, patience, metrics, rates, clock),
            TierPort("redis", lambda: self.shared, patience, metrics, rates, clock),
        ]
        self.hierarchy = Hierarchy(host, ports, HierarchySettings(), metrics, rates, clock)
        self.tiers = self.hierarchy

    def settled(self, claim: Claim) -> int:
        """The promise, once it is made."""
        wait_until(lambda: self.tiers.poll(claim) is not PENDING)
        promised = self.tiers.poll(claim)
        assert isinstance(promised, int)
        return promised


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FakeClock())
    yield bench
    bench.shared.gate.set()
    assert bench.hierarchy.drain(60)
    bench.hierarchy.check()
    assert bench.hierarchy.promoter.idle
    bench.hierarchy.close()


def test_a_prefix_through_all_tiers_is_counted_where_it_was(bench: Bench) -> None:
    chain = chain_of(10)
    store(bench.hierarchy, chain, 0, 4)
    bench.hierarchy.drain(60)
    bench.file.blocks.clear()  # 2 and 3 are in L2 only …
    bench.file.fill(chain, 4, 5)
    bench.shared.blocks.clear()
    bench.shared.fill(chain, 6, 7)  # … and somebody else computed these
    claim = bench.tiers.submit(chain.hashes, chain.root, 2, block_size=4)
    assert bench.settled(claim) == 6
    assert claim.found == Attribution(blocks=10, l1=2, l2=2, file=2, redis=2, miss=2)
    assert bench.shared.questions == [4]  # only what nobody local has
    with bench.tiers.lease(claim) as lease:
        for slot, chain_hash in zip(lease.slots, chain.hashes[2:8], strict=True):
            assert bytes(bench.hierarchy.host.region.slot(slot)) == payload_of(chain_hash)


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CHECKSUM, Outcome.TIMEOUT])
def test_what_a_tier_promised_and_could_not_give_is_looked_for_in_the_others(bench: Bench, outcome: Outcome) -> None:
    chain = chain_of(6)
    store(bench.hierarchy, chain, 0, 1)
    bench.file.fill(chain, 1, 2, 3, 4, 5)
    bench.shared.fill(chain, 3, 4)
    bench.file.read_fails[chain.hashes[3]] = outcome
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.settled(claim) == 6
    assert bench.shared.questions == [3]
    assert claim.found == Attribution(blocks=6, l2=5, redis=1)  # the file's others are in L2 by now
    with bench.tiers.lease(claim) as lease:
        loaded = [bytes(bench.hierarchy.host.region.slot(slot)) for slot in lease.slots]
        assert loaded == list(map(payload_of, chain.hashes))


def test_a_second_failure_is_final(bench: Bench) -> None:
    chain = chain_of(3)
    bench.file.fill(chain)
    bench.shared.fill(chain)
    bench.file.read_fails = bench.shared.read_fails = dict.fromkeys(chain.hashes, Outcome.IO_ERROR)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.settled(claim) == 0
    assert (bench.file.reads, bench.shared.reads) == (chain.hashes, chain.hashes)
    bench.tiers.cancel(claim)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Stored blocks are hashed only while it is set; a question waits for that for a minute."""
    go = Event()

    def when_let(region: HostRegion, slots: Sequence[int]) -> list[int]:
        assert go.wait(60)
        return [checksum(region.slot(slot)) for slot in slots]

    monkeypatch.setattr("kvtier.tiers.hierarchy.stores._SEALED_NOW", -1)  # else who stores a few bytes hashes them
    monkeypatch.setattr(HostRegion, "checksums", when_let)
    monkeypatch.setattr("kvtier.tiers.hierarchy.hierarchy._SEALING", 60.0)
    go.set()
    yield go
    go.set()


def test_a_block_that_is_being_hashed_is_waited_for(bench: Bench, hashing: Event) -> None:
    chain = chain_of(6)
    store(bench.hierarchy, chain, 0, 2)
    hashing.clear()
    hand_in(bench.hierarchy, chain, 2, 4)  # the copies have ended, the blocks have no checksum yet …
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)  # … and the prompt is asked again
    assert bench.tiers.poll(claim) is PENDING
    assert bench.shared.questions == []  # nobody else is troubled for them
    before: Attribution | None = claim.found
    hashing.set()
    assert bench.settled(claim) == 4
    assert (before, claim.found) == (None, Attribution(blocks=6, l2=4, miss=2))
    assert bench.shared.questions == [2]
    bench.tiers.cancel(claim)


def test_a_block_published_while_it_is_looked_for_is_found(
    bench: Bench, hashing: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(3)
    hashing.clear()
    hand_in(bench.hierarchy, chain)
    look = bench.hierarchy._lookup

    def overtaken(
        hashes: Sequence[ChainHash], num_l1: int = 0, places: list[int] | None = None, avoid: TierPort | None = None
    ) -> tuple[Attribution, list[int]]:
        where = look(hashes, num_l1, places, avoid)
        hashing.set()  # behind this look the store ends
        assert bench.hierarchy.drain(60)
        return where

    monkeypatch.setattr(bench.hierarchy, "_lookup", overtaken)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.tiers.poll(claim) == 3
    assert bench.shared.questions == []
    bench.tiers.cancel(claim)


def test_the_query_runs_in_the_background(bench: Bench) -> None:
    chain = chain_of(3)
    bench.shared.gate.clear()  # the server does not answer
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.tiers.poll(claim) is PENDING
    before: Attribution | None = claim.found
    bench.shared.gate.set()
    assert bench.settled(claim) == 0
    assert (before, claim.found) == (None, Attribution(blocks=3, miss=3))
    assert claim.good_until > 0  # asking anew costs the server a round trip: not at every step


def test_sixty_four_requests_with_one_prefix_ask_once_and_read_once(bench: Bench) -> None:
    chain = chain_of(8)
    bench.shared.fill(chain)
    bench.shared.gate.clear()
    claims = [bench.tiers.submit(chain.hashes, chain.root, block_size=4) for _ in range(64)]
    bench.shared.gate.set()
    assert [bench.settled(claim) for claim in claims] == [8] * 64
    assert bench.shared.questions == [8]
    assert sorted(bench.shared.reads) == sorted(chain.hashes)
    for claim in claims:
        bench.tiers.cancel(claim)


def test_a_silent_server_is_given_up_at_its_deadline_and_then_left_alone(bench: Bench) -> None:
    chain, other = chain_of(3), chain_of(3, first_token=100)
    bench.shared.gate.clear()
    for num_asked, names in enumerate((chain, other)):  # two failures open the breaker
        claim = bench.tiers.submit(names.hashes, names.root, block_size=4)
        wait_until(lambda: len(bench.shared.questions) > num_asked)  # noqa: B023
        assert bench.tiers.poll(claim) is PENDING
        bench.clock.advance(6)
        assert bench.settled(claim) == 0
    assert not bench.hierarchy.ports[1].breakers["read"].closed
    num_asked = len(bench.shared.questions)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.tiers.poll(claim) == 0  # at once: nobody waits for a dead server
    assert len(bench.shared.questions) == num_asked


def test_a_stale_answer_is_ignored(bench: Bench) -> None:
    chain = chain_of(4)
    bench.shared.fill(chain)
    bench.shared.gate.clear()
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    bench.tiers.cancel(claim)  # the request was aborted
    bench.shared.gate.set()
    assert bench.hierarchy.drain(60)
    assert bench.shared.reads == []
    assert not bench.hierarchy.locator.unread  # or no `wait_progress` would ever wait again


def test_a_question_that_finds_no_room_in_the_queue_is_no_news(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.hierarchy.ports[1].queue, "_max_queued", 0)
    chain = chain_of(4)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.tiers.poll(claim) == 0
    assert not bench.hierarchy.locator.unread


def test_lookup_waits_for_shared_tiers_up_to_its_timeout(bench: Bench) -> None:
    chain = chain_of(4)
    bench.shared.fill(chain, 0, 1)
    assert bench.tiers.locate(chain.hashes, 10.0) == Attribution(blocks=4, redis=2, miss=2)
    bench.shared.gate.clear()
    bench.shared.known.clear()
    assert bench.tiers.locate(chain.hashes, 0.01) == Attribution(blocks=4, miss=4)


def test_slower_than_computing_is_said_once_and_for_good() -> None:
    bench = Bench(FakeClock(), load_policy="recompute")
    chain = chain_of(4)
    bench.shared.fill(chain)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.settled(claim) == 0
    assert claim.refusal is Outcome.RECOMPUTE
    assert bench.shared.reads == []
    bench.hierarchy.close()


@pytest.mark.parametrize(("overlap", "promised"), [(Overlap.NONE, 3), (Overlap.BACK, 4), (Overlap.WHOLE, 0)])
@pytest.mark.parametrize("is_slow", [True, False])
def test_what_l2_has_is_loaded_though_the_rest_is_slower_to_load_than_to_compute(
    overlap: Overlap, promised: int, is_slow: bool
) -> None:
    bench = Bench(FakeClock(), load_policy="auto")
    chain = chain_of(4)
    store(bench.hierarchy, chain, 0, 3)
    assert bench.hierarchy.drain(60)
    bench.file.blocks.clear()
    bench.file.fill(chain, 3)
    bench.hierarchy.rates.loaded("file", SLOT_BYTES, 1.0)
    bench.hierarchy.computed(4, 0.2 if is_slow else 1.1)  # a block loads in 1 s; four are computed in 0.8 s or 4.4 s
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4, overlap=overlap)
    assert bench.settled(claim) == (promised if is_slow else 4)
    assert claim.refusal is (None if promised or not is_slow else Outcome.RECOMPUTE)
    with bench.tiers.lease(claim) as lease:
        assert lease.hashes == chain.hashes[: promised if is_slow else 4]
    bench.hierarchy.check()
    bench.hierarchy.close()


@pytest.mark.parametrize("num_times", [1, 2, 4])
def test_a_server_that_kept_silent_is_read_again_while_computing_would_take_longer(
    monkeypatch: pytest.MonkeyPatch, num_times: int
) -> None:
    bench, chain = Bench(FakeClock(), failures=9), chain_of(4)
    bench.shared.fill(chain)
    silent, read = [chain.hashes[1]] * num_times, bench.shared._read

    def read_in_time(chain_hash: ChainHash, buffer: memoryview) -> BlockRecord | Outcome:
        if chain_hash in silent:
            silent.remove(chain_hash)
            bench.clock.advance(0.6)
            return Outcome.TIMEOUT
        return read(chain_hash, buffer)

    monkeypatch.setattr(bench.shared, "_read", read_in_time)
    claim = bench.tiers.submit(chain.hashes, chain.root, block_size=4)
    assert bench.settled(claim) == (4 if num_times < 4 else 1)  # [cache] prefetch_deadline is 2 s
    assert not silent
    bench.hierarchy.close()
    bench.tiers.cancel(claim)

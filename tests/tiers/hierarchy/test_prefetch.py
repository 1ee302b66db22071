"""Stories of prefetches beside `test_hierarchy.py`: where a request would wait, lose or keep what it must not."""

from collections.abc import Callable, Sequence
from threading import Event, Thread

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, hierarchy_of, payload_of, record_of, store, wait_until
from fault_rig import Settled

from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings
from kvtier.tiers.pool import Lease
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome


class Gate(Event):
    """Says when a read has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


class HookedTier(MemoryTier):
    """Does what the test says before it forgets and after, and before it reads a given block."""

    def __init__(self) -> None:
        super().__init__()
        self.before_reset: Callable[[], object] = lambda: None
        self.after_reset: Callable[[], object] = lambda: None
        self.gates: dict[ChainHash, Event] = {}
        self.num_asked = 0  # hashes looked up

    def reset(self) -> None:
        self.before_reset()
        super().reset()
        self.after_reset()

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        for chain_hash in hashes:
            if chain_hash in self.gates:
                self.gates[chain_hash].wait(60)
        return super().read(hashes, into)

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        found = super().lookup(hashes)
        self.num_asked += found + 1
        return found

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        self.num_asked += len(hashes)
        return super().holds(hashes)


def test_a_run_that_ended_does_not_wait_for_reads_after_its_end(settled: Settled) -> None:
    tier, chain = HookedTier(), chain_of(4)
    tier.fill(chain)
    patience = PortSettings(deadline=3600, num_threads=2)
    settings = HierarchySettings(prefetch_deadline=3600)
    hierarchy = settled(hierarchy_of(slots=32, tier=tier, port_settings=patience, settings=settings))
    hierarchy.promoter._batch = 2  # two reads
    first, second = Event(), Event()
    tier.gates = {chain.hashes[0]: first, chain.hashes[2]: second}
    tier.read_fails = {chain.hashes[1]: Outcome.IO_ERROR}
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    assert hierarchy.poll(prefetch) is PENDING
    first.set()  # block 0 comes, block 1 fails; 2 and 3 still hang
    wait_until(lambda: hierarchy.poll(prefetch) == 1)
    hierarchy.cancel(prefetch)
    second.set()


def test_a_call_that_hangs_is_one_failure_however_many_reads_it_brings(settled: Settled) -> None:
    tier, clock, chain = HookedTier(), FakeClock(), chain_of(4)
    tier.fill(chain)
    patience = PortSettings(deadline=1.0, failures=2, num_threads=1, joined=8)
    hierarchy = settled(hierarchy_of(slots=32, tier=tier, clock=clock, port_settings=patience))
    hierarchy.promoter._batch = 1  # a read for each block
    one, three = Gate(), Gate()
    tier.gates = {chain.hashes[0]: one, chain.hashes[3]: three}
    first = hierarchy.submit(chain.hashes[:1], chain.root)
    assert one.reached.wait(60)
    rest = hierarchy.submit(chain.hashes[1:], chain.hashes[0])  # three reads wait for the thread
    one.set()
    assert three.reached.wait(60)
    assert len(hierarchy.ports[0].queue.running) == 3  # in one call of the tier
    wait_until(lambda: hierarchy.poll(first) == 1)
    clock.advance(1.1)
    assert hierarchy.poll(rest) == 0
    assert hierarchy.host.pool.counts().quarantined == 3
    assert hierarchy.ports[0].breakers["read"].failures == 1
    assert hierarchy.lookup(chain.hashes[1:])["file"] == 3  # the breaker is closed
    three.set()
    hierarchy.cancel(rest)
    hierarchy.cancel(first)
    wait_until(lambda: hierarchy.host.pool.counts().quarantined == 0)


def test_what_is_dropped_before_it_is_looked_at_is_not_promised(
    settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy, chain = settled(hierarchy_of(slots=16, verify=True)), chain_of(3)
    store(hierarchy, chain)
    pool = hierarchy.host.pool
    lease = pool.lease

    def lease_and_lose(hashes: Sequence[ChainHash]) -> Lease:
        """Somebody else finds block 1 bad just after it was leased."""
        leased = lease(hashes)
        monkeypatch.setattr(pool, "lease", lease)
        hierarchy.host.region.slot(leased.slots[1])[:1] = b"?"
        pool.evict(chain.hashes[1:2])
        return leased

    monkeypatch.setattr(pool, "lease", lease_and_lose)
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    wait_until(lambda: hierarchy.poll(prefetch) is not PENDING)
    with hierarchy.lease(prefetch) as promised:
        assert promised.hashes == chain.hashes[:1]
        assert bytes(hierarchy.host.region.slot(promised.slots[0])) == payload_of(chain.hashes[0], SLOT_BYTES)


def test_a_lookup_alone_brings_a_tier_back(settled: Settled) -> None:
    """While a breaker is open nothing is found, so nothing is fetched: only lookups are left to send the probe."""
    tier, clock, chain = MemoryTier(), FakeClock(), chain_of(3)
    tier.fill(chain)
    hierarchy = settled(hierarchy_of(slots=8, tier=tier, clock=clock))
    for _ in range(2):
        hierarchy.ports[0].failed("read")
    assert hierarchy.lookup(chain.hashes)["file"] == 0
    clock.advance(1)
    wait_until(lambda: hierarchy.lookup(chain.hashes)["file"] == 3)


def test_an_engine_that_waits_is_not_kept_waiting_for_an_answer_that_is_there(settled: Settled) -> None:
    hierarchy, chain = settled(hierarchy_of(slots=8)), chain_of(2)
    store(hierarchy, chain)
    prefetch = hierarchy.submit(chain.hashes, chain.root)  # answered at once, not polled yet
    waiter = Thread(target=hierarchy.wait_progress, args=(3600,), daemon=True)
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()
    assert hierarchy.poll(prefetch) == 2
    hierarchy.wait_progress(0.001)  # polled: there is nothing new, and the wait ends by itself
    hierarchy.cancel(prefetch)


def test_time_in_the_queue_opens_no_breaker(settled: Settled) -> None:
    """A burst makes reads wait; a breaker that opened for that would turn load into an outage."""
    tier, clock = HookedTier(), FakeClock()
    first, second = chain_of(1), chain_of(1, first_token=100)
    for chain in (first, second):
        tier.fill(chain)
        tier.gates[chain.hashes[0]] = Event()
    patience = PortSettings(deadline=2.0, failures=1, retry_after=1.0, num_threads=1)
    hierarchy = settled(
        hierarchy_of(
            slots=16, tier=tier, clock=clock, port_settings=patience, settings=HierarchySettings(prefetch_deadline=100)
        )
    )
    prefetches = [hierarchy.submit(chain.hashes, chain.root) for chain in (first, second)]
    clock.advance(1.5)
    tier.gates[first.hashes[0]].set()
    wait_until(lambda: hierarchy.poll(prefetches[0]) == 1)
    running = hierarchy.ports[0].queue.running
    wait_until(lambda: any(each.job.deadline > 1003 for each in running.values()))  # the second runs now
    clock.advance(1.5)  # three seconds since it was asked for, half of them spent waiting
    assert hierarchy.poll(prefetches[1]) is PENDING
    assert hierarchy.ports[0].breakers["read"].closed
    tier.gates[second.hashes[0]].set()
    wait_until(lambda: hierarchy.poll(prefetches[1]) == 1)
    for prefetch in prefetches:
        hierarchy.cancel(prefetch)


def test_what_was_read_while_tiers_were_forgetting_is_forgotten_too(settled: Settled) -> None:
    """FAULTS 37: L2 has forgotten, the file tier not yet, and a request fetches."""
    tier, chain = HookedTier(), chain_of(3)
    tier.fill(chain)
    hierarchy = settled(hierarchy_of(slots=16, tier=tier))

    def fetch() -> None:
        prefetch = hierarchy.submit(chain.hashes, chain.root)
        wait_until(lambda: hierarchy.poll(prefetch) == 3)
        hierarchy.cancel(prefetch)

    tier.before_reset = fetch
    hierarchy.reset()
    assert hierarchy.lookup(chain.hashes).miss == 3


def test_nothing_old_is_passed_down_once_tiers_have_forgotten(settled: Settled) -> None:
    """FAULTS 37: WRITE_BACK would flush blocks of the old weights into a tier that is clean already."""
    tier, chain = HookedTier(), chain_of(3)
    hierarchy = settled(hierarchy_of(slots=16, tier=tier, settings=HierarchySettings(write_policy="write_back")))
    store(hierarchy, chain)
    assert hierarchy.host.pool.counts().dirty == 3
    tier.after_reset = lambda: hierarchy.drain(60)
    hierarchy.reset()
    assert not tier.blocks


def test_a_prefix_that_alternates_between_tiers_takes_linear_work(settled: Settled) -> None:
    tier, chain = HookedTier(), chain_of(1024)
    tier.fill(chain)
    hierarchy = settled(hierarchy_of(slots=4096, tier=tier))
    every_other = chain.hashes[::2]
    reservation = hierarchy.host.pool.reserve(every_other)
    assert reservation is not None
    for slot, i in zip(reservation.slots, range(0, 1024, 2), strict=True):
        hierarchy.host.region.slot(slot)[:] = payload_of(chain.hashes[i], SLOT_BYTES)
        hierarchy.host.records[slot] = record_of(chain, i)
    hierarchy.host.pool.seal(reservation).release()
    found = hierarchy.lookup(chain.hashes)
    assert (found["l2"], found["file"]) == (512, 512)
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    wait_until(lambda: hierarchy.poll(prefetch) == 1024)
    hierarchy.cancel(prefetch)
    assert tier.num_asked < 6 * 1024  # two lookups, and the reads
    assert sorted(tier.reads) == sorted(chain.hashes[1::2])

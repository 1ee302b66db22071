"""Stories of a demoter: what is taken, in what order a chain goes down, what fails with its parent, resets."""

from collections.abc import Iterator, Sequence

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, payload_of, record_of, wait_until

from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.hierarchy.demote import Demoter
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import ChainHash, Outcome


class Story:
    """A demoter over a tier in memory, and an L2 to demote from."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.tier = MemoryTier()
        self.metrics = Metrics()
        self.ended: list[tuple[ChainHash, Outcome]] = []

    def demoter(
        self, slots: int = 64, max_blocks: int | None = 1000, failures: int = 100, batch: int | None = None
    ) -> Demoter:
        self.host = HostTier(HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False))
        settings = PortSettings(deadline=2.0, failures=failures, retry_after=1.0, num_threads=1)
        self.port = TierPort("file", lambda: self.tier, settings, self.metrics, Rates("load"), self.clock)
        max_bytes = None if max_blocks is None else max_blocks * SLOT_BYTES
        queue = HierarchySettings(store_queue=max_bytes)
        demoter = Demoter(self.port, self.host, queue, self.metrics, self.clock, lambda seconds: None)
        if batch is not None:
            demoter._batch = batch
        return demoter

    def put(self, chain: TokenChain, *positions: int) -> list[ChainHash]:
        """Blocks of a chain into L2."""
        hashes = [chain.hashes[i] for i in positions or range(len(chain.hashes))]
        reservation = self.host.pool.reserve(hashes, chain.parent(positions[0] if positions else 0))
        assert reservation is not None
        for i, slot in zip(positions or range(len(hashes)), reservation.slots, strict=True):
            self.host.region.slot(slot)[:] = payload_of(chain.hashes[i])
            self.host.records[slot] = record_of(chain, i)
        self.host.pool.seal(reservation).release()
        return hashes

    def note(self, hashes: Sequence[ChainHash], outcomes: Sequence[Outcome]) -> None:
        self.ended += zip(hashes, outcomes, strict=True)

    def settle(self) -> None:
        self.tier.gate.set()
        assert self.port.queue.drain(60)

    def drops(self, reason: Outcome) -> float:
        return self.metrics.snapshot().get(f'kvtier_store_dropped_total{{tier="file",reason="{reason}"}}', 0)


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    story.settle()
    counts = story.host.pool.check()
    assert (counts.leased, counts.filling) == (0, 0)
    story.tier.check()
    story.port.close(10)
    story.host.close()


def test_what_waits_is_leased_and_bounded_and_the_newest_tail_is_refused(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(max_blocks=5)
    first, second = story.put(chain_of(3)), story.put(chain_of(4, first_token=100))
    assert demoter.offer(first, story.note) == 3
    assert demoter.offer(second, story.note) == 2
    assert demoter.offer([], story.note) == 0
    assert demoter.num_waiting == 5
    assert story.host.pool.counts().leased == 5  # nothing evicts them before they are written
    story.settle()
    assert set(story.tier.blocks) == {*first, *second[:2]}


@pytest.mark.parametrize("max_blocks", [1000, None])
def test_no_more_than_a_quarter_of_l2_waits(story: Story, max_blocks: int | None) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(slots=16, max_blocks=max_blocks)
    assert len(demoter.pass_down(story.put(chain_of(16)))) == 12
    assert demoter.num_waiting == story.host.pool.counts().leased == 4


def test_descendants_of_a_refused_block_are_refused_until_it_is_taken_itself(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(max_blocks=2)
    chain = chain_of(6)
    hashes = story.put(chain)
    assert demoter.offer(hashes[:4], story.note) == 2  # 2 and 3 are refused: the queue is full
    story.settle()
    assert demoter.offer(hashes[4:], story.note) == 2  # the next turn of the conversation
    story.settle()
    assert story.ended[2:] == [(h, Outcome.PARENT_FAILED) for h in hashes[4:]]  # nobody could reach them
    # Offered again from where it broke off, all goes down.
    for first in (2, 4):
        assert demoter.offer(hashes[first : first + 2], story.note) == 2
        story.settle()
    assert set(story.tier.blocks) == set(hashes)


def test_a_failed_block_takes_its_queued_descendants_with_it(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(batch=2)
    chain, other = chain_of(6), chain_of(2, first_token=100)
    hashes, unrelated = story.put(chain), story.put(other)
    story.tier.write_fails = {hashes[1]: Outcome.IO_ERROR}
    demoter.offer(hashes, story.note)
    demoter.offer(unrelated, story.note)
    story.settle()
    assert [outcome for _, outcome in story.ended] == [
        Outcome.OK, Outcome.IO_ERROR,  # batches of two
        Outcome.PARENT_FAILED, Outcome.PARENT_FAILED,
        Outcome.PARENT_FAILED, Outcome.PARENT_FAILED,
        Outcome.OK, Outcome.OK,  # another chain
    ]  # fmt: skip
    assert story.drops(Outcome.IO_ERROR) == 1
    assert story.drops(Outcome.PARENT_FAILED) == 4
    assert story.tier.writes == [*hashes[:2], *unrelated]  # the descendants were not even tried
    # Once the disk takes it, its descendants go too.
    story.tier.write_fails = {}
    assert demoter.offer(hashes, story.note) == 6
    story.settle()
    assert set(story.tier.blocks) == {*hashes, *unrelated}


def test_bytes_that_changed_since_they_were_sealed_are_never_written_nor_served(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter()
    hashes = story.put(chain_of(4))
    with story.host.pool.lease(hashes) as lease:
        story.host.region.slot(lease.slots[2])[0] ^= 1
    demoter.offer(hashes, story.note)
    story.settle()
    assert [outcome for _, outcome in story.ended] == [
        Outcome.OK, Outcome.OK, Outcome.CHECKSUM, Outcome.PARENT_FAILED
    ]  # fmt: skip
    assert list(story.tier.blocks) == hashes[:2]
    assert story.host.pool.holds(hashes) == [True, True, False, True]
    assert story.metrics.snapshot()['kvtier_corruption_total{tier="l2"}'] == 1


def test_with_the_breaker_open_blocks_are_dropped_without_being_hashed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    demoter = story.demoter(failures=1)
    hashes = story.put(chain_of(3))
    story.port.failed("write")

    def unexpected(region: object, slots: object) -> list[int]:
        raise AssertionError("hashed for nothing")

    monkeypatch.setattr("kvtier.tiers.host.host.HostRegion.checksums", unexpected)
    assert demoter.offer(hashes, story.note) == 3
    story.settle()
    assert {outcome for _, outcome in story.ended} == {Outcome.BREAKER_OPEN}
    assert story.drops(Outcome.BREAKER_OPEN) == 3


def test_a_hung_write_keeps_its_lease_and_counts_against_the_breaker(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(failures=1)
    hashes = story.put(chain_of(2))
    demoter.offer(hashes, story.note)
    wait_until(lambda: any(running.job.deadline < 1e9 for running in story.port.queue.running.values()))  # it has begun
    story.clock.advance(100)  # a write may wait as long as it likes, but not run so long
    story.port.tick()
    assert story.port.breakers["write"].state is not BreakerState.CLOSED
    assert story.host.pool.counts().leased == 2  # the storage still reads these bytes
    assert not story.ended
    story.settle()
    assert story.ended == [(h, Outcome.OK) for h in hashes]  # late, but whole


def test_close_drops_what_waits_and_a_closed_queue_takes_nothing(story: Story) -> None:
    story.tier.gate.clear()
    demoter = story.demoter(batch=1)
    hashes = story.put(chain_of(3))
    demoter.offer(hashes, story.note)
    wait_until(lambda: story.port.queue.running)
    story.port.queue.close(0.01)
    assert story.ended == [(h, Outcome.CLOSED) for h in hashes[1:]]
    assert demoter.offer(hashes[2:], story.note) == 1  # taken, and dropped at once
    assert story.ended[2:] == [(hashes[2], Outcome.QUEUE_FULL)]
    story.settle()
    assert demoter.num_waiting == 0


def test_children_take_their_failed_ancestors_along_once_the_disk_is_well(story: Story) -> None:
    """L2 seals a block once: without this one failed write would keep a shared prefix out of L3 for long."""
    demoter = story.demoter()
    chain = chain_of(8)
    hashes = story.put(chain, 0, 1, 2, 3)
    story.tier.write_fails = dict.fromkeys(hashes[1:], Outcome.IO_ERROR)
    demoter.pass_down(hashes)
    story.settle()
    story.tier.write_fails = {}  # what failed would wait a second more: no time passes here
    for i in (4, 5):
        demoter.pass_down(story.put(chain, i))
        story.settle()
    assert set(chain.hashes[:6]) == set(story.tier.blocks)
    assert demoter.num_in_line == 0

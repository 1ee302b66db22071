"""Stories of blocks that a lower tier had no room for, or failed to take: they reach it in the end, or are counted."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, hand_in, store, wait_until
from fault_rig import settle

from kvtier.tiers.errors import TierUnavailable
from kvtier.tiers.hierarchy import lower_tier
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import BlockRecord, ChainHash, Direction, Outcome

QUEUE = 4  # blocks that may wait for a tier


class Node:
    """A hierarchy over tiers in memory, on a clock the test moves."""

    def __init__(self, tiers: dict[str, MemoryTier], slots: int, settings: HierarchySettings) -> None:
        self.clock = FakeClock()
        self.tiers = tiers
        self.is_there = True  # the tiers can be opened
        metrics, rates = Metrics(), Rates("load")
        patience = PortSettings(deadline=60.0, failures=2, retry_after=1.0, num_threads=1)
        ports = [
            TierPort(name, lambda tier=tier: self._open(tier), patience, metrics, rates, self.clock)
            for name, tier in tiers.items()
        ]
        host = HostTier(HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False))
        self.hierarchy = Hierarchy(host, ports, settings, metrics, rates, self.clock)
        self.pool = host.pool

    def _open(self, tier: MemoryTier) -> MemoryTier:
        if not self.is_there:
            raise TierUnavailable("not mounted")
        return tier

    def store(self, *chains: TokenChain) -> None:
        for chain in chains:
            assert store(self.hierarchy, chain) == len(chain.hashes)

    def rest(self) -> None:
        """Let the tiers work until nothing more happens by itself: no drain, no call of an engine."""
        for tier in self.tiers.values():
            tier.gate.set()
        for port in self.hierarchy.ports:
            assert port.queue.drain(60)

    def pass_time(self, seconds: float) -> None:
        """An engine goes on asking."""
        self.clock.advance(seconds)
        self.hierarchy.tick()
        self.rest()

    def dropped(self, reason: Outcome, tier: str = "file") -> float:
        name = f'kvtier_store_dropped_total{{tier="{tier}",reason="{reason}"}}'
        return self.hierarchy.stats().get(name, 0)

    def missing(self, *chains: TokenChain, tier: str = "file") -> list[ChainHash]:
        """What L2 holds of the chains, and the tier does not."""
        names = [name for chain in chains for name in chain.hashes]
        held, below = self.pool.holds(names), self.tiers[tier].holds(names)
        return [name for name, here, there in zip(names, held, below, strict=True) if here and not there]


Open = Callable[..., Node]


@pytest.fixture
def node() -> Iterator[Open]:
    nodes: list[Node] = []

    def open_node(slots: int = 64, tiers: Sequence[str] = ("file",), **settings: object) -> Node:
        chosen = HierarchySettings(**{"store_queue": QUEUE * SLOT_BYTES, **settings})  # type: ignore[arg-type]
        nodes.append(Node({name: MemoryTier() for name in tiers}, slots, chosen))
        return nodes[-1]

    yield open_node
    for each in nodes:
        each.rest()
        settle(each.hierarchy)
        for tier in each.tiers.values():
            tier.check()


def conversations(*lengths: int) -> list[TokenChain]:
    return [chain_of(length, first_token=1000 * number) for number, length in enumerate(lengths, 1)]


@pytest.mark.parametrize("lengths", [[40], [1] * 40, [7, 9, 4, 12, 8]])
def test_a_burst_of_many_queues_is_below_once_the_tier_has_rested(node: Open, lengths: list[int]) -> None:
    story, chains = node(), conversations(*lengths)
    story.tiers["file"].gate.clear()
    story.store(*chains)
    assert story.pool.counts().leased <= QUEUE
    assert story.hierarchy.stats()['kvtier_store_waiting_blocks{tier="file"}'] == sum(lengths)
    story.rest()
    assert story.hierarchy.stats()['kvtier_store_waiting_blocks{tier="file"}'] == 0
    assert not story.missing(*chains)
    assert story.pool.counts().dirty == 0
    assert story.hierarchy.stats()['kvtier_store_blocks_total{tier="file"}'] == sum(lengths)
    assert not [name for name in story.hierarchy.stats() if "dropped" in name]
    # Oldest chains first, and no block before its parent: an end at any time leaves no gap.
    writes = story.tiers["file"].writes
    assert writes == [name for chain in chains for name in chain.hashes]


def test_chains_that_grow_side_by_side_go_down_in_their_order(node: Open) -> None:
    """As decoding stores them: a block of each in turn."""
    story, chains = node(), conversations(6, 6, 6)
    story.tiers["file"].gate.clear()
    for i in range(6):
        for chain in chains:
            assert store(story.hierarchy, chain, i, i + 1) == 1
    story.rest()
    assert not story.missing(*chains)
    at = {name: place for place, name in enumerate(story.tiers["file"].writes)}
    assert all(at[parent] < at[child] for chain in chains for parent, child in pairwise(chain.hashes))


def test_blocks_that_found_no_room_stay_longer_than_those_that_are_below(node: Open) -> None:
    story = node(slots=32)
    [old], [burst] = conversations(12), conversations(10)
    burst = chain_of(10, first_token=50_000)
    story.store(old)
    story.rest()
    story.tiers["file"].gate.clear()
    story.store(burst)
    assert story.pool.counts().dirty == 6  # beyond the four that are leased
    with story.pool.lease(old.hashes):
        pass  # just used: burst's blocks are older
    story.store(chain_of(18, first_token=90_000))
    assert story.pool.lookup(burst.hashes) == 10
    assert story.pool.lookup(old.hashes) == 4
    story.rest()
    assert not story.missing(burst)


def test_no_more_than_half_of_l2_has_a_right_to_stay(node: Open) -> None:
    story = node(slots=32)
    story.tiers["file"].gate.clear()
    story.store(*conversations(10, 10, 10))
    assert story.pool.counts().dirty == 16
    story.rest()
    assert story.pool.counts().dirty == 0
    assert len(story.tiers["file"].blocks) == 30


def test_what_l2_loses_first_is_counted_and_told_once_a_minute(node: Open, caplog: pytest.LogCaptureFixture) -> None:
    story = node(slots=16)
    story.tiers["file"].gate.clear()
    with caplog.at_level(logging.WARNING):
        story.store(*conversations(*[8] * 6))  # 48 blocks through 16 slots
        num_lost = story.dropped(Outcome.EVICTED)
        assert num_lost == 48 - 16
        assert story.dropped(Outcome.EVICTED) == num_lost  # asking counts nothing twice
        story.store(*[chain_of(8, first_token=70_000)])
        assert story.dropped(Outcome.EVICTED) == 40
        assert len(caplog.records) == 1
        story.clock.advance(60.0)
        story.store(*[chain_of(8, first_token=80_000)])
        assert story.dropped(Outcome.EVICTED) == 48
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("file: 32 blocks left host memory before they were written")
    assert told[1].startswith("file: 16 blocks")  # those of the minute between
    assert all("[host] size" in line and "admit_after" in line for line in told)
    story.rest()
    names = [name for port in story.tiers.values() for name in port.blocks]
    assert len(names) == 16


def test_a_tier_that_is_away_gets_what_l2_kept_when_it_is_back(node: Open) -> None:
    story = node(slots=64)
    tier, chains = story.tiers["file"], conversations(6, 9, 5)
    tier.broken = True
    for chain in chains[:2]:
        story.store(chain)
        story.rest()
    story.hierarchy.tick()
    assert not story.hierarchy.ports[0].writable
    story.store(chains[2])
    story.rest()
    assert not tier.blocks
    reasons = (Outcome.IO_ERROR, Outcome.BREAKER_OPEN, Outcome.PARENT_FAILED)
    num_failed = sum(map(story.dropped, reasons))
    assert 0 < num_failed <= 20
    assert story.pool.counts().dirty == 0  # nobody can say when it is back: the usual order holds meanwhile
    tier.broken = False
    story.pass_time(1.0)  # sends the probe that is due
    assert not story.missing(*chains)
    assert num_failed <= sum(map(story.dropped, reasons)) <= 20  # each once at most, however often it was tried


def test_one_block_that_always_fails_holds_up_nothing_else(node: Open) -> None:
    story = node(slots=64)
    tier, [bad, good] = story.tiers["file"], conversations(3, 3)
    tier.write_fails = {bad.hashes[1]: Outcome.IO_ERROR}
    story.store(bad, good)
    story.rest()
    assert story.missing(bad, good) == bad.hashes[1:2]
    later = [chain_of(3, first_token=1000 * number) for number in range(50, 60)]
    for chain in later:
        story.store(chain)
        story.pass_time(0.3)
        assert not story.missing(chain)
    assert 2 <= tier.writes.count(bad.hashes[1]) <= 5  # in three seconds
    for _ in range(600):
        story.pass_time(1.0)
    assert tier.writes.count(bad.hashes[1]) <= 25  # at most once a minute in the end
    assert story.dropped(Outcome.IO_ERROR) == 1
    tier.write_fails = {}
    story.pass_time(61.0)
    assert not story.missing(bad)


def test_a_full_disk_is_not_hashed_for_again_and_again(node: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.hierarchy.demote.BATCH_BYTES", 2 * SLOT_BYTES)
    story = node(slots=64, store_queue=None)
    tier, chains = story.tiers["file"], conversations(*[1] * 12)
    tier.write_fails = {chain.hashes[0]: Outcome.FULL for chain in chains}
    story.store(*chains)
    story.rest()
    assert len(tier.writes) == 12
    for _ in range(10):
        story.pass_time(1.1)
    assert len(tier.writes) <= 12 + 2 * 5  # a batch at a time, ever more rarely
    tier.write_fails = {}
    story.pass_time(61.0)
    assert not story.missing(*chains)


def test_each_of_several_tiers_gets_all_at_its_own_pace(node: Open) -> None:
    story, chains = node(slots=64, tiers=("file", "redis")), conversations(9, 9, 9)
    story.tiers["redis"].gate.clear()
    for chain in chains:
        story.store(chain)
        assert story.hierarchy.ports[0].queue.drain(60)
    assert not story.missing(*chains, tier="file")
    assert len(story.missing(*chains, tier="redis")) == 27
    assert story.pool.counts().dirty == 0  # the other tier has them
    story.rest()
    assert not story.missing(*chains, tier="redis")
    assert story.tiers["file"].writes == [name for chain in chains for name in chain.hashes]  # none of them twice


def test_of_two_tiers_the_one_that_was_away_gets_what_it_missed(node: Open) -> None:
    story, chains = node(slots=64, tiers=("file", "redis")), conversations(9, 9)
    story.tiers["redis"].broken = True
    for chain in chains:
        story.store(chain)
        story.rest()
    assert not story.missing(*chains, tier="file")
    story.tiers["redis"].broken = False
    for _ in range(2):
        story.pass_time(1.0)
    assert not story.missing(*chains, tier="redis")
    assert len(story.tiers["file"].writes) == 18


def test_with_write_back_what_one_tier_took_reaches_the_other_as_well(node: Open) -> None:
    story = node(slots=64, tiers=("file", "redis"), write_policy="write_back")
    [chain] = conversations(20)
    story.tiers["redis"].broken = True
    story.store(chain)
    assert not story.hierarchy.drain(2.0)
    assert not story.missing(chain, tier="file")
    story.tiers["redis"].broken = False
    story.pass_time(1.0)
    assert story.hierarchy.drain(60)
    assert not story.missing(chain, tier="redis")


def test_what_admission_left_out_is_not_offered_when_there_is_room(node: Open) -> None:
    story = node(slots=64, admit_after="auto")
    tier, [first, second] = story.tiers["file"], conversations(QUEUE, 5)
    tier.gate.clear()
    story.store(first)  # the queue is full: from here on only what was seen before
    story.store(second)
    story.rest()
    for _ in range(5):
        story.pass_time(60.0)
    assert story.hierarchy.drain(60)
    assert story.missing(second) == second.hashes
    assert story.pool.counts().dirty == 0
    assert story.dropped(Outcome.NOT_ADMITTED) == 5


def test_what_waited_through_a_reset_never_lands(node: Open) -> None:
    story = node(slots=64)
    tier, [old] = story.tiers["file"], conversations(20)
    tier.gate.clear()
    story.store(old)
    story.hierarchy.reset()
    story.store(*[chain_of(3, first_token=90_000)])
    story.rest()
    assert story.hierarchy.drain(60)
    assert set(tier.blocks) == set(chain_of(3, first_token=90_000).hashes)
    assert story.dropped(Outcome.EVICTED) == 0  # a reset is no loss


def test_close_writes_what_stands_in_line_while_it_has_time(node: Open) -> None:
    story, [chain] = node(slots=64), conversations(40)
    tier = story.tiers["file"]
    tier.gate.clear()
    story.store(chain)
    tier.gate.set()
    story.hierarchy.close()
    assert tier.blocks.keys() == set(chain.hashes)


def test_what_close_has_no_time_for_is_counted_and_told(node: Open, caplog: pytest.LogCaptureFixture) -> None:
    story, [chain] = node(slots=64), conversations(40)
    story.tiers["file"].gate.clear()
    story.store(chain)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        story.hierarchy.close(0.1)
    assert time.monotonic() - began < 30.0
    story.tiers["file"].gate.set()
    wait_until(lambda: not story.hierarchy.ports[0].queue.running)
    assert len(story.tiers["file"].blocks) + story.dropped(Outcome.CLOSED) == 40
    assert "blocks of host memory were not written before the end" in caplog.text


def test_a_drain_reaches_what_failed_a_moment_ago(node: Open) -> None:
    story = node(slots=64)
    tier, [chain] = story.tiers["file"], conversations(6)
    tier.write_fails = dict.fromkeys(chain.hashes, Outcome.IO_ERROR)
    story.store(chain)
    story.rest()
    tier.write_fails = {}
    assert story.hierarchy.drain(60)  # the pause after a failure is for those who go on
    assert not story.missing(chain)


def test_the_step_that_stores_into_a_line_waits_for_no_disk(node: Open) -> None:
    story, chains = node(slots=64), conversations(*[4] * 12)
    story.tiers["file"].gate.clear()
    for chain in chains:
        assert hand_in(story.hierarchy, chain) == 4  # seals a few bytes on the caller's thread
    assert story.pool.lookup(chains[-1].hashes) == 4
    story.rest()
    assert not story.missing(*chains)


def outage(story: Node, chain: TokenChain) -> MemoryTier:
    """The tier went away, and its breaker opened, before it had any of the chain."""
    tier = story.tiers["file"]
    tier.broken = True
    story.store(chain)
    while story.hierarchy.ports[0].writable:
        story.pass_time(0.2)
    return tier


def test_a_tier_that_was_away_is_looked_for_while_nobody_asks(node: Open) -> None:
    story, [chain] = node(), conversations(20)
    outage(story, chain).broken = False
    story.clock.advance(1.0)
    wait_until(lambda: not story.missing(chain))  # no tick, no call


def test_a_drain_waits_for_a_tier_that_is_away_and_says_what_is_left(node: Open) -> None:
    story, [chain] = node(), conversations(20)
    tier = outage(story, chain)
    assert not story.hierarchy.drain(0.3)
    back = threading.Timer(0.2, lambda: setattr(tier, "broken", False))
    back.start()
    assert story.hierarchy.drain(60)  # its probe is not due yet by the clock
    assert not story.missing(chain)
    back.join()


def test_a_close_tries_a_tier_that_was_away(node: Open, caplog: pytest.LogCaptureFixture) -> None:
    story, [chain] = node(), conversations(20)
    outage(story, chain).broken = False
    story.hierarchy.close()
    assert story.tiers["file"].blocks.keys() == set(chain.hashes)
    assert "not written" not in caplog.text


def test_the_line_about_what_was_not_written_says_what_would_help(node: Open, caplog: pytest.LogCaptureFixture) -> None:
    away, failing, [chain] = node(), node(), conversations(20)
    outage(away, chain)
    away.hierarchy.close(0.2)
    assert "file: 20 blocks of host memory were not written before the end: it does not answer" in caplog.text
    caplog.clear()
    tier = failing.tiers["file"]
    tier.write_fails = dict.fromkeys(chain.hashes, Outcome.FULL)
    failing.store(chain)
    assert not failing.hierarchy.drain(60)  # in less: trying again does not help
    failing.hierarchy.close()
    assert "it fails to store them" in caplog.text


def test_a_tier_that_comes_back_empty_gets_all_that_l2_has(node: Open) -> None:
    story, [old, new] = node(), conversations(6, 9)
    story.store(old)
    story.rest()
    assert not story.missing(old)
    tier = outage(story, new)
    story.pass_time(1.0)  # a probe that fails: the tier is opened anew
    tier.blocks.clear()
    tier.broken = False
    assert story.hierarchy.drain(60)
    assert not story.missing(old, new)


class FailingTier(MemoryTier):
    """Its first writes fail. Of its probes, those before it was reopened fail."""

    num_failures = 0
    num_opened = 0

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        if self.num_failures > 0:
            self.num_failures -= 1
            return [Outcome.IO_ERROR] * len(records)
        return super().write(records, payloads)

    def probe(self, direction: Direction) -> bool:
        return self.num_failures == 0 and self.num_opened != 1


@pytest.fixture
def idle() -> Iterator[Callable[[FailingTier, PortSettings], Hierarchy]]:
    """Opens a hierarchy over one tier, on the real clock: whatever happens later happens without a call."""
    opened: list[Hierarchy] = []

    def open(tier: FailingTier, settings: PortSettings) -> Hierarchy:
        def open_tier() -> MemoryTier:
            tier.num_opened += 1
            if tier.num_opened > 1:
                tier.gate.wait(60)
            return tier

        metrics, rates = Metrics(), Rates("load")
        host = HostTier(HostRegion.allocate(8, SLOT_BYTES, huge_pages=False, prefault=False))
        ports = [TierPort("file", open_tier, settings, metrics, rates)]
        opened.append(Hierarchy(host, ports, HierarchySettings(), metrics, rates))
        return opened[-1]

    yield open
    for hierarchy in opened:
        hierarchy.close()


def test_blocks_that_failed_until_the_breaker_opened_are_written_without_a_call(
    idle: Callable[[FailingTier, PortSettings], Hierarchy],
) -> None:
    tier = FailingTier()
    tier.num_failures, tier.num_opened = 4, 1  # their pauses come to be longer than `retry_after`
    hierarchy, chain = idle(tier, PortSettings(failures=4, retry_after=0.2)), chain_of(2)
    store(hierarchy, chain)
    wait_until(lambda: all(tier.holds(chain.hashes)))


def test_blocks_stored_while_a_read_probe_reopens_a_tier_are_written_without_a_call(
    idle: Callable[[FailingTier, PortSettings], Hierarchy],
) -> None:
    tier = FailingTier()
    hierarchy, chain = idle(tier, PortSettings(failures=2, retry_after=0.05)), chain_of(2)
    port = hierarchy.ports[0]
    tier.gate.clear()
    port.failed("read")
    port.failed("read")
    wait_until(lambda: tier.num_opened == 2)
    store(hierarchy, chain)
    wait_until(lambda: hierarchy.stats().get('kvtier_breaker_open{tier="file",direction="read"}') == 1)
    time.sleep(0.3)  # the backlog's timer ends meanwhile
    tier.gate.set()
    wait_until(lambda: all(tier.holds(chain.hashes)))


def test_a_port_without_a_thread_to_spare_is_probed_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    port = TierPort("file", MemoryTier, PortSettings(failures=1, retry_after=0.02), Metrics(), Rates("load"))
    port.probe_alone()
    with monkeypatch.context() as patched:
        patched.setattr(lower_tier.Thread, "start", refuse)
        port.failed("read")
    assert port.is_off
    wait_until(lambda: port.tick() or not port.is_off)
    port.close(10)

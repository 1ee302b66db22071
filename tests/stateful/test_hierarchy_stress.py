"""Many threads at once: requests fetch, claim and store overlapping chains while the tier below fails at random."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from doubles import MemoryTier, chain_of, fill_slots, hierarchy_of, payload_of, record_of, reserve

from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, WritePolicy
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

SHARED = 12  # blocks that all chains begin with
NUM_REQUESTS = 60  # per thread


class MoodyTier(MemoryTier):
    """Fails, forgets, corrupts and evicts as its dice say."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        results = super().read(hashes, into)
        if self.dice.random() < 0.2:
            i = self.dice.randrange(len(results))
            into[i][:4] = b"????"  # an Outcome means rubbish in the buffer
            results[i] = self.dice.choice([Outcome.IO_ERROR, Outcome.CHECKSUM, Outcome.EVICTED])
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        outcomes = super().write(records, payloads)
        if self.dice.random() < 0.1:
            i = self.dice.randrange(len(outcomes))
            self.discard([record.chain_hash for record in records[i:]])
            outcomes[i:] = [Outcome.IO_ERROR] + [Outcome.PARENT_FAILED] * (len(outcomes) - i - 1)
        return outcomes


def overlapping_chains(count: int) -> list[TokenChain]:
    """Chains of twenty blocks that share their first twelve."""
    chains = []
    for n in range(count):
        chain = chain_of(SHARED)
        chain.extend(list(range(10_000 * (n + 1), 10_000 * (n + 1) + 32)))
        chains.append(chain)
    return chains


class Request:
    """What a scheduler does for one request, on whatever thread it runs."""

    def __init__(self, hierarchy: Hierarchy, chain: TokenChain, dice: random.Random) -> None:
        self.hierarchy = hierarchy
        self.chain = chain
        self.dice = dice

    def run(self) -> int:
        """Load what is there, store the rest; returns how many blocks were loaded."""
        first = self.dice.randrange(4)
        hashes = self.chain.hashes[first:]
        found = self.hierarchy.lookup(self.chain.hashes, first)
        num_loaded = self.load(hashes, first) if found.blocks - found.miss > first else 0
        epoch = self.hierarchy.epoch
        reservation = reserve(self.hierarchy, hashes[num_loaded:], self.chain.parent(first + num_loaded))
        if reservation is not None:
            if self.dice.random() < 0.1:
                self.hierarchy.abandon(reservation, Outcome.COPY_FAILED)
            else:
                fill_slots(self.hierarchy, reservation.slots, reservation.hashes)
                at = [first + num_loaded + index for index in reservation.indices]
                self.hierarchy.seal(reservation, [record_of(self.chain, i) for i in at], epoch)
        return num_loaded

    def load(self, hashes: list[ChainHash], first: int) -> int:
        prefetch = self.hierarchy.submit(hashes, self.chain.parent(first))
        if self.dice.random() < 0.2:  # aborted at once
            self.hierarchy.cancel(prefetch)
            return 0
        while (found := self.hierarchy.poll(prefetch)) is PENDING:
            self.hierarchy.wait_progress(0.01)
        if self.dice.random() < 0.1:  # aborted after the promise
            self.hierarchy.cancel(prefetch)
            return 0
        with self.hierarchy.lease(prefetch) as lease:
            assert len(lease) == found
            assert lease.hashes == hashes[: len(lease)]
            for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
                assert bytes(self.hierarchy.host.region.slot(slot)) == payload_of(chain_hash), "another block's bytes"
            return len(lease)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_threads_share_one_hierarchy_over_a_failing_tier(write_policy: WritePolicy) -> None:
    tier = MoodyTier(seed=1)
    chains = overlapping_chains(6)
    tier.fill(chains[0])
    hierarchy = hierarchy_of(
        slots=48,  # less than half of what the chains need
        tier=tier,
        settings=HierarchySettings(write_policy=write_policy, prefetch_deadline=5.0),
        port_settings=PortSettings(deadline=5.0, failures=3, retry_after=0.002, num_threads=2),
    )
    done = Event()

    def serve(number: int) -> int:
        dice = random.Random(number)
        return sum(Request(hierarchy, dice.choice(chains), dice).run() for _ in range(NUM_REQUESTS))

    def disturb() -> int:
        """An operator: resets and checks while all runs."""
        num_resets = 0
        while not done.wait(0.02):
            hierarchy.promoter.check()
            hierarchy.host.pool.check()
            if num_resets < 5 and tier.reads:  # a reset before the first read would leave the tier nothing to be read
                hierarchy.reset()
                num_resets += 1
        return num_resets

    with ThreadPoolExecutor(7) as threads:
        operator = threads.submit(disturb)
        servers = [threads.submit(serve, number) for number in range(6)]
        try:
            num_loaded = sum(server.result(60) for server in servers)
        finally:
            done.set()
        assert operator.result(60) > 0
    # At rest nothing is leased, half filled or quarantined, and nobody forgot a lease (I3).
    assert hierarchy.drain(60)
    hierarchy.check()
    assert hierarchy.promoter.idle
    assert hierarchy.host.pool.num_leaked == 0
    assert num_loaded > 0
    assert tier.reads  # both tiers had their part
    assert tier.writes
    tier.check()
    hierarchy.close()
    hierarchy.close()  # idempotent

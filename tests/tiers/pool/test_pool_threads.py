"""SlotPool under several threads, and under whole traces of prompts."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
from at_once import at_once

from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.tier import ChainHash

pytestmark = pytest.mark.usefixtures("way")

Chain = Callable[..., list[ChainHash]]


def hit_share(trace: Iterable[Sequence[ChainHash]], num_slots: int, policy: str) -> float:
    """The share of a trace's blocks that a pool with this policy would have held; each item is one prompt's chain."""
    pool = SlotPool(num_slots, policy=policy)
    num_blocks = num_hits = 0
    for hashes in trace:
        with pool.lease(hashes) as hits:
            num_blocks += len(hashes)
            num_hits += len(hits)
            reservation = pool.reserve(hashes)
            if reservation is not None:
                pool.seal(reservation).release()
    return num_hits / num_blocks


def test_s3fifo_keeps_what_comes_back(chain: Chain) -> None:
    # A system prompt used by every other request, among prompts that never return.
    system = chain(*range(20))
    trace = []
    for i in range(200):
        trace.append(system if i % 4 == 0 else chain(*range(1000 + 30 * i, 1030 + 30 * i)))
    shares = {name: hit_share(trace, 64, name) for name in ("lru", "s3fifo")}
    assert shares["lru"] < 0.01  # three strangers in between push it out
    assert shares["s3fifo"] > 0.1  # of at most 20 × 49 / (20 × 50 + 30 × 150) = 0.178


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "tail"])
def test_threads_storing_and_reading_the_same_chains(chain: Chain, policy: str) -> None:
    """FAULTS 20: whoever seals a block writes its own key into the slot; a lease always finds the key it asked for."""
    pool = SlotPool(64, policy=policy)
    content: list[ChainHash | None] = [None] * 64
    chains = [chain(1, *range(10 * i, 10 * i + 12)) for i in range(12)]
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            blocks = rng.choice(chains)[: rng.randint(1, 13)]
            with pool.lease(blocks) as lease:
                if [content[slot] for slot in lease.slots] != lease.hashes:
                    failures.append("a leased slot holds another block")
                reservation = pool.reserve(blocks)
                if reservation is None:
                    continue
                for slot, name in zip(reservation.slots, reservation.hashes, strict=True):
                    content[slot] = name
                verb = rng.randrange(8)
                if verb == 0:
                    pool.abandon(reservation)
                elif verb == 1:
                    pool.quarantine(reservation)
                    pool.settle(reservation)
                elif verb == 2:
                    del reservation
                else:
                    pool.seal(reservation).release()
            if rng.random() < 0.05:
                pool.evict(rng.choice(chains))

    at_once(*(partial(work, seed) for seed in range(4)))
    assert not failures
    counts = pool.check()
    assert (counts.filling, counts.leased, counts.quarantined) == (0, 0, 0)
    assert pool.num_leaked == 0

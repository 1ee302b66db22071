"""SlotPool as scripted stories: what is stored, who is protected, what goes and when."""

import gc
import random
from functools import partial

import pytest
from at_once import at_once
from pools import Chain, PoolOf, reserved, store

from kvtier.tiers.pool.pool import PoolCounts, SlotPool
from kvtier.tiers.tier import ChainHash

pytestmark = pytest.mark.usefixtures("way")


def test_lru_evicts_the_oldest_chain_tail_first(pool_of: PoolOf, chain: Chain) -> None:
    pool, old, new = pool_of(6), chain(1, 2, 3), chain(11, 12, 13)
    store(pool, old)
    store(pool, new)
    store(pool, chain(21))
    assert (pool.lookup(old), pool.lookup(new)) == (2, 3)
    pool.lease(old).release()  # now the new chain is the older one
    store(pool, chain(31, 32))
    assert (pool.lookup(old), pool.lookup(new)) == (2, 1)
    with pool.lease(new):  # a lease is a use as well
        pass
    store(pool, chain(41, 42))  # 21 goes and then 31's tail, or 2: whichever was used longest ago
    assert pool.lookup(new) == 1
    assert pool.holds(chain(21)) == [False]


def test_held_and_filling_blocks_are_not_reserved_twice(pool_of: PoolOf, chain: Chain, policy: str) -> None:
    """FAULTS 20: the same key stored twice at once has one winner, and readers see a whole value."""
    pool, blocks = pool_of(6, policy), chain(1, 2, 3, 4)
    store(pool, blocks[:1])
    first = reserved(pool, blocks[:3])
    second = reserved(pool, blocks)
    assert (first.indices, second.indices) == ([1, 2], [3])
    assert second.parents == [blocks[2]]
    third = reserved(pool, blocks)
    assert len(third) == 0
    assert len(pool.seal(third)) == 0
    # The tail alone is sealed: no prefix yet. Then the middle arrives.
    pool.seal(second).release()
    assert pool.lookup(blocks) == 1
    pool.seal(first).release()
    assert pool.lookup(blocks) == 4


def test_partial_seal_abandon_and_drop(pool_of: PoolOf, chain: Chain, policy: str) -> None:
    pool, blocks = pool_of(4, policy), chain(1, 2, 3, 4)
    reservation = reserved(pool, blocks)
    pool.seal(reservation, [1, 0]).release()
    assert pool.lookup(blocks) == 2
    pool.abandon(reservation, [2])
    pool.abandon(reservation, [2])  # idempotent
    pool.abandon(reservation, [0])  # sealed: not its to abandon any more
    assert pool.check() == PoolCounts(free=1, filling=1, ready=2, leased=0, quarantined=0, dirty=0, tails=0)
    with pytest.raises(ValueError, match=r"positions \[1, 2\] are not filling"):
        pool.seal(reservation, [1, 2, 3])
    with pytest.raises(ValueError, match="given twice"):
        pool.seal(reservation, [3, 3])
    # The slot given back is another reservation's now: the first one cannot touch it.
    other = reserved(pool, chain(9))
    pool.abandon(reservation, [2])
    pool.seal(other).release()
    assert pool.lookup(chain(9)) == 1
    # Dropping what is left abandons it, and so does leaving the context.
    del reservation
    assert pool.check().filling == 0
    with reserved(pool, chain(5)) as unused:
        assert len(unused) == 1
    assert pool.check() == PoolCounts(free=1, filling=0, ready=3, leased=0, quarantined=0, dirty=0, tails=0)


def test_a_slot_counts_its_generations(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(1)
    first = reserved(pool, chain(1))
    slot = int(first.slots[0])
    assert pool.generation(slot) == first.generations[0] == 1
    lease = pool.seal(first)
    assert lease.generations == [1]
    lease.release()
    second = reserved(pool, chain(2))
    assert second.slots == [slot]
    assert pool.generation(slot) == second.generations[0] == 2


def test_a_lease_is_released_exactly_once(pool_of: PoolOf, chain: Chain, policy: str) -> None:
    """FAULTS 21: released twice is idempotent, never is noticed; a release after somebody reclaimed it does nothing."""
    pool, blocks = pool_of(2, policy), chain(1, 2)
    store(pool, blocks)
    first, second = pool.lease(blocks), pool.lease(blocks)
    assert "held" in repr(first)
    first.release()
    first.release()  # twice: the second lease still stands
    assert first.released
    assert pool.counts().leased == 2
    assert pool.reserve(chain(3)) is None
    assert pool.num_leaked == 0
    # Whoever holds the deadline releases it; its holder, late, releases again.
    second.release()
    store(pool, chain(3, 4))
    with second:
        pass
    assert pool.check().leased == 0
    # Dropped without a release: reclaimed and counted. An empty lease is nothing to leak.
    pool.lease(chain(3))
    pool.lease(chain(99))
    assert pool.check().leased == 0
    assert pool.num_leaked == 1


def test_a_lease_dropped_inside_the_pool_itself_is_reclaimed_later(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(2)
    store(pool, chain(1, 2))
    lease, empty = pool.lease(chain(1, 2)), pool.lease(chain(9))
    # The garbage collector may run `__del__` while this very thread is in the pool. An empty lease is none to reclaim.
    with pool._lock:
        del lease, empty
        gc.collect()
        assert pool.num_leaked == 0
    assert pool.counts().leased == 0
    assert pool.num_leaked == 1


def test_exhaustion_is_an_answer_not_a_wait(pool_of: PoolOf, chain: Chain, policy: str) -> None:
    """FAULTS 22: all leased: a store is refused at once, nothing moves."""
    pool, blocks = pool_of(3, policy), chain(1, 2, 3)
    store(pool, blocks)
    with pool.lease(blocks):
        assert pool.reserve(chain(4)) is None
        assert pool.lookup(blocks) == 3
    assert pool.reserve(chain(4, 5, 6, 7)) is None  # more than there are slots
    assert pool.check() == PoolCounts(free=0, filling=0, ready=3, leased=0, quarantined=0, dirty=0, tails=0)
    assert pool.num_evicted == 0


def test_a_hash_given_twice_or_of_another_length_is_refused(pool_of: PoolOf, chain: Chain) -> None:
    pool, one = pool_of(4), chain(1)
    with pytest.raises(ValueError, match="comes twice among 3"):
        pool.reserve([*one, *chain(2), *one])
    with pytest.raises(ValueError, match="must be 32"):
        pool.lookup([b"short"])
    assert pool.check().free == 4  # and nothing changed
    with pytest.raises(ValueError, match="at least 1"):
        SlotPool(0)
    with pytest.raises(ValueError, match="'mru': use one of lru, s3fifo"):
        SlotPool(1, policy="mru")


def test_all_that_a_step_stores_is_taken_in_one_pass(chain: Chain, pool_of: PoolOf) -> None:
    one_by_one, at_once = pool_of(slots=8), pool_of(slots=8)
    for pool in (one_by_one, at_once):
        store(pool, chain(1, 2))
    wanted = [
        (chain(1, 2, 3), None),
        (chain(7, 8), None),
        (chain(1, 2, 4, 5)[2:], chain(1, 2)[-1]),
        (chain(9), b"x" * 32),
    ]
    expected = [one_by_one.reserve(hashes, parent) for hashes, parent in wanted]
    taken = at_once.reserve_each(wanted)
    for before, now in zip(expected, taken, strict=True):
        assert before is not None
        assert now is not None
        assert (now.hashes, now.indices, now.parents) == (before.hashes, before.indices, before.parents)
        at_once.seal(now).release()
        one_by_one.seal(before).release()
    for pool in (one_by_one, at_once):  # full now, and the same blocks hang on each other: tails go first
        store(pool, chain(20, 21, 22))
    assert [one_by_one.holds(hashes) for hashes, _ in wanted] == [at_once.holds(hashes) for hashes, _ in wanted]


def test_a_decoding_step_makes_room_without_the_parents_of_its_blocks(chain: Chain, pool_of: PoolOf) -> None:
    pool, num = pool_of(slots=40), 20
    parents = [chain(n)[0] for n in range(num)]
    for parent in parents:  # who would go first
        store(pool, [parent])
    others = chain(*range(100, 100 + num))
    store(pool, others)
    step = [(chain(n, 1000)[1:], parent) for n, parent in enumerate(parents)]
    taken = pool.reserve_each(step)
    for each, (names, parent) in zip(taken, step, strict=True):
        assert each is not None
        assert (each.hashes, each.indices, each.parents) == (names, [0], [parent])
    assert (any(pool.holds(others)), all(pool.holds(parents))) == (False, True)
    pool.seal_each([each for each in taken if each is not None]).release()
    assert all(pool.holds([names[0] for names, _ in step]))
    pool.check()


def test_of_a_decoding_step_that_has_too_little_room_each_sequence_gets_what_it_can(
    chain: Chain, pool_of: PoolOf
) -> None:
    pool = pool_of(slots=4)
    store(pool, chain(1, 2))
    with pool.lease(chain(1, 2)):
        taken = pool.reserve_each([(chain(n), chain(1, 2)[-1]) for n in (5, 6, 7, 8)])
    assert [each is not None for each in taken] == [True, True, False, False]
    for each in taken[:2]:
        assert each is not None
        pool.abandon(each)
    pool.check()


def test_a_chain_without_blocks_among_what_a_step_stores_takes_nothing(chain: Chain, pool_of: PoolOf) -> None:
    pool = pool_of(slots=8)
    first, nothing, last = pool.reserve_each([(chain(1, 2), None), ([], None), (chain(3), chain(1, 2)[-1])])
    assert first is not None
    assert nothing is not None
    assert last is not None
    assert (first.indices, nothing.hashes, last.indices) == ([0, 1], [], [0])
    before, at_the_end = pool.reserve_each([(chain(5, 6), None), ([], None)])
    assert before is not None
    assert at_the_end is not None
    assert (before.indices, at_the_end.hashes) == ([0, 1], [])
    for reservation in (first, last, before):
        pool.abandon(reservation)
    assert pool.check().free == 8


def test_a_block_in_a_preallocated_slot_keeps_its_parent_from_making_room(pool_of: PoolOf, chain: Chain) -> None:
    pool, (parent, child) = pool_of(6), chain(1, 2)
    store(pool, [parent])
    pool.reset()
    store(pool, [parent])
    slots, times = pool.preallocate(1)
    [made] = pool.reserve_at(slots, times, [([child], parent)])
    assert made is not None
    pool.seal(made).release()  # named after the reset: it is found
    assert pool.holds([child]) == [True]
    store(pool, chain(11, 12, 13, 14, 15))  # one block more than is free
    assert pool.holds([parent, child]) == [True, False]
    pool.check()


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "predicted"])
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

"""The pool's compiled twin beside the Python way: long chains, crowded buckets, mistakes, references."""

import gc
import hashlib
import itertools
import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
from extent import brief
from pools import state_of

from kvtier.tiers.compiled.twins import twin
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.naming.shape import KVShape
from kvtier.tiers.pool.lease import Lease, Reservation
from kvtier.tiers.pool.policy import LRU, POLICIES
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.pool.tail_index import EndedBlocks, TailIndex
from kvtier.tiers.returns import RequestEnd
from kvtier.tiers.tier import ChainHash

pytestmark = pytest.mark.skipif(twin("kvtier.tiers.pool.few_compiled") is None, reason="not built: `make compiled`")

NUM_SLOTS = 400


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[SlotPool]]:
    """A compiled pool and one of the Python way."""

    def make(policy: str) -> list[SlotPool]:
        compiled = SlotPool(NUM_SLOTS, policy=policy)
        with monkeypatch.context() as patches:
            patches.setenv("KVTIER_COMPILED", "off")
            python = SlotPool(NUM_SLOTS, policy=policy)
        assert [compiled._table.is_compiled, python._table.is_compiled] == [True, False]
        return [compiled, python]

    return make


def name_of(chain: int, block: int, *, crowded: bool) -> ChainHash:
    """Crowded names share their ends, and so their bucket: most of them live in the stash."""
    name = hashlib.sha256(b"%d %d" % (chain, block)).digest()
    return bytes([chain % 2]) * 8 + name[8:24] + bytes(8) if crowded and block % 3 == 0 else name


def test_an_end_finds_ready_and_filling_blocks_and_the_request_that_it_continues(
    pools: Callable[[str], list[SlotPool]],
) -> None:
    names = [name_of(1, n, crowded=False) for n in range(130)]
    found: list[EndedBlocks] = []
    for pool in pools("tail"):
        ready, filling = pool.reserve(names[:40]), pool.reserve(names[40:60], names[39])
        assert ready is not None
        assert filling is not None
        pool.seal(ready).release()
        pool.ended(RequestEnd(names[:40], 40, 5))
        table = pool._table
        found += [
            table.blocks_of(names, 130, 1e12),
            table.blocks_of(names[:40], 38, 1e12),
            table.blocks_of([], 0, 1e12),
        ]
        with pytest.raises(ValueError, match="must be 32"):
            table.blocks_of([b"short"], 1, 0.0)
        pool.abandon(filling)
    for (slots, *compiled), (same_slots, *python) in zip(found[:3], found[3:], strict=True):
        assert slots.tolist() == same_slots.tolist()
        assert compiled == python
    (slots, first, continued, own, num_asked, _), in_row, nothing = found[:3]
    assert np.count_nonzero(slots >= 0) == 60
    assert (first, continued, own, num_asked) == (-1, (1, 1, 40), 40, 130)
    assert in_row[1] > 0
    assert (len(nothing[0]), *nothing[1:]) == (0, -1, (-1, 0, 0), 0, 0, [])


def rows_of(pool: SlotPool) -> object:
    """What is kept of requests' ends, and what is planned."""
    policy = pool._table.policy
    if not isinstance(policy, TailIndex):
        return None
    cohorts, n = policy._cohorts, policy._cohorts.num_rows
    columns = cohorts.number, cohorts.first, cohorts.end, cohorts.kind, cohorts.ended_at
    planned = [each[policy.cursor :].tolist() for each in policy.plan]
    return [each[:n].tolist() for each in columns], cohorts.owners.tolist(), planned, policy.returns.tails._uses.sum()


class Story:
    """One pool, what was taken from it, and the same verbs for both."""

    def __init__(self, pool: SlotPool, seed: int, *, crowded: bool) -> None:
        self.pool, self.draw, self.crowded = pool, random.Random(seed), crowded
        self.leases: list[Lease] = []
        self.open: list[Reservation] = []
        self.now = 0.0
        if isinstance(policy := pool._table.policy, TailIndex):
            policy.clock = lambda: self.now
            policy.rival.leads = False  # as after the first requests

    def names(self) -> list[ChainHash]:
        """A part of one of eight chains: two of them share their first half."""
        draw = self.draw
        chain, length = draw.randrange(8), draw.choice([1, 2, 4, 15, 16, 17, 40, 64, 65, 130])
        return [name_of(min(chain, 6) if n < 64 else chain, n, crowded=self.crowded) for n in range(length)]

    def step(self) -> object:
        draw, pool, names = self.draw, self.pool, self.names()
        self.now += draw.choice([0.1, 0.1, 3.0, 40.0])
        start = draw.choice([0, 0, 0, len(names) // 2])
        asked, parent = names[start:], names[start - 1] if start else None
        verb = draw.choice(
            ["store"] * 5 + ["lease", "places", "release", "reserve", "end", "tell", "look", "evict", "dirty"]
        )
        if verb in ("store", "reserve"):
            made = pool.reserve(asked, parent)
            if made is None:
                return None
            told = made.hashes, made.indices, made.slots.tolist(), made.generations.tolist(), made.parents
            if verb == "reserve" and len(self.open) < 3:
                self.open.append(made)
            else:
                pool.seal(made).release()
            return told
        if verb in ("lease", "places"):
            places = pool.places(asked) if verb == "places" else None
            lease = pool.lease(asked, places)
            self.leases.append(lease)
            return lease.hashes, lease.slots.tolist(), lease.generations.tolist()
        if verb == "release":
            for lease in self.leases[draw.randrange(2) :]:
                lease.release()
            del self.leases[1:]
        elif verb == "end" and self.open:
            made = self.open.pop()
            if draw.randrange(2):
                self.leases.append(pool.seal(made))
            else:
                pool.abandon(made)
        elif verb == "tell":
            end = RequestEnd(
                names, draw.choice([len(names), len(names) // 2]), draw.randrange(600), seconds=draw.random()
            )
            return noted[2:7] if (noted := pool.ended(end)) is not None else None
        elif verb == "look":
            return pool.lookup(names), pool.holds(names)
        elif verb == "evict" and not draw.randrange(4):
            return pool.evict(asked), pool.evict_idle(names)
        elif verb == "dirty":
            (pool.mark_dirty if draw.randrange(2) else pool.mark_clean)(asked)
        return verb


@pytest.mark.parametrize(
    ("policy", "seed", "crowded"),
    brief(
        [("lru", 0, True), ("s3fifo", 1, False), ("tail", 2, True)],
        [*itertools.product(["lru", "s3fifo", "tail"], range(4), [False, True])],
    ),
)
def test_long_chains_end_alike_in_both_ways(
    pools: Callable[[str], list[SlotPool]], policy: str, seed: int, crowded: bool
) -> None:
    stories = [Story(pool, seed, crowded=crowded) for pool in pools(policy)]
    for _ in range(300):
        compiled, python = (story.step() for story in stories)
        assert compiled == python
        assert stories[0].pool.check() == stories[1].pool.check()
        assert state_of(stories[0].pool._table) == state_of(stories[1].pool._table)
        assert rows_of(stories[0].pool) == rows_of(stories[1].pool)
    assert stories[0].pool.num_evicted > NUM_SLOTS
    if crowded:
        assert stories[0].pool._table.index._stash


@pytest.mark.parametrize("verb", brief(["lookup", "reserve"], ["lookup", "holds", "lease", "reserve", "places"]))
@pytest.mark.parametrize("wrong", [[b"short"], [bytes(32), b"short"], [bytes(33)] * 20])
def test_a_name_of_another_length_is_the_same_mistake(
    pools: Callable[[str], list[SlotPool]], verb: str, wrong: list[ChainHash]
) -> None:
    told = []
    for pool in pools("lru"):
        reservation = pool.reserve([bytes(32)])
        assert reservation is not None
        pool.seal(reservation).release()
        with pytest.raises(ValueError, match="bytes: must be 32") as mistake:
            getattr(pool, verb)(wrong)
        told.append(type(mistake.value))
        pool.check()
        assert pool.lookup([bytes(32)]) == 1
    assert told[0] is told[1]


@pytest.mark.parametrize("given", [[3], [0, 1, 3], np.array([3]), np.arange(20)])
def test_a_block_without_a_reference_is_the_same_mistake(
    monkeypatch: pytest.MonkeyPatch, given: "list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> None:
    told = []
    for setting in ("", "off"):
        monkeypatch.setenv("KVTIER_COMPILED", setting)
        pool = BlockPool(KVShape(1, 1, 1, 1, "float16"), 50)
        assert pool.allocate(3) == [0, 1, 2]
        with pytest.raises(ValueError, match="have no reference") as mistake:
            pool.free(given)
        told.append(str(mistake.value))
        pool.check()
        assert pool.num_free_blocks == 47  # nothing changed
        with pytest.raises(IndexError):
            pool.free([0, 51])
        with pytest.raises(ValueError, match="have no reference"):
            pool.free([-1])
        pool.free([0, 1, 2])
        pool.check()
    assert told[0] == told[1]


@pytest.mark.parametrize("setting", ["", "off"])
@pytest.mark.parametrize("given", [[0, 0], [1, 2, 1], np.array([0, 0]), np.arange(20) // 10])
def test_a_block_given_back_twice_at_once_is_a_mistake(
    given: "list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]", setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less than no reference to it a later lease would not keep it, and free slots would be handed out twice."""
    monkeypatch.setenv("KVTIER_COMPILED", setting)
    pool = BlockPool(KVShape(1, 1, 1, 1, "float16"), 50)
    pool.allocate(3)
    with pytest.raises(ValueError, match=r"slots \[\d(, \d)?\] have no reference"):
        pool.free(given)
    pool.check()
    assert pool.num_free_blocks == 47  # nothing changed
    pool.hold([1])
    pool.free([1, 2, 1])
    pool.check()
    assert pool.num_free_blocks == 49


@pytest.mark.parametrize("setting", ["", "off"])
def test_a_block_leased_twice_at_once_is_held_twice(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", setting)
    pool = SlotPool(50)
    names = [bytes([n]) * 32 for n in range(20)]
    reservation = pool.reserve(names)
    assert reservation is not None
    pool.seal(reservation).release()
    for asked in ([names[0]] * 2, [*names, *names[:3]]):
        lease = pool.lease(asked)
        assert len(lease) == len(asked)
        lease.release()
        assert pool.check().leased == 0


def test_a_hash_that_comes_twice_is_the_same_mistake(pools: Callable[[str], list[SlotPool]]) -> None:
    for pool in pools("s3fifo"):
        for names in ([bytes(32)] * 2, [bytes(32), *(bytes([n]) * 32 for n in range(40))]):
            with pytest.raises(ValueError, match="a hash comes twice"):
                pool.reserve(names)
        assert pool.check().free == NUM_SLOTS


def test_names_are_held_no_longer_than_asked_for(pools: Callable[[str], list[SlotPool]]) -> None:
    """References to names and to what is handed out come and go in pairs, also where a call fails."""
    pool = pools("s3fifo")[0]
    names = [name_of(0, n, crowded=False) for n in range(100)]
    before = [sys.getrefcount(name) for name in names]
    for _ in range(50):
        reservation = pool.reserve(names)
        assert reservation is not None
        pool.seal(reservation).release()
        pool.lease(names).release()
        pool.lease(names, pool.places(names)).release()
        assert all(pool.holds(names))
        with pytest.raises(ValueError, match="must be 32"):
            pool.lookup([*names, b""])
        del reservation
        pool.evict(names)
        pool._places._kept.clear()  # which keeps names on purpose
    gc.collect()
    assert [sys.getrefcount(name) for name in names] == before


def test_a_policy_it_does_not_know_is_handled_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(LRU):
        """Another."""

    monkeypatch.setitem(POLICIES, "other", Other)
    assert not SlotPool(4, policy="other")._table.is_compiled

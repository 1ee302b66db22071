"""A few blocks one by one, compiled, and the same blocks in numpy: any program has the same answers and ends alike."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import state_of

from kvtier.tiers.compiled.twins import twin
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.naming.shape import KVShape
from kvtier.tiers.pool import few
from kvtier.tiers.pool.few import BatchTable
from kvtier.tiers.pool.lease import Lease, Reservation
from kvtier.tiers.pool.policy import S3FIFO
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.pool.tail_index import TailIndex
from kvtier.tiers.tier import ChainHash

NUM_SLOTS = 7
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)  # a binary tree of chains: much is shared
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "seal", "seal_each", "abandon", "store", "store", "lease", "release", "evict"])
        | st.sampled_from(["touch", "mark_dirty", "mark_leased", "mark_clean", "reset", "tail", "look_up"])
        | st.just("reserve_each")
        | st.just("reserve_ones"),
        PATHS,
        st.integers(0, 4),
    ),
    max_size=40,
)

needs_twin = pytest.mark.skipif(twin("kvtier.tiers.pool.few_compiled") is None, reason="not built: `make compiled`")
WAYS = ["few", *(pytest.param(way, marks=needs_twin) for way in ("compiled", "compiled, as arrays"))]
each_way = pytest.mark.parametrize("way", WAYS)


def chain(path: tuple[int, ...]) -> list[ChainHash]:
    return [hashlib.sha256(bytes(path[: n + 1])).digest() for n in range(len(path))]


@contextmanager
def handled_by(limit: int) -> Iterator[None]:
    """Up to so many blocks are a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "FEW", limit)
        patch.setattr("kvtier.tiers.pool.pool.FEW", limit)
        yield


def made_for(way: str, table: BatchTable) -> int:
    """Have a table handle all batches in one way; returns how many blocks are a few for it."""
    if way.startswith("compiled"):
        listed = few.FEW if way == "compiled" else -1
        module = twin("kvtier.tiers.pool.few_compiled")
        assert module is not None
        table._compiled = module.CompiledSlots(
            table, not isinstance(table.policy, S3FIFO), isinstance(table.policy, TailIndex), listed
        )
    else:
        table._compiled = None
    return -1 if way == "numpy" else few.FEW


class Twin:
    """A pool whose batches are all handled in one way."""

    def __init__(self, policy: str, way: str, *, listens: bool) -> None:
        self.pool = SlotPool(NUM_SLOTS, policy=policy)
        self.limit = made_for(way, self.pool._table)
        self.open: list[Reservation] = []
        self.leases: list[Lease] = []
        if listens:
            self.pool.listen()

    def run(self, verb: str, path: tuple[int, ...], number: int) -> object:
        with handled_by(self.limit):
            return self._run(verb, path, number)

    def _run(self, verb: str, path: tuple[int, ...], number: int) -> object:
        pool, names = self.pool, chain(path)
        start = min(number, len(names) - 1)
        hashes, parent = names[start:], names[start - 1] if start else None
        if verb in ("reserve", "store", "tail"):
            if verb == "tail":
                hashes, parent = names[-1:], names[-2] if len(names) > 1 else None
            reservation = pool.reserve(hashes, parent)
            if reservation is None:
                return None
            told = self._told(reservation)
            reservation.is_tail = verb == "tail" and len(reservation) > 0
            if verb == "reserve":
                self.open.append(reservation)
            else:
                pool.seal(reservation).release()
            return told
        if verb == "seal_each":
            chosen, self.open = self.open, []
            self.leases.append(pool.seal_each(chosen))
            return self._told(self.leases[-1])
        if verb == "reserve_each":
            other = chain(tuple(1 - step for step in path))[: number + 1]
            if pool.counts().free < len(hashes) + len(other):  # who goes for them may depend on the way
                return None
            made = [each for each in pool.reserve_each([(hashes, parent), (other, None)]) if each is not None]
            self.open += made
            return list(map(self._told, made))
        if verb == "reserve_ones":  # a decoding step: a block of each sequence, some of which are held
            chains = [([name], names[0]) for name in dict.fromkeys([*chain((*path[:-1], 0)), *chain((*path[:-1], 1))])]
            if pool.counts().free < len(chains):
                return None
            made = [each for each in pool.reserve_each(chains[1:]) if each is not None]
            self.open += made
            return list(map(self._told, made))
        if verb == "mark_leased":
            for lease in self.leases:
                pool.mark_dirty(lease)
            return None
        if verb in ("seal", "abandon"):
            if not self.open:
                return None
            reservation = self.open.pop(number % len(self.open))
            if verb == "abandon":
                pool.abandon(reservation)
                return None
            self.leases.append(pool.seal(reservation))
            return self._told(self.leases[-1])
        if verb == "lease":
            self.leases.append(pool.lease(hashes))
            return self._told(self.leases[-1])
        if verb == "release":
            if self.leases:
                self.leases.pop(number % len(self.leases)).release()
            return None
        if verb == "look_up":
            return pool.lookup(hashes), pool.holds(hashes), pool.oldest_dirty(number)
        if verb == "reset":
            if number == 4:
                pool.reset()
            return None
        answer: object = getattr(pool, verb)(hashes)
        return answer

    @staticmethod
    def _told(taken: Lease | Reservation) -> tuple[object, ...]:
        return taken.hashes, taken.slots.tolist(), taken.generations.tolist()

    def end(self) -> None:
        for lease in self.leases:
            lease.release()
        for reservation in self.open:
            self.pool.abandon(reservation)


@each_way
@settings(max_examples=brief(40, 300))
@given(STEPS, st.sampled_from(["lru", "s3fifo", "tail"]), st.booleans())
def test_one_by_one_and_in_numpy_are_the_same(
    way: str, steps: list[tuple[str, tuple[int, ...], int]], policy: str, listens: bool
) -> None:
    scalar, vector = (Twin(policy, each, listens=listens) for each in (way, "numpy"))
    for verb, path, number in steps:
        assert scalar.run(verb, path, number) == vector.run(verb, path, number)
        assert scalar.pool.check() == vector.pool.check()
        assert state_of(scalar.pool._table) == state_of(vector.pool._table)
    scalar.end()
    vector.end()
    assert scalar.pool.check() == vector.pool.check()


@each_way
@settings(max_examples=brief(30, 150))
@given(st.lists(st.tuples(st.sampled_from(["admit", "free", "publish", "hold", "reset"]), PATHS, st.integers(0, 4))))
def test_blocks_of_l1_one_by_one_and_in_numpy_are_the_same(
    way: str, steps: list[tuple[str, tuple[int, ...], int]]
) -> None:
    def run(pool: BlockPool, tables: list[list[int]], verb: str, path: tuple[int, ...], number: int) -> object:
        names = chain(path)
        if verb == "admit":
            held = pool.match(names)
            own = pool.allocate(len(names) - len(held))
            if own is None:
                pool.free(held)
                return None
            tables.append([*held, *own])
            return list(tables[-1])
        if verb == "reset" and number == 4:
            pool.reset()
        if verb == "reset" or not tables:
            return None
        table = tables[number % len(tables)]
        if verb == "free":
            pool.free(tables.pop(number % len(tables)))
        elif verb == "hold":
            pool.hold(table)
            pool.free(np.array(table))
        else:
            count = min(len(names), len(table))
            pool.publish(table[:count], names[:count], None)
        return None

    shape = KVShape(1, 1, 1, 1, "float16")
    blocks = [BlockPool(shape, NUM_SLOTS) for _ in range(2)]
    limits = [made_for(each, pool._table) for each, pool in zip((way, "numpy"), blocks, strict=True)]
    pools = [(pool, list[list[int]](), limit) for pool, limit in zip(blocks, limits, strict=True)]
    for verb, path, number in steps:
        answers = []
        for pool, tables, limit in pools:
            with handled_by(limit):
                answers.append(run(pool, tables, verb, path, number))
                pool.check()
        assert answers[0] == answers[1]
        assert state_of(pools[0][0]._table) == state_of(pools[1][0]._table)


def test_the_choice_is_made_by_the_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    table = SlotPool(4)._table
    assert table.of(few.FEW) is not table
    assert table.of(few.FEW + 1) is table


def test_answers_are_of_pythons_own_types() -> None:
    pool = SlotPool(2 * few.FEW)
    names = [hashlib.sha256(bytes([n])).digest() for n in range(few.FEW + 1)]
    for some in (names[:1], names):  # both ways; the daemon writes them as bytes
        assert bytes(pool.holds(some)) == bytes(len(some))
    reservation = pool.reserve(names)
    assert reservation is not None
    pool.seal(reservation).release()
    assert bytes(pool.holds(names)) == b"\1" * len(names)
    assert type(sum(pool.holds(names))) is int

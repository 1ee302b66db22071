"""The pool's core, interpreted and compiled from one source: any program has the same answers and ends alike."""

import gc
import hashlib
import itertools
import random
import sys
from collections import Counter
from typing import Any

import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import state_of, store

from kvtier.tiers.compiled import extension
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.pool import core
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.policy import POLICIES
from kvtier.tiers.pool.pool import Reservation, SlotPool
from kvtier.tiers.reuse import RequestEnd
from kvtier.tiers.tier import ChainHash

NUM_SLOTS = 7
SHAPE = KVShape(1, 1, 1, 1, "float16")
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)  # a binary tree of chains: much is shared
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "seal", "seal_each", "abandon", "store", "store", "lease", "release", "evict"])
        | st.sampled_from(["touch", "mark_dirty", "mark_leased", "mark_clean", "reset", "tail", "look_up"])
        | st.sampled_from(["reserve_each", "quarantine", "settle", "evict_idle", "ended", "places"])
        | st.sampled_from(["preallocate", "reserve_at", "deallocate"]),
        PATHS,
        st.integers(0, 4),
    ),
    max_size=40,
)
needs_both = pytest.mark.skipif(
    extension("kvtier.tiers.pool.core_compiled") is None, reason="not built: `make compiled`"
)
each_form = pytest.mark.parametrize("form", ["interpreted", pytest.param("compiled", marks=needs_both)])


def chain(path: tuple[int, ...]) -> list[ChainHash]:
    return [hashlib.sha256(bytes(path[: n + 1])).digest() for n in range(len(path))]


def made(form: str, kind: Any, *arguments: Any, **options: Any) -> Any:
    """A pool of that form."""
    with pytest.MonkeyPatch.context() as patch:
        if form == "interpreted":
            patch.setenv("KVTIER_COMPILED", "off")
        pool = kind(*arguments, **options)
    assert type(pool._core).__module__.endswith("core_compiled") == (form == "compiled")
    return pool


def type_in(form: str, name: str) -> Any:
    """A type of the core in that form."""
    return getattr(core if form == "interpreted" else extension("kvtier.tiers.pool.core_compiled"), name)


class Program:
    """A pool of one form, and what was taken from it."""

    def __init__(self, form: str, policy: str, *, listens: bool, num_slots: int = NUM_SLOTS) -> None:
        self.now = 0.0
        self.pool: SlotPool = made(form, SlotPool, num_slots, policy=policy, clock=lambda: self.now)
        self.open: list[Reservation] = []
        self.leases: list[Lease] = []
        self.hung: list[Reservation] = []
        self.unnamed: list[tuple[int, int]] = []  # preallocated slots and their generations
        if listens:
            self.pool.listen()

    def run(self, verb: str, names: list[ChainHash], number: int) -> object:
        pool = self.pool
        self.now += (0.1, 0.1, 3.0, 40.0, 0.0)[number % 5]
        start = min(number, len(names) - 1)
        hashes, parent = names[start:], names[start - 1] if start else None
        if verb in ("reserve", "store", "tail"):
            if verb == "tail":
                hashes, parent = names[-1:], names[-2] if len(names) > 1 else None
            reservation = pool.reserve(hashes, parent, if_worth=number % 2 == 1)
            if reservation is None:
                return None
            taken = *self._taken(reservation), reservation.num_refused
            reservation.is_partial = verb == "tail" and len(reservation) > 0
            if verb == "reserve":
                self.open.append(reservation)
            else:
                pool.seal(reservation).release()
            return taken
        if verb == "preallocate":
            taken = pool.preallocate(number, if_worth=number % 2 == 1)
            self.unnamed += zip(*taken, strict=True)
            return taken
        if verb == "reserve_at":
            count = min(len(names), len(self.unnamed))
            given, self.unnamed = self.unnamed[:count], self.unnamed[count:]
            at, times = [slot for slot, _ in given], [time for _, time in given]
            chains = list(zip([[name] for name in names], [None, *names], strict=False))[:count]
            placed = pool.reserve_at(at, times, chains)
            self.unnamed += [each for each, reservation in zip(given, placed, strict=True) if reservation is None]
            self.open += [each for each in placed if each is not None]
            return [None if each is None else self._taken(each) for each in placed]
        if verb == "deallocate":
            given, self.unnamed = self.unnamed[:number], self.unnamed[number:]
            pool.deallocate([slot for slot, _ in given], [time for _, time in given])
            return None
        if verb == "seal_each":
            chosen, self.open = self.open, []
            self.leases.append(pool.seal_each(chosen))
            return self._taken(self.leases[-1])
        if verb == "reserve_each":
            other = [hashlib.sha256(name).digest() for name in names[: number + 1]]
            reserved = [each for each in pool.reserve_each([(hashes, parent), (other, None)]) if each is not None]
            self.open += reserved
            return list(map(self._taken, reserved))
        if verb == "mark_leased":
            for lease in self.leases:
                pool.mark_dirty(lease)
            return None
        if verb in ("seal", "abandon", "quarantine"):
            if not self.open:
                return None
            reservation = self.open.pop(number % len(self.open))
            if verb == "seal":
                self.leases.append(pool.seal(reservation))
                return self._taken(self.leases[-1])
            if verb == "quarantine":
                self.hung.append(reservation)
            getattr(pool, verb)(reservation)
            return None
        if verb == "settle":
            if self.hung:
                pool.settle(self.hung.pop())
            return None
        if verb == "lease":
            self.leases.append(pool.lease(hashes))
            return self._taken(self.leases[-1])
        if verb == "touch":
            pool.lease(hashes).release()
            return None
        if verb == "release":
            if self.leases:
                self.leases.pop(number % len(self.leases)).release()
            return None
        if verb == "ended":
            told = pool.ended(RequestEnd(names, len(names) - number % 2, 50 * number, seconds=0.05))
            return told and (told.kind, told.num_head, told.head_kind)
        if verb == "look_up":
            return pool.lookup(hashes), pool.holds(hashes), pool.oldest_dirty(number)
        if verb == "reset":
            if number == 4:
                pool.reset()
            return None
        answer: object = getattr(pool, verb)(hashes)
        return answer

    @staticmethod
    def _taken(taken: Lease | Reservation) -> tuple[object, ...]:
        return taken.hashes, taken.slots, taken.generations

    def end(self) -> None:
        for lease in self.leases:
            lease.release()
        for reservation in self.open:
            self.pool.abandon(reservation)
        for reservation in self.hung:
            self.pool.settle(reservation)
        self.pool.deallocate([slot for slot, _ in self.unnamed], [time for _, time in self.unnamed])
        counts = self.pool.check()
        assert (counts.filling, counts.leased, counts.quarantined) == (0, 0, 0)


@needs_both
@settings(max_examples=brief(60, 600))
@given(STEPS, st.sampled_from(POLICIES), st.booleans())
def test_any_program_decides_alike_in_both_forms(
    steps: list[tuple[str, tuple[int, ...], int]], policy: str, listens: bool
) -> None:
    one, other = (Program(form, policy, listens=listens) for form in ("compiled", "interpreted"))
    for verb, path, number in steps:
        names = chain(path)
        assert one.run(verb, names, number) == other.run(verb, names, number)
        assert one.pool.check() == other.pool.check()
        assert state_of(one.pool._core) == state_of(other.pool._core)
    one.end()
    other.end()


def name_of(chain: int, block: int, *, crowded: bool) -> ChainHash:
    """Crowded names differ in their middle alone, as a client may choose them."""
    name = hashlib.sha256(b"%d %d" % (chain, block)).digest()
    return bytes([chain % 2]) * 8 + name[8:24] + bytes(8) if crowded and block % 3 == 0 else name


@needs_both
@pytest.mark.parametrize(
    ("policy", "seed", "crowded"),
    brief(
        [("lru", 0, True), ("s3fifo", 1, False), ("predicted", 2, True)],
        [*itertools.product(POLICIES, range(4), [False, True])],
    ),
)
def test_long_chains_end_alike_in_both_forms(policy: str, seed: int, crowded: bool) -> None:
    stories = [Program(form, policy, listens=False, num_slots=400) for form in ("compiled", "interpreted")]
    if policy == "predicted":
        for story in stories:
            story.pool._learned.rival.leads = False  # type: ignore[union-attr]  # as after the first requests
    draw = random.Random(seed)
    verbs = ["store"] * 5 + ["lease", "places", "release", "release", "reserve", "seal", "abandon", "ended", "look_up"]
    for _ in range(300):
        verb, number = draw.choice([*verbs, "mark_dirty", "mark_clean", "touch"]), draw.randrange(5)
        which, length = draw.randrange(8), draw.choice([1, 2, 4, 15, 16, 17, 40, 64, 65, 130])
        names = [name_of(min(which, 6) if n < 64 else which, n, crowded=crowded) for n in range(length)]
        compiled, interpreted = (story.run(verb, names, number) for story in stories)
        assert compiled == interpreted
        assert stories[0].pool.check() == stories[1].pool.check()
        assert state_of(stories[0].pool._core) == state_of(stories[1].pool._core)
    assert stories[0].pool.num_evicted > 400
    for story in stories:
        story.end()


@needs_both
@settings(max_examples=brief(30, 300))
@given(st.lists(st.tuples(st.sampled_from(["admit", "free", "publish", "hold", "reset"]), PATHS, st.integers(0, 4))))
def test_blocks_of_l1_end_alike_in_both_forms(steps: list[tuple[str, tuple[int, ...], int]]) -> None:
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
            pool.free(table)
        else:
            count = min(len(names), len(table))
            pool.publish(table[:count], names[:count], None)
        return None

    pools = [(made(form, BlockPool, SHAPE, NUM_SLOTS), list[list[int]]()) for form in ("compiled", "interpreted")]
    for verb, path, number in steps:
        answers = []
        for pool, tables in pools:
            answers.append(run(pool, tables, verb, path, number))
            pool.check()
        assert answers[0] == answers[1]
        assert state_of(pools[0][0]._core) == state_of(pools[1][0]._core)


# --- mistakes


@each_form
@pytest.mark.parametrize("verb", brief(["lookup", "reserve"], ["lookup", "holds", "lease", "reserve", "places"]))
@pytest.mark.parametrize("wrong", [[b"short"], [bytes(32), b"short"], [bytes(33)] * 20])
def test_a_name_of_another_length_changes_nothing(form: str, verb: str, wrong: list[ChainHash]) -> None:
    pool = made(form, SlotPool, NUM_SLOTS)
    store(pool, [bytes(32)])
    with pytest.raises(ValueError, match="bytes: must be 32"):
        getattr(pool, verb)(wrong)
    assert pool.check().leased == 0
    assert pool.lookup([bytes(32)]) == 1


@each_form
@pytest.mark.parametrize("given", [[3], [0, 1, 3], list(range(20))])
def test_a_block_without_a_reference_cannot_be_given_back(form: str, given: Any) -> None:
    pool = made(form, BlockPool, SHAPE, 50)
    assert pool.allocate(3) == [0, 1, 2]
    with pytest.raises(ValueError, match="have no reference"):
        pool.free(given)
    for outside in ([0, 50], [0, -1], [1 << 40]):
        with pytest.raises(ValueError, match="must be from 0 to 49"):
            pool.free(outside)
    pool.check()
    assert pool.num_free_blocks == 47  # nothing changed
    pool.free([0, 1, 2])
    pool.check()


@each_form
@pytest.mark.parametrize("given", [[0, 0], [1, 2, 1], [0] * 10 + [1] * 10])
def test_a_block_given_back_twice_at_once_is_a_mistake(form: str, given: Any) -> None:
    """With less than no reference to it a later lease would not keep it, and free slots would be handed out twice."""
    pool = made(form, BlockPool, SHAPE, 50)
    pool.allocate(3)
    with pytest.raises(ValueError, match=r"slots \[\d(, \d)*\] have no reference"):
        pool.free(given)
    pool.check()
    assert pool.num_free_blocks == 47  # nothing changed
    pool.hold([1])
    pool.free([1, 2, 1])
    pool.check()
    assert pool.num_free_blocks == 49


@each_form
def test_a_block_leased_twice_at_once_is_held_twice(form: str) -> None:
    pool, names = made(form, SlotPool, 50), [bytes([n]) * 32 for n in range(20)]
    store(pool, names)
    for asked in ([names[0]] * 2, [*names, *names[:3]]):
        lease = pool.lease(asked)
        assert len(lease) == len(asked)
        lease.release()
        assert pool.check().leased == 0


@each_form
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("unref", ([1 << 70],)),
        ("unref", (["0"],)),
        ("names_of", ([-1],)),
        ("publish", ([7], False)),
        ("mark_dirty", ([-1],)),
        ("find", ([None],)),
        ("find", ([bytearray(32)],)),
        ("reserve", ((bytes(31),), None)),
        ("preallocate", ("1",)),
        ("name", ([99], [bytes(32)], None)),
        ("name", ([], [bytes(32)], None)),
        ("link", ([0, 1], [])),
        ("own", ([0, 1], [], None, 2)),
        ("unname", ([1],)),
        ("close", ([1], True)),
        ("free", ([1],)),
        ("unguard", ([99],)),
        ("unguard", ([-1],)),
    ],
)
def test_hostile_arguments_raise_and_change_nothing(form: str, verb: str, arguments: tuple[Any, ...]) -> None:
    core = made(form, SlotPool, NUM_SLOTS)._core
    before = state_of(core)
    with pytest.raises((ValueError, TypeError, OverflowError, LookupError)):
        getattr(core, verb)(*arguments)
    assert state_of(core) == before
    core.check()


@each_form
def test_an_index_and_a_line_refuse_what_they_cannot_hold(form: str) -> None:
    core = made(form, SlotPool, NUM_SLOTS)._core
    index, line, name = type(core.index)(2), core.line(), [bytes([n]) * 32 for n in range(4)]
    index.put_all(name[:1], [1])
    for call in (
        lambda: index.put_all(name, []), lambda: index.put_all(name[1:], [0, 0, 0]),
        lambda: index.put_all(name[3:], [2]), lambda: index.remove_all([0, 0]), lambda: index.remove_all([1, 1]),
        lambda: index.load([-1]), lambda: line.add([99]), lambda: line.add([-1]), lambda: line.remove([10**9]),
    ):  # fmt: skip
        with pytest.raises((ValueError, LookupError)):
            call()
    assert line.drop_lost(-(10**9), 10**9) == 0
    assert index.find_all(name) == [-1, -1, -1, -1]


@each_form
@given(st.lists(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=6), max_size=6), st.data(), st.integers(0, NUM_SLOTS))
def test_counts_of_slots_are_those_of_a_counter(
    form: str, added: list[list[int]], data: st.DataObject, room: int
) -> None:
    counts = type_in(form, "SlotCounts")(NUM_SLOTS)
    for slots in added:
        counts.add(slots)
    kept = data.draw(st.sets(st.integers(0, len(added) - 1))) if added else set()
    for number, slots in enumerate(added):
        if number not in kept:
            counts.remove(slots)
    plain = Counter(slot for number in kept for slot in added[number])
    assert counts.counts.tolist() == [plain[slot] for slot in range(NUM_SLOTS)]
    assert counts.num_slots == len(plain)
    names, slots = [bytes([n]) for n in range(5)], data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=5))
    known = data.draw(st.sets(st.sampled_from(names)))
    is_new = [name not in known and not (i < len(slots) and plain[slots[i]]) for i, name in enumerate(names)]
    fitting = next((i for i in range(5) if sum(is_new[: i + 1]) > room), 5)
    assert counts.fitting(names, slots, known, room) == fitting
    for call in (lambda: counts.add([NUM_SLOTS]), lambda: counts.add([-1]), lambda: counts.remove([10**9])):
        with pytest.raises(ValueError, match="slot"):
            call()


@each_form
def test_names_that_contradict_each_other_make_no_ring(form: str) -> None:
    """No hash is its own ancestor: only a client that makes names up can ask for it."""
    pool, (a, b, c) = made(form, SlotPool, NUM_SLOTS), [bytes([n]) * 32 for n in range(3)]
    store(pool, [a])
    store(pool, [b], a)
    store(pool, [c, a], b)
    pool.check()
    pool.mark_dirty([a, b, c])
    assert pool.oldest_dirty(3) == [a, b, c]
    pool.listen()
    assert pool.lookup([a, b, c]) == 3
    reservation = pool.reserve([bytes([n]) * 32 for n in (7, 8)])
    assert reservation is not None
    times, reservation.generations = reservation.generations, []  # somebody's mistake: an error, and no crash
    with pytest.raises(ValueError, match="columns of 2 and 0"):
        pool.seal(reservation, [0])
    reservation.generations = times
    pool.abandon(reservation)


@needs_both
def test_names_are_held_no_longer_than_needed() -> None:
    """References to names and to what is handed out come and go in pairs, also where a call fails."""
    pool = made("compiled", SlotPool, 400, policy="s3fifo")
    names = [name_of(0, n, crowded=False) for n in range(100)]
    before = [sys.getrefcount(name) for name in names]
    for _ in range(50):
        store(pool, names)
        pool.lease(names).release()
        assert all(pool.holds(names))
        with pytest.raises(ValueError, match="must be 32"):
            pool.lookup([*names, b""])
        pool.evict(names)
    gc.collect()
    assert [sys.getrefcount(name) for name in names] == before

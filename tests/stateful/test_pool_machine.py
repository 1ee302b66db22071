"""SlotPool and BlockPool against dict models: any order of verbs keeps their laws and the model's answers."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from event_rig import Shelf
from extent import brief
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.hierarchy.hierarchy import TierEvents
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.pool import Reservation, SlotPool
from kvtier.tiers.reuse import Hint, RequestEnd
from kvtier.tiers.tier import ChainHash

Path = tuple[int, ...]

NUM_SLOTS = 6
SETTINGS = settings(max_examples=brief(30, 100), stateful_step_count=40)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)  # a binary tree of chains: much is shared
POSITIONS = st.sets(st.integers(0, 4))


@cache
def chain(path: Path) -> list[ChainHash]:
    parent = chain(path[:-1]) if len(path) > 1 else []
    return [*parent, hashlib.sha256(bytes(path)).digest()]


@dataclass(eq=False)
class Store:
    """A reservation, and the state of each of its positions: filling, quarantined or done."""

    reservation: Reservation
    state: list[str]
    forgotten: bool = False  # a reset came after it

    def among(self, positions: Iterable[int], state: str) -> list[int]:
        return sorted(i for i in positions if i < len(self.state) and self.state[i] == state)


@dataclass(eq=False)
class Hold:
    """A lease that is not released, and which of its slots lost their name to a reset or an eviction."""

    lease: Lease
    unnamed: set[int] = field(default_factory=set)


@dataclass
class Model:
    """What a pool holds, in dicts."""

    leases: dict[ChainHash, int] = field(default_factory=dict)  # of the ready blocks
    filling: set[ChainHash] = field(default_factory=set)
    links: dict[ChainHash, ChainHash] = field(default_factory=dict)  # to the parent, where both are held
    dirty: set[ChainHash] = field(default_factory=set)
    unnamed: dict[int, int] = field(default_factory=dict)  # slot → leases, of blocks that were forgotten
    num_quarantined: int = 0
    tails: dict[ChainHash, None] = field(default_factory=dict)  # of the ready blocks, oldest first

    def is_held(self, name: ChainHash | None) -> bool:
        return name in self.leases or name in self.filling

    def spared(self, anchors: Iterable[ChainHash]) -> set[ChainHash]:
        """Blocks no policy may take: those in use and the anchors, and all that these hang on."""
        leased = [name for name, leases in self.leases.items() if leases]
        spared: set[ChainHash] = set()
        for name in (*self.filling, *leased, *anchors):
            at: ChainHash | None = name
            while at is not None:
                spared.add(at)
                at = self.links.get(at)
        return spared

    def drop(self, names: set[ChainHash]) -> None:
        for name in names:
            self.leases.pop(name, None)
            self.filling.discard(name)
            self.dirty.discard(name)
            self.tails.pop(name, None)
        self.links = {child: parent for child, parent in self.links.items() if not names & {child, parent}}

    def run(self, hashes: list[ChainHash]) -> int:
        return next((i for i, name in enumerate(hashes) if name not in self.leases), len(hashes))


class SlotPoolMachine(RuleBasedStateMachine):
    """Verbs of SlotPool in any order. Which block a policy evicts is read off the pool, and judged."""

    stores = Bundle("stores")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS)
        self.model = Model()
        self.open_stores: list[Store] = []
        self.open_holds: list[Hold] = []

    @initialize(policy=st.sampled_from(["lru", "s3fifo", "predicted"]))
    def choose_policy(self, policy: str) -> None:
        self.pool = SlotPool(NUM_SLOTS, policy=policy)

    @rule(path=PATHS, in_prompt=st.integers(0, 4), hint=st.sampled_from([None, *Hint]))
    def ended(self, path: Path, in_prompt: int, hint: Hint | None) -> None:
        """A request tells its end, whatever is left of its blocks. No block comes or goes by that."""
        names = chain(path)
        self.pool.ended(RequestEnd(names, min(in_prompt, len(names)), 10 * len(names), hint))

    # --- two-phase store ----------------------------------------------------------------------------------------

    @rule(target=stores, path=PATHS, start=st.integers(0, 4))
    def reserve(self, path: Path, start: int) -> Store | MultipleResults[Store]:
        start = min(start, len(path) - 1)
        hashes, befores = chain(path)[start:], [None, *chain(path)[:-1]][start:]
        model, pool = self.model, self.pool
        wanted = [(name, before) for name, before in zip(hashes, befores, strict=True) if not model.is_held(name)]
        spared = model.spared(before for _, before in wanted if before is not None and model.is_held(before))
        orphans = {
            name: before
            for name, before in zip(hashes, befores, strict=True)
            if before in dict(wanted) and model.is_held(name)
        }
        num_free, num_evicted, num_dropped = pool.counts().free, pool.num_evicted, pool.num_dirty_dropped
        reservation = pool.reserve(hashes, befores[0])
        gone = {name for name in model.leases if not pool.holds([name])[0]}
        assert pool.num_evicted - num_evicted == len(gone)
        assert pool.num_dirty_dropped - num_dropped == len(gone & model.dirty)
        if reservation is None:
            assert not gone  # all or nothing
            assert len(wanted) > num_free + len(model.leases.keys() - spared)  # there was no room indeed
            return multiple()
        assert len(gone) == max(0, len(wanted) - num_free)
        assert not gone & spared
        assert not [name for name in model.leases.keys() - gone if model.links.get(name) in gone]  # children first
        clean = model.leases.keys() - spared - model.dirty - gone
        assert not gone & model.dirty or not [n for n in clean if n not in model.links.values()]  # clean ones first
        names = [name for name, _ in wanted]
        assert reservation.hashes == [hashes[i] for i in reservation.indices] == names
        assert reservation.parents == [before for _, before in wanted]
        model.drop(gone)
        model.filling.update(names)
        new_links = {**dict(wanted), **{n: b for n, b in orphans.items() if model.is_held(n)}}
        model.links.update({n: b for n, b in new_links.items() if b is not None and model.is_held(b)})
        store = Store(reservation, ["filling"] * len(wanted))
        self.open_stores.append(store)
        return store

    @rule(target=holds, store=stores, positions=POSITIONS)
    def seal(self, store: Store, positions: set[int]) -> Hold:
        chosen = store.among(positions, "filling")
        lease = self.pool.seal(store.reservation, chosen)
        assert lease.hashes == [store.reservation.hashes[i] for i in chosen]
        for i in chosen:
            store.state[i] = "done"
            name = store.reservation.hashes[i]
            if store.forgotten:
                self.model.unnamed[store.reservation.slots[i]] = 1
            else:
                self.model.filling.remove(name)
                self.model.leases[name] = 1
        self.open_holds.append(Hold(lease, set(lease.slots) if store.forgotten else set()))
        return self.open_holds[-1]

    @rule(store=stores, positions=POSITIONS)
    def abandon(self, store: Store, positions: set[int]) -> None:
        self.pool.abandon(store.reservation, [i for i in positions if i < len(store.state)])
        self._stop_filling(store, store.among(positions, "filling"), "done")

    @rule(store=stores, positions=POSITIONS)
    def quarantine(self, store: Store, positions: set[int]) -> None:
        self.pool.quarantine(store.reservation, [i for i in positions if i < len(store.state)])
        chosen = store.among(positions, "filling")
        self._stop_filling(store, chosen, "quarantined")
        self.model.num_quarantined += len(chosen)

    @rule(store=stores, positions=POSITIONS)
    def settle(self, store: Store, positions: set[int]) -> None:
        self.pool.settle(store.reservation, [i for i in positions if i < len(store.state)])
        for i in store.among(positions, "quarantined"):
            store.state[i] = "done"
            self.model.num_quarantined -= 1

    @rule(store=consumes(stores), is_dropped=st.booleans())
    def finish(self, store: Store, is_dropped: bool) -> None:
        """The operation ends: what is quarantined settles, and what still fills is abandoned."""
        everything = set(range(len(store.state)))
        self.settle(store, everything)
        self._stop_filling(store, store.among(everything, "filling"), "done")
        self.open_stores.remove(store)
        if is_dropped:
            store.reservation.__del__()
        else:
            with store.reservation:
                pass

    def _stop_filling(self, store: Store, positions: list[int], state: str) -> None:
        for i in positions:
            store.state[i] = state
        if store.forgotten:
            for i in positions:
                del self.model.unnamed[store.reservation.slots[i]]
        else:
            self.model.drop({store.reservation.hashes[i] for i in positions})

    @rule(path=PATHS, start=st.integers(0, 4))
    def store(self, path: Path, start: int) -> None:
        """Reserve, seal and release at once: what fills the pool and sets the policy to work."""
        store = self.reserve(path, start)
        if isinstance(store, Store):
            self.release(self.seal(store, set(range(5))), 1)
            self.open_stores.remove(store)

    @rule(path=PATHS)
    def store_partial(self, path: Path) -> None:
        """One block that is not whole: of so few slots one may be such, so the one before it goes, used or not."""
        store = self.reserve(path, len(path) - 1)
        if not isinstance(store, Store):
            return
        self.open_stores.remove(store)
        if not store.state:  # held already
            return
        store.reservation.is_partial = True
        hold = self.seal(store, {0})
        for name in list(self.model.tails):
            for other in self.open_holds:
                self._forget(other, {name})
            self.model.drop({name})
        self.model.tails[store.reservation.hashes[0]] = None
        self.release(hold, 1)

    # --- protection ---------------------------------------------------------------------------------------------

    @rule(target=holds, path=PATHS, start=st.integers(0, 4))
    def lease_part(self, path: Path, start: int) -> Hold:
        """A window of a chain: its parents are not leased, yet must stay."""
        return self._lease(chain(path)[min(start, len(path) - 1) :])

    @rule(target=holds, path=PATHS)
    def lease(self, path: Path) -> Hold:
        return self._lease(chain(path))

    def _lease(self, hashes: list[ChainHash]) -> Hold:
        lease = self.pool.lease(hashes)
        assert len(lease) == self.model.run(hashes)
        for name in lease.hashes:
            self.model.leases[name] += 1
        self.open_holds.append(Hold(lease))
        return self.open_holds[-1]

    @rule(hold=consumes(holds), times=st.integers(1, 2))
    def release(self, hold: Hold, times: int) -> None:
        for _ in range(times):
            hold.lease.release()
        self._end(hold)

    @rule(hold=consumes(holds))
    def leak(self, hold: Hold) -> None:
        num_leaked = self.pool.num_leaked
        hold.lease.__del__()
        self.pool.counts()  # the verb after counts it
        assert self.pool.num_leaked == num_leaked + (len(hold.lease) > 0)
        self._end(hold)

    def _end(self, hold: Hold) -> None:
        self.open_holds.remove(hold)
        for name, slot in zip(hold.lease.hashes, hold.lease.slots, strict=True):
            if slot not in hold.unnamed:
                self.model.leases[name] -= 1
            elif self.model.unnamed[slot] == 1:
                del self.model.unnamed[slot]
            else:
                self.model.unnamed[slot] -= 1

    @rule(path=PATHS)
    def touch(self, path: Path) -> None:
        self.pool.lease(chain(path)).release()

    @rule(path=PATHS)
    def evict(self, path: Path) -> None:
        gone = {name for name in chain(path) if name in self.model.leases}
        assert self.pool.evict(chain(path)) == len(gone)
        for hold in self.open_holds:
            self._forget(hold, gone)
        self.model.drop(gone)

    def _forget(self, hold: Hold, names: set[ChainHash]) -> None:
        for name, slot in zip(hold.lease.hashes, hold.lease.slots, strict=True):
            if name in names and slot not in hold.unnamed:
                hold.unnamed.add(slot)
                self.model.unnamed[slot] = self.model.unnamed.get(slot, 0) + 1

    # --- write-back, reset, queries -----------------------------------------------------------------------------

    @rule(path=PATHS)
    def mark_dirty(self, path: Path) -> None:
        self.pool.mark_dirty(chain(path))
        self.model.dirty |= set(chain(path)) & self.model.leases.keys()

    @rule(path=PATHS)
    def mark_clean(self, path: Path) -> None:
        self.pool.mark_clean(chain(path))
        self.model.dirty -= set(chain(path))

    @rule(n=st.integers(0, 8))
    def oldest_dirty(self, n: int) -> None:
        names = self.pool.oldest_dirty(n)
        assert len(set(names)) == len(names) == min(n, len(self.model.dirty))
        for i, name in enumerate(names):
            assert name in self.model.dirty
            assert self.model.links.get(name) not in self.model.dirty - set(names[:i])  # parents before children

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        for store in self.open_stores:
            if not store.forgotten:
                slots = [store.reservation.slots[at] for at in store.among(range(5), "filling")]
                self.model.unnamed.update(dict.fromkeys(slots, 0))
            store.forgotten = True
        for hold in self.open_holds:
            self._forget(hold, set(hold.lease.hashes))
        self.model.drop({*self.model.leases, *self.model.filling})

    @rule(path=PATHS)
    def look_up(self, path: Path) -> None:
        hashes = chain(path)
        assert self.pool.lookup(hashes) == self.model.run(hashes)
        assert self.pool.holds(hashes) == [name in self.model.leases for name in hashes]

    # --- always -------------------------------------------------------------------------------------------------

    @invariant()
    def laws_hold(self) -> None:
        """The pool's own laws, and that its counts are the model's."""
        counts, model = self.pool.check(), self.model
        assert counts.ready == len(model.leases)
        assert counts.filling == len(model.filling) + len(model.unnamed)
        assert counts.leased == sum(leases > 0 for leases in model.leases.values())
        assert counts.quarantined == model.num_quarantined
        assert counts.dirty == len(model.dirty)
        assert counts.tails == len(model.tails)
        assert all(self.pool.holds(list(model.leases)))

    def teardown(self) -> None:
        for hold in self.open_holds:
            hold.lease.release()
        for store in self.open_stores:
            self.pool.abandon(store.reservation)
            self.pool.settle(store.reservation)
        counts = self.pool.check()
        assert (counts.leased, counts.filling, counts.quarantined) == (0, 0, 0)


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences that share, publish, hold and free the blocks of an L1 pool."""

    tables = Bundle("tables")  # (path, block ids): one reference to each is ours

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(KVShape(1, 1, 1, 1, "float16"), NUM_SLOTS)
        self.refs = [0] * NUM_SLOTS
        self.names: dict[ChainHash, int] = {}  # → block id
        self.open_tables: list[list[int]] = []
        self.source, self.shelf = TierEvents("l1", lambda: self.pool), Shelf()

    @rule(target=tables, path=PATHS)
    def admit(self, path: Path) -> tuple[Path, list[int]] | MultipleResults[tuple[Path, list[int]]]:
        """A sequence begins: its cached prefix is matched, the rest allocated; all or nothing."""
        hashes = chain(path)
        assert self.pool.lookup(hashes) == self._run(hashes)
        held = self.pool.match(hashes)
        assert held == [self.names[name] for name in hashes[: self._run(hashes)]]
        self._ref(held, 1)
        count = len(hashes) - len(held)
        num_free = self.refs.count(0)
        num_unnamed = num_free - sum(self.refs[block_id] == 0 for block_id in self.names.values())
        own = self.pool.allocate(count)
        if own is None:
            assert count > num_free
            self.pool.free(held)
            self._ref(held, -1)
            return multiple()
        taken = own
        assert len(set(taken)) == count
        assert not any(self.refs[block_id] for block_id in taken)
        lost = {name for name, block_id in self.names.items() if block_id in taken}
        assert len(lost) == max(0, count - num_unnamed)  # unnamed ones first
        self.names = {name: block_id for name, block_id in self.names.items() if name not in lost}
        self._ref(taken, 1)
        table = [*held, *taken]
        self.open_tables.append(table)
        return path, table

    @rule(table=tables, start=st.integers(0, 4), count=st.integers(1, 5))
    def publish(self, table: tuple[Path, list[int]], start: int, count: int) -> None:
        path, block_ids = table
        if block_ids not in self.open_tables:
            return
        start = min(start, len(path) - 1)
        hashes, ids = chain(path)[start : start + count], block_ids[start : start + count]
        self.pool.publish(ids, hashes, chain(path)[start - 1] if start else None, [b""] * len(ids))
        for name, block_id in zip(hashes, ids, strict=True):
            if name not in self.names and block_id not in self.names.values():
                self.names[name] = block_id

    @rule(table=tables)
    def hold(self, table: tuple[Path, list[int]]) -> None:
        """A copy begins; it frees its blocks like a sequence that ends."""
        if table[1] in self.open_tables:
            self.pool.hold(table[1])
            self._ref(table[1], 1)
            self.open_tables.append(table[1])

    @rule(table=tables)
    def free(self, table: tuple[Path, list[int]]) -> None:
        if table[1] in self.open_tables:
            self.open_tables.remove(table[1])
            self.pool.free(table[1])
            self._ref(table[1], -1)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.names.clear()

    @rule(limit=st.integers(1, 8))
    def read(self, limit: int) -> None:
        """A reader of its events, who minds contradictions."""
        self.shelf.read(self.source, limit)
        assert self.shelf.names("l1") == set(self.names)

    def _run(self, hashes: list[ChainHash]) -> int:
        return next((i for i, name in enumerate(hashes) if name not in self.names), len(hashes))

    def _ref(self, block_ids: list[int], change: int) -> None:
        for block_id in block_ids:
            self.refs[block_id] += change

    @invariant()
    def laws_hold(self) -> None:
        """The pool's own laws, and that free blocks and names are the model's."""
        self.pool.check()
        assert self.pool.num_free_blocks == self.refs.count(0)
        assert all(self.pool.lookup([name]) for name in self.names)

    def teardown(self) -> None:
        for table in self.open_tables:
            self.pool.free(table)
        assert self.pool.num_free_blocks == NUM_SLOTS
        self.pool.check()


TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = SETTINGS
TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = SETTINGS

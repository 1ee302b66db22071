"""A state machine over `Hierarchy`: anything may happen in any order, and no block is ever served with other bytes.

The model is a dict per chain of what may be found: every served byte must be the key's own (I1), at idle nothing is
leased or half filled (I3), and no answer comes later than its deadline or exceeds what is leased (I4).
"""

from dataclasses import dataclass
from random import Random

from doubles import (
    SLOT_BYTES,
    FakeClock,
    MemoryTier,
    bytes_in_l2,
    chain_of,
    fill_slots,
    hierarchy_of,
    payload_of,
    reserve,
    wait_until,
)
from extent import brief
from fault_rig import rest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings
from kvtier.tiers.hierarchy.promotion import LocalClaim
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.pool import Reservation
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

SLOTS = 12
PREFETCH_DEADLINE = 2.0
# Three chains; the second and third share their first three blocks, as requests with a common system prompt do.
CHAINS = [chain_of(7), chain_of(6, first_token=1000), chain_of(6, first_token=1000)]
CHAINS[2] = TokenChain(CHAINS[1].root, CHAINS[1].block_size)
CHAINS[2].extend([*range(1000, 1012), *range(5000, 5012)])
CHAIN_OF = {h: (chain, i) for chain in CHAINS for i, h in enumerate(chain.hashes)}

chains = st.sampled_from(CHAINS)
positions = st.integers(0, 6)
lengths = st.integers(1, 7)
failures = st.sampled_from([Outcome.IO_ERROR, Outcome.EVICTED, Outcome.CHECKSUM, Outcome.KEY_MISMATCH])
write_failures = st.sampled_from([Outcome.IO_ERROR, Outcome.FULL])


@dataclass(eq=False)
class Store:
    """A reservation under way and the epoch its bytes were computed in."""

    reservation: Reservation
    epoch: int


@dataclass(eq=False)
class Ask:
    """A prefetch under way, when it began, and what it was told."""

    prefetch: LocalClaim
    hashes: list[ChainHash]
    began: float
    promised: int | None = None


@dataclass(eq=False)
class Loan:
    """A claimed lease: its bytes must stay as they are until it is released."""

    lease: Lease


class DamagedTier(MemoryTier):
    """A tier whose storage may rot: what the test damaged is no fault of the tier's own."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[ChainHash] = set()

    def damage(self, chain_hash: ChainHash, bit: int) -> None:
        if (stored := self.blocks.get(chain_hash)) is not None:
            record, data = stored
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            self.blocks[chain_hash] = (record, bytes(flipped))
            self.damaged.add(chain_hash)

    def check(self) -> None:
        for chain_hash, (_, data) in self.blocks.items():
            assert chain_hash in self.damaged or data == payload_of(chain_hash)


class HierarchyMachine(RuleBasedStateMachine):
    stores = Bundle("stores")
    asks = Bundle("asks")
    loans = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.tier = DamagedTier()
        self.epoch_of: dict[ChainHash, int] = {}  # the model: the newest epoch a block's bytes were computed in
        self.lost_below: set[ChainHash] = set()  # what the tier had and may have lost, or was not passed down
        self.open_stores: set[Store] = set()
        self.open_asks: set[Ask] = set()
        self.open_loans: set[Loan] = set()
        self.generation = 0  # of the hierarchy: what belongs to a closed one is void
        self.resets = 0

    @initialize(write_back=st.booleans(), admit_after=st.sampled_from([1, 1, 2]), fill=st.booleans())
    def begin(self, write_back: bool, admit_after: int, fill: bool) -> None:
        self.settings = HierarchySettings(
            write_policy="write_back" if write_back else "write_through",
            admit_after=admit_after,
            store_queue=3 * SLOT_BYTES,
            prefetch_deadline=PREFETCH_DEADLINE,
            lease_deadline=30.0,
        )
        if fill:
            for chain in CHAINS[:2]:
                self.tier.fill(chain)
                self.epoch_of.update(dict.fromkeys(chain.hashes, 0))
        self.open()

    def open(self) -> None:
        patience = PortSettings(deadline=1.0, failures=2, retry_after=1.0, num_threads=2)
        self.hierarchy: Hierarchy = hierarchy_of(
            SLOTS, self.tier, settings=self.settings, clock=self.clock, port_settings=patience
        )

    # storing

    @rule(target=stores, chain=chains, first=positions, length=lengths)
    def reserve(self, chain: TokenChain, first: int, length: int) -> object:
        hashes = chain.hashes[first : first + length]
        held = [h for h, is_held in zip(hashes, self.hierarchy.host.pool.holds(hashes), strict=True) if is_held]
        reservation = reserve(self.hierarchy, hashes, chain.parent(first)) if hashes else None
        if reservation is None:
            return multiple()
        # Nothing held is asked for again, nothing reserved can be found.
        assert set(reservation.hashes).isdisjoint(held)
        assert not any(self.hierarchy.host.pool.holds(reservation.hashes))
        store = Store(reservation, self.hierarchy.epoch)
        self.open_stores.add(store)
        return store

    @rule(store=consumes(stores))
    def seal(self, store: Store) -> None:
        if store not in self.open_stores:
            return
        self.open_stores.remove(store)
        reservation = store.reservation
        fill_slots(self.hierarchy, reservation.slots, reservation.hashes)
        records = [
            BlockRecord(h, chain.parent(i), chain.block_tokens(i), 0)
            for h in reservation.hashes
            for chain, i in (CHAIN_OF[h],)
        ]
        self.hierarchy.seal(reservation, records, store.epoch)
        assert self.hierarchy.stores.sealing_queue.drain(60)
        if store.epoch == self.hierarchy.epoch:
            self.epoch_of.update(dict.fromkeys(reservation.hashes, self.resets))
            self.lost_below -= set(reservation.hashes) - self.tier.read_fails.keys()
            assert all(bytes_in_l2(self.hierarchy, h) in (payload_of(h), None) for h in reservation.hashes)

    @rule(chain=chains, length=lengths)
    def burst(self, chain: TokenChain, length: int) -> None:
        """A whole prompt at once: more than may wait for the tier below."""
        reservation = reserve(self.hierarchy, chain.hashes[:length], chain.root)
        if reservation is not None:
            store = Store(reservation, self.hierarchy.epoch)
            self.open_stores.add(store)
            self.seal(store)

    @rule(store=consumes(stores))
    def abandon(self, store: Store) -> None:
        if store in self.open_stores:
            self.open_stores.remove(store)
            self.hierarchy.abandon(store.reservation, Outcome.COPY_FAILED)

    # loading

    @rule(target=asks, chain=chains, first=positions, length=lengths)
    def prefetch(self, chain: TokenChain, first: int, length: int) -> object:
        hashes = chain.hashes[first : first + length]
        if not hashes:
            return multiple()
        claim = self.hierarchy.submit(hashes, chain.parent(first))
        assert isinstance(claim, LocalClaim)
        ask = Ask(claim, hashes, self.clock())
        self.open_asks.add(ask)
        return ask

    @rule(ask=asks)
    def poll(self, ask: Ask) -> None:
        if ask not in self.open_asks:
            return
        answer = self.hierarchy.poll(ask.prefetch)
        if answer is PENDING:
            waited = self.clock() - ask.began  # for room, and then for reads
            assert waited < 2 * PREFETCH_DEADLINE, "PENDING past its deadlines"
            assert ask.promised is None, "a promise was taken back"
            return
        assert isinstance(answer, int)
        assert 0 <= answer <= len(ask.hashes)
        lease = ask.prefetch.leases[0] if ask.prefetch.leases else None
        assert answer == (len(lease) if lease else 0), "promised more than is leased"
        if ask.promised is None or answer:
            assert ask.promised in (None, answer), "a promise changed"
        ask.promised = answer  # 0 once nobody asked for too long
        if lease:
            self.verify(lease, ask.hashes)

    @rule(target=loans, ask=consumes(asks))
    def claim(self, ask: Ask) -> object:
        if ask not in self.open_asks:
            return multiple()
        self.open_asks.remove(ask)
        promised = self.hierarchy.poll(ask.prefetch)
        lease = self.hierarchy.lease(ask.prefetch)
        assert promised is PENDING or len(lease) == promised
        loan = Loan(lease)
        self.open_loans.add(loan)
        self.verify(lease, ask.hashes)
        assert len(self.hierarchy.lease(ask.prefetch)) == 0  # a lease is handed over once
        return loan

    @rule(target=asks, loan=loans)
    def go_on(self, loan: Loan) -> object:
        """With what follows a piece."""
        if loan not in self.open_loans or not loan.lease.hashes:
            return multiple()
        chain, last = CHAIN_OF[loan.lease.hashes[-1]]
        if not (rest := chain.hashes[last + 1 :]):
            return multiple()
        ask = Ask(self.hierarchy.submit(rest, chain.hashes[last]), rest, self.clock())  # type: ignore[arg-type]
        self.open_asks.add(ask)
        return ask

    @rule(loan=consumes(loans))
    def release(self, loan: Loan) -> None:
        if loan in self.open_loans:
            self.open_loans.remove(loan)
            loan.lease.release()
            loan.lease.release()

    @rule(ask=consumes(asks))
    def cancel(self, ask: Ask) -> None:
        if ask in self.open_asks:
            self.open_asks.remove(ask)
            self.hierarchy.cancel(ask.prefetch)
            self.hierarchy.cancel(ask.prefetch)

    @rule(chain=chains, num_l1=st.integers(0, 3))
    def lookup(self, chain: TokenChain, num_l1: int) -> None:
        found = self.hierarchy.lookup(chain.hashes, num_l1)  # cannot be built unless it sums
        assert found["l1"] == num_l1
        num_found = found.blocks - found.miss
        if self.hierarchy.ports[0].queue.idle:  # else the tier may change under the comparison
            pool, port = self.hierarchy.host.pool, self.hierarchy.ports[0]
            held = [a or b for a, b in zip(pool.holds(chain.hashes), port.holds(chain.hashes), strict=True)]
            assert held[num_l1:num_found] == [True] * (num_found - num_l1)
            assert num_found == len(held) or not held[num_found]

    # the world

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 2.5, 31.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.hierarchy.tick()

    @rule(is_shut=st.booleans())
    def delay(self, is_shut: bool) -> None:
        (self.tier.gate.clear if is_shut else self.tier.gate.set)()

    @rule(chain=chains, i=st.integers(0, 5), outcome=failures)
    def fail_reads(self, chain: TokenChain, i: int, outcome: Outcome) -> None:
        self.tier.read_fails[chain.hashes[i]] = outcome
        self.lost_below.add(chain.hashes[i])  # what is found corrupt is forgotten

    @rule(chain=chains, i=st.integers(0, 5), outcome=write_failures)
    def fail_writes(self, chain: TokenChain, i: int, outcome: Outcome) -> None:
        self.tier.write_fails[chain.hashes[i]] = outcome

    @rule(is_broken=st.booleans())
    def break_storage(self, is_broken: bool) -> None:
        self.tier.broken = is_broken
        if not is_broken:
            self.tier.read_fails.clear()
            self.tier.write_fails.clear()

    @rule(chain=chains, i=st.integers(0, 5), bit=st.integers(0, SLOT_BYTES * 8 - 1))
    def corrupt(self, chain: TokenChain, i: int, bit: int) -> None:
        """One bit of a stored block flips, in storage."""
        self.lost_below.update({chain.hashes[i]} & self.tier.blocks.keys())
        self.tier.damage(chain.hashes[i], bit)

    @rule(chain=chains, first=positions)
    def evict_below(self, chain: TokenChain, first: int) -> None:
        self.lost_below.update(set(chain.hashes[first:]) & self.tier.blocks.keys())
        self.tier.discard(chain.hashes[first:])

    @rule(chain=chains, first=positions)
    def evict(self, chain: TokenChain, first: int) -> None:
        self.hierarchy.host.pool.evict(chain.hashes[first:])

    @rule()
    def reset(self) -> None:
        """The weights changed: from here on nothing computed before may be found."""
        self.hierarchy.reset()
        self.resets += 1
        self.epoch_of.clear()
        for chain in CHAINS:
            assert self.hierarchy.lookup(chain.hashes).miss == len(chain.hashes)

    @rule()
    def drain(self) -> None:
        self.tier.gate.set()
        rest(self.hierarchy, 0.05)
        if not (self.open_stores or self.open_loans):  # those are the worker's copies: not idle
            self.hierarchy.check()

    @rule()
    def recover(self) -> None:
        """The storage is well again, and has time: what L2 holds is below."""
        self.break_storage(False)
        self.tier.gate.set()
        for _ in range(3):
            self.advance(61.0)
            assert self.hierarchy.drain(60)
        assert self.hierarchy.ports[0].writable
        self.all_is_below()

    @precondition(lambda self: not self.open_loans)
    @rule(in_flight=st.booleans())
    def reopen(self, in_flight: bool) -> None:
        """Close, with copies under way or after them, and start anew over what the lower tier holds."""
        old = self.hierarchy
        for ask in self.open_asks:
            old.cancel(ask.prefetch)
        for store in self.open_stores:
            old.abandon(store.reservation, Outcome.CLOSED)
        self.open_asks.clear()
        self.open_stores.clear()
        if in_flight and not self.tier.gate.is_set():
            old.close(timeout=0.01)  # something may hang in its I/O …
            self.tier.gate.set()
            assert old.stores.sealing_queue.close(10)
            assert old.ports[0].queue.close(10)  # … and ends now, harmlessly
        else:
            self.tier.gate.set()
            rest(old, 0.05)
            old.close(timeout=0.2)
        self.open()

    # what always holds

    def all_is_below(self) -> None:
        """What L2 holds a well tier has after a drain, but for what it lost itself and what nobody could reach."""
        pool, port = self.hierarchy.host.pool, self.hierarchy.ports[0]
        for chain in CHAINS:
            held, below = pool.holds(chain.hashes), port.tier and port.tier.holds(chain.hashes)
            assert below
            for here, there, name in zip(held, below, chain.hashes, strict=True):
                if not (there or name in self.lost_below):
                    if not here:
                        break  # its descendants cannot be reached
                    raise AssertionError("a block of L2 is not below, and the tier has been idle")

    def verify(self, lease: Lease, hashes: list[ChainHash]) -> None:
        assert lease.hashes == hashes[: len(lease)]
        for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
            assert bytes(self.hierarchy.host.region.slot(slot)) == payload_of(chain_hash), "another block's bytes"

    @invariant()
    def io_settles(self) -> None:
        """Threads come to rest after each rule: an example runs the same way each time (the stress test's do not)."""
        if hasattr(self, "hierarchy"):
            queue = self.hierarchy.ports[0].queue
            if self.tier.gate.is_set():
                assert queue.drain(60)
            else:
                wait_until(lambda: len(queue.running) == 2 or not (queue.urgent or queue.normal))

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for loan in self.open_loans:
            self.verify(loan.lease, loan.lease.hashes)

    @invariant()
    def what_can_be_found_was_stored_in_this_epoch(self) -> None:
        if not hasattr(self, "hierarchy"):
            return
        for chain_hash in CHAIN_OF:
            if self.hierarchy.host.pool.holds([chain_hash])[0] or self.hierarchy.ports[0].holds([chain_hash])[0]:
                assert chain_hash in self.epoch_of, "a block from before a reset"

    @invariant()
    def the_books_are_straight(self) -> None:
        if hasattr(self, "hierarchy"):
            self.hierarchy.promoter.check()
            counts = self.hierarchy.host.pool.check()
            assert counts.free + counts.filling + counts.ready + counts.quarantined == SLOTS

    def teardown(self) -> None:
        if not hasattr(self, "hierarchy"):
            return
        self.tier.gate.set()
        self.tier.broken = False
        for ask in self.open_asks:
            self.hierarchy.cancel(ask.prefetch)
        for loan in self.open_loans:
            loan.lease.release()
        for store in self.open_stores:
            self.hierarchy.abandon(store.reservation, Outcome.ABORTED)
        rest(self.hierarchy, 0.05)
        counts = self.hierarchy.host.pool.check()
        self.hierarchy.promoter.check()
        assert self.hierarchy.promoter.idle
        assert (counts.leased, counts.filling, counts.quarantined) == (0, 0, 0)
        assert self.hierarchy.host.pool.num_leaked == 0
        self.hierarchy.close(0.2)


TestHierarchyMachine = HierarchyMachine.TestCase
TestHierarchyMachine.settings = settings(
    max_examples=brief(20, 60),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    num_seats=st.integers(1, 3),
    dice=st.randoms(use_true_random=False),
)
@settings(max_examples=brief(25, 200), deadline=None)
def test_no_order_of_arrivals_and_seats_makes_requests_wait_for_ever(
    sizes: list[int], num_seats: int, dice: Random
) -> None:
    """Requests ask while they wait for a seat in L1, keep it until they have all, and no deadline ends a wait."""
    tier, clock = MemoryTier(), FakeClock()
    hierarchy = hierarchy_of(SLOTS, tier, clock=clock, settings=HierarchySettings(prefetch_deadline=PREFETCH_DEADLINE))
    left = {number: chain_of(size, first_token=1000 * number) for number, size in enumerate(sizes)}
    for chain in left.values():
        tier.fill(chain)
    had, claims, seated = dict.fromkeys(left, 0), dict[int, LocalClaim](), set[int]()
    for number in [number for _ in range(8 * len(sizes)) for number in dice.sample(range(len(sizes)), len(sizes))]:
        if number not in left:
            continue
        chain = left[number]
        if number not in claims:
            names = chain.hashes[had[number] :]
            claims[number] = hierarchy.submit(names, chain.parent(had[number]))  # type: ignore[assignment]
        hierarchy.promoter.tick()  # who found no slot tries again
        assert hierarchy.ports[0].queue.drain(60)
        if hierarchy.poll(claims[number]) is PENDING or (number not in seated and len(seated) == num_seats):
            continue
        seated.add(number)
        with hierarchy.lease(claims.pop(number)) as lease:
            assert len(lease) > 0
            had[number] += len(lease)
        if had[number] == len(chain.hashes):
            seated.remove(number)
            del left[number]
    assert not left
    hierarchy.check()
    hierarchy.close()

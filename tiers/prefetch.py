"""Promotion: blocks on their way from a lower tier to L2, read once however many requests wait for them."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

from kvtier.tiers.host import HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.pool import Lease, Reservation
from kvtier.tiers.port import TierPort
from kvtier.tiers.progress import PENDING, Pending, Progress
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

__all__ = ["PENDING", "Pending", "Prefetch", "Prefetcher"]

_log = logging.getLogger(__name__)

BATCH_BYTES: Final = 8 << 20  # per read: a call as large as the slab makes; the GIL is waited for once in each
_FIRST_LEASE: Final = 256  # blocks looked for at once; twice as many while they are all there


class Prefetch:
    """One request's claim on a run of consecutive blocks.

    What L2 holds is leased at once; what a lower tier holds is fetched and leased as it lands. `Prefetcher.poll` tells
    how many leading blocks are safe; `Prefetcher.claim` hands their lease over; `Prefetcher.cancel` lets go.
    """

    __slots__ = (
        "_position", "deadline", "done", "end", "flights", "hashes", "leases", "next", "num_held", "parent",
        "polled_at", "refused", "told",
    )  # fmt: skip

    def __init__(self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float, now: float) -> None:
        self.hashes = list(hashes)
        self.parent = parent  # of hashes[0]
        self.deadline = deadline
        self.polled_at = now
        self.end = len(self.hashes)  # the run wanted; shrinks where a block cannot be had
        self.num_held = 0  # leading blocks counted as held by waiting requests
        self.next = 0  # first block neither leased nor on its way
        self.leases: list[Lease] = []
        self.flights: set[_Flight] = set()
        self.done = False
        self.refused = False  # for now: others hold all that waiting requests may hold
        self.told = False  # a poll has returned the number
        self._position: dict[ChainHash, int] = {}

    @property
    def position(self) -> dict[ChainHash, int]:
        """Where in the run each block is: made when the first one has to be fetched."""
        if not self._position:
            self._position = {chain_hash: i for i, chain_hash in enumerate(self.hashes)}
        return self._position


@dataclass(eq=False, slots=True)
class _Flight:
    """One read on its way: consecutive blocks, their reserved slots, and everyone who waits. Implements `Job`."""

    owner: "Prefetcher"
    port: TierPort
    reservation: Reservation
    positions: range  # into the reservation
    deadline: float
    waiters: set[Prefetch] = field(default_factory=set)
    settled: bool = False
    given_up: bool = False

    @property
    def hashes(self) -> list[ChainHash]:
        return self.reservation.hashes[self.positions.start : self.positions.stop]

    def run(self) -> None:
        self.deadline = self.owner.clock() + self.port.settings.deadline  # the wait in the queue had its own
        slots = self.reservation.slots[self.positions.start : self.positions.stop]
        results = self.port.read(self.hashes, [self.owner.host.region.slot(int(slot)) for slot in slots])
        self.owner.landed(self, results)

    def drop(self, outcome: Outcome) -> None:
        self.owner.landed(self, [outcome] * len(self.positions))

    def overdue(self) -> None:
        self.port.failed("read")
        self.owner.gave_up(self)


class Prefetcher:
    """All promotions of one hierarchy: single flight per block, windows of at most a quarter of L2 per request.

    Lock: `lock` (the hierarchy's) is held around this bookkeeping; inside it the pool's, a port's, a queue's or a
    tier's index lock may be taken, never the other way round; never held across I/O.
    Law (`check`): every unsettled flight is in the index, every waiter of a flight knows it, at idle there is neither.
    """

    def __init__(
        self,
        host: HostTier,
        ports: Sequence[TierPort],
        lock: Progress,
        metrics: Metrics,
        clock: Callable[[], float],
        lease_deadline: float,
    ) -> None:
        self.host = host
        self._ports = ports
        self._lock = lock
        self._metrics = metrics
        self.clock = clock
        self._lease_deadline = lease_deadline
        self._window = max(1, host.pool.num_slots // 4)
        self._max_waiting = max(1, host.pool.num_slots // 2)
        self._batch = max(1, BATCH_BYTES // host.region.slot_bytes)
        self._flights: dict[ChainHash, _Flight] = {}
        self._given_up: set[_Flight] = set()  # hang in their I/O; their slots are quarantined
        self._active: set[Prefetch] = set()  # not yet claimed or cancelled
        self._held: Counter[ChainHash] = Counter()  # block → active requests that hold or wait for it

    # what the connector asks

    def start(self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float) -> Prefetch:
        """Claim a run of consecutive blocks, as many as waiting requests may hold: half of L2 together."""
        now = self.clock()
        with self._lock:
            prefetch = Prefetch(hashes, parent, now + deadline, now)
            room = self._room_for(prefetch.hashes)
            if not room and prefetch.hashes:
                prefetch.refused, prefetch.end = True, 0
            elif room < prefetch.end:
                self._shorten(prefetch, room, Outcome.NO_SLOT)
            prefetch.num_held = prefetch.end
            self._held.update(prefetch.hashes[: prefetch.end])
            self._active.add(prefetch)
            self._advance(prefetch)
            return prefetch

    def poll(self, prefetch: Prefetch) -> int | Pending:
        """How many leading blocks are in L2, verified and leased; PENDING while more may come before the deadline."""
        now = self.clock()
        with self._lock:
            prefetch.polled_at = now
            if not prefetch.done and now >= prefetch.deadline:
                self._shorten(prefetch, 0, Outcome.TIMEOUT, keep_arrived=True)
                self._finish(prefetch)
            prefetch.told = prefetch.done
            return sum(map(len, prefetch.leases)) if prefetch.done else PENDING

    def claim(self, prefetch: Prefetch) -> Lease:
        """Take over the lease of the promised blocks; empty once taken. The copy that follows must release it."""
        with self._lock:
            if not prefetch.done:
                self._shorten(prefetch, 0, Outcome.TIMEOUT, keep_arrived=True)
                self._finish(prefetch)
            self._leave(prefetch)
            return prefetch.leases.pop() if prefetch.leases else self.host.pool.lease([])

    def cancel(self, prefetch: Prefetch) -> None:
        """The request went away. Flights others wait for go on; so does their I/O. Idempotent."""
        with self._lock:
            self._leave(prefetch)
            self._finish(prefetch)
            for lease in prefetch.leases:
                lease.release()
            prefetch.leases = []

    def tick(self) -> None:
        """Reclaim promises nobody has asked about for `lease_deadline` seconds; no copy was submitted for them."""
        now = self.clock()
        with self._lock:
            late = [p for p in self._active if now - p.polled_at >= self._lease_deadline]
            for prefetch in late:
                self._metrics.missed(Outcome.TIMEOUT, prefetch.end)
                self._finish(prefetch)
                for lease in prefetch.leases:
                    lease.release()
                prefetch.leases = []
                prefetch.end = 0
                self._leave(prefetch)

    @property
    def idle(self) -> bool:
        """Whether no request waits or holds a promise, and no read is under way."""
        return not (self._active or self._flights or self._given_up)

    def has_news(self) -> bool:
        """Whether some request's answer is there and no poll has returned it yet. The caller holds the lock."""
        return any(prefetch.done and not prefetch.told for prefetch in self._active)

    def check(self) -> None:
        """The bookkeeping law."""
        with self._lock:
            for chain_hash, flight in self._flights.items():
                if flight.settled or flight.given_up or chain_hash not in flight.hashes:
                    raise AssertionError(f"flight index names a settled flight for {chain_hash.hex()[:16]}")
                if any(flight not in waiter.flights for waiter in flight.waiters):
                    raise AssertionError("a waiter does not know its flight")

    # what the I/O threads report

    def landed(self, flight: _Flight, results: Sequence[BlockRecord | Outcome]) -> None:
        """A read ended: seal what is whole, lease it to every live waiter, give the rest back."""
        pool = self.host.pool
        with self._lock:
            if flight.settled:
                return
            flight.settled = True
            if flight.given_up:
                self._given_up.discard(flight)
                pool.settle(flight.reservation, flight.positions)
                self._lock.notify_all()
                return
            for chain_hash in flight.hashes:
                del self._flights[chain_hash]
            good, bad = self._sort(flight, results)
            with pool.seal(flight.reservation, good):
                pool.abandon(flight.reservation, bad)
                for waiter in flight.waiters:
                    waiter.flights.discard(flight)
                    self._deliver(waiter, flight.hashes, results)
                for waiter in flight.waiters:
                    self._advance(waiter)
            flight.waiters.clear()
            self._lock.notify_all()

    def gave_up(self, flight: _Flight) -> None:
        """A read hangs past its deadline: its waiters go on without it, its slots wait for it in quarantine."""
        with self._lock:
            if flight.settled or flight.given_up:
                return
            flight.given_up = True
            self._given_up.add(flight)
            for chain_hash in flight.hashes:
                del self._flights[chain_hash]
            self.host.pool.quarantine(flight.reservation, flight.positions)
            results = [Outcome.TIMEOUT] * len(flight.positions)
            for waiter in flight.waiters:
                waiter.flights.discard(flight)
                self._deliver(waiter, flight.hashes, results)
            for waiter in flight.waiters:
                self._advance(waiter)
            flight.waiters.clear()
            self._lock.notify_all()

    # bookkeeping, under the lock

    def _room_for(self, hashes: list[ChainHash]) -> int:
        """How many leading blocks one more request may hold; a block others hold as well takes no room."""
        room = self._max_waiting - len(self._held)
        if room >= len(hashes):
            return len(hashes)
        for i, chain_hash in enumerate(hashes):
            if chain_hash not in self._held:
                if room <= 0:
                    return i
                room -= 1
        return len(hashes)

    def _leave(self, prefetch: Prefetch) -> None:
        """The request waits no more."""
        if prefetch in self._active:
            self._active.remove(prefetch)
            held, hashes = self._held, prefetch.hashes[: prefetch.num_held]
            counts = list(map(held.pop, hashes, repeat(0)))  # all of them at the speed of C
            if sum(counts) > len(hashes):  # mostly nobody else holds any
                held.update({h: count - 1 for h, count in zip(hashes, counts, strict=True) if count > 1})

    def _sort(self, flight: _Flight, results: Sequence[BlockRecord | Outcome]) -> tuple[list[int], list[int]]:
        good: list[int] = []
        bad: list[int] = []
        for position, result in zip(flight.positions, results, strict=True):
            if isinstance(result, BlockRecord):
                self.host.records[int(flight.reservation.slots[position])] = result
                good.append(position)
            else:
                bad.append(position)
        return good, bad

    def _deliver(self, waiter: Prefetch, hashes: list[ChainHash], results: Sequence[BlockRecord | Outcome]) -> None:
        """Lease what landed to one waiter, up to its first hole; the run ends at the hole, finally for this request."""
        position = waiter.position
        first = next((i for i, chain_hash in enumerate(hashes) if chain_hash in position), len(hashes))
        whole = next((i for i in range(first, len(hashes)) if not isinstance(results[i], BlockRecord)), len(hashes))
        if wanted := [chain_hash for chain_hash in hashes[first:whole] if chain_hash in position]:
            waiter.leases.append(self.host.pool.lease(wanted))
        if whole < len(hashes) and hashes[whole] in position:
            outcome = results[whole]
            assert isinstance(outcome, Outcome)
            self._shorten(waiter, position[hashes[whole]], outcome)

    def _advance(self, prefetch: Prefetch) -> None:
        """Lease, join or launch until the window is full or the run ends; finish when nothing is on its way."""
        on_the_way = sum(len(flight.positions) for flight in prefetch.flights)
        size = _FIRST_LEASE
        while not prefetch.done and prefetch.next < prefetch.end:
            if on_the_way >= self._window:
                return
            start = prefetch.next
            rest = prefetch.hashes[start : min(prefetch.end, start + self._window - on_the_way)]
            if len(lease := self.host.pool.lease(rest[:size])):
                prefetch.leases.append(lease)
                prefetch.next += len(lease)
                size = 2 * size if len(lease) == size else _FIRST_LEASE
            elif flight := self._flights.get(rest[0]):
                self._join(prefetch, flight, rest)
                on_the_way += len(flight.positions)
            else:
                reason = self._launch(prefetch, rest[: self._missing_run(rest)])
                on_the_way += prefetch.next - start
                if reason:
                    self._shorten(prefetch, prefetch.next, reason)
        if not prefetch.flights:
            self._finish(prefetch)

    def _missing_run(self, hashes: list[ChainHash]) -> int:
        """How many leading blocks L2 does not hold, the first one in any case, in time of that order."""
        first, size = 0, 64
        while first < len(hashes):
            held = self.host.pool.holds(hashes[first : first + size])
            if True in held:
                return max(1, first + held.index(True))
            first, size = first + size, 2 * size
        return len(hashes)

    def _join(self, prefetch: Prefetch, flight: _Flight, rest: list[ChainHash]) -> None:
        flight.waiters.add(prefetch)
        prefetch.flights.add(flight)
        ahead = flight.hashes[flight.hashes.index(rest[0]) :]
        prefetch.next += sum(1 for a, b in zip(ahead, rest, strict=False) if a == b)

    def _launch(self, prefetch: Prefetch, rest: list[ChainHash]) -> Outcome | None:
        """Start reading the leading blocks of `rest` from the first tier that holds them, or say why not."""
        pool = self.host.pool
        port, held = next(((p, n) for p in self._ports if (n := p.lookup(rest))), (None, 0))
        if port is None:
            return Outcome.EVICTED
        rest = rest[: next((i for i, h in enumerate(rest[:held]) if h in self._flights), held)]
        parent = prefetch.hashes[prefetch.next - 1] if prefetch.next else prefetch.parent
        after = prefetch.next + len(rest)
        behind = [h for h in prefetch.hashes[after : after + 1] if pool.holds([h])[0]]
        reservation = pool.reserve([*rest, *behind], parent)  # links the block behind the gap to its parent again
        while reservation is None and len(rest) > 1:  # the head matters more than the tail
            rest = rest[: len(rest) // 2]
            reservation = pool.reserve(rest, parent)
        if reservation is None:
            return Outcome.NO_SLOT
        run = next((i for i, index in enumerate(reservation.indices) if index != i), len(reservation.indices))
        pool.abandon(reservation, range(run, len(reservation.indices)))
        if not run:  # somebody is storing the first one right now, or just has
            return None if pool.lookup(rest[:1]) else Outcome.NO_SLOT
        deadline = self.clock() + port.settings.deadline
        for first in range(0, run, self._batch):
            flight = _Flight(self, port, reservation, range(first, min(run, first + self._batch)), deadline)
            if not port.queue.submit(flight, urgent=True):
                pool.abandon(reservation, range(first, run))
                return Outcome.QUEUE_FULL
            self._flights.update(dict.fromkeys(flight.hashes, flight))
            flight.waiters.add(prefetch)
            prefetch.flights.add(flight)
            prefetch.next += len(flight.positions)
        return None

    def _shorten(self, prefetch: Prefetch, end: int, reason: Outcome, *, keep_arrived: bool = False) -> None:
        """The run ends at block `end` (or, with keep_arrived, where the arrived blocks end)."""
        if keep_arrived:
            end = self.host.pool.lookup(prefetch.hashes[: prefetch.end])
        if end < prefetch.end:
            self._metrics.missed(reason, prefetch.end - end)
            prefetch.end, prefetch.next = end, min(prefetch.next, end)
            for flight in [f for f in prefetch.flights if self._first_wanted(prefetch, f) >= end]:
                flight.waiters.discard(prefetch)  # it would bring nothing that can be used
                prefetch.flights.discard(flight)

    @staticmethod
    def _first_wanted(prefetch: Prefetch, flight: _Flight) -> int:
        return next((i for h in flight.hashes if (i := prefetch.position.get(h)) is not None), prefetch.end)

    def _finish(self, prefetch: Prefetch) -> None:
        """Settle on the leading run that is leased, under one lease, and let go of everything beyond it."""
        if prefetch.done:
            return
        prefetch.done = True
        for flight in prefetch.flights:
            flight.waiters.discard(prefetch)
        prefetch.flights.clear()
        if [len(lease) for lease in prefetch.leases] != [prefetch.end]:  # else one lease has all of it
            lease = self.host.pool.lease(prefetch.hashes[: prefetch.end])
            for partial in prefetch.leases:
                partial.release()
            prefetch.leases = [lease]
            prefetch.end = len(lease)
        self._lock.notify_all()

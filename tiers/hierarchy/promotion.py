"""Promotion: loading blocks from a lower tier into L2, with one read for any number of waiting requests."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Final

from kvtier.tiers import BATCH_BYTES, L2, BlockRecord, ChainHash, Metrics, Outcome, checksum, tracing
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim, Pending, ProgressCondition
from kvtier.tiers.hierarchy.io_queue import IoQueue, Job, JoinedJob
from kvtier.tiers.hierarchy.lower_tier import TierPort
from kvtier.tiers.hierarchy.stores import Sealing
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Lease, Reservation, make_slot_counts

_MOST: Final = 8192  # blocks in one query: a longer chain takes several
_FIRST_LEASE: Final = 256  # blocks looked up at once; doubled while all are found
_BETWEEN_PIECES: Final = 0.5  # seconds in which a request that took one piece has to claim the next
_MAX_CHECKS: Final = 1 << 16  # batches waiting to be verified


@dataclass(eq=False, slots=True)
class LocalClaim(Claim):
    """A claim on this process's tiers: `Hierarchy` looks the blocks up, then `Promoter` loads the run.

    The run is the part of the chain that is worth loading. Its blocks in L2 are leased at once; those in a lower tier
    are read into L2 and leased as they land.
    """

    # during lookup
    questions: "Sequence[Question]" = ()  # queries to shared tiers, not read yet
    asked_until: int = 0  # leading blocks of the chain that shared tiers were queried about
    sealing: Sealing | None = None  # the store that will publish the first missing block
    patient_until: float = 0.0  # how long it waits for `sealing`, on the monotonic clock
    avoid: TierPort | None = None  # a read from it failed: the second lookup leaves it out

    # during promotion
    run: Sequence[ChainHash] = ()
    end: int = 0  # of the run; shrinks when a block cannot be loaded
    held: Sequence[ChainHash] = ()  # the part that `WaitedBlocks` counts: leased or waited for …
    held_slots: list[int] = field(init=False)  # … its leading blocks by slot …
    held_names: Sequence[ChainHash] = field(init=False)  # … and others by name; set once they are counted one by one
    polled_at: float = 0.0
    leases: tuple[Lease, ...] = ()
    done: bool = False  # the promise is settled: one lease, or none
    failed: TierPort | None = None  # the last tier from which a read failed

    # of a run that `Promoter.start` began
    run_parent: ChainHash = field(init=False)  # of run[0]
    next: int = field(init=False)  # first block of the run that is neither leased nor being read
    patience: float = field(init=False)  # seconds it waits for reads, once it has room
    room_until: float = field(init=False)  # how long it waits for room
    deadline: float = field(init=False)  # for reads, once it has room
    reads: "set[TierRead]" = field(init=False)
    checks: "set[HostCheck]" = field(init=False)  # blocks under check are not promised
    source: tuple[TierPort, int] | None = field(init=False)  # this tier has so many next blocks, L2 none of them
    position: dict[ChainHash, int] = field(init=False)  # block → index in the run; empty until one is read


@dataclass(eq=False, slots=True)
class TierRead(JoinedJob):
    """One read of consecutive blocks from a lower tier, with their reserved slots and the claims that wait for it.

    Small consecutive reads are joined to one call of the tier, so that all their blocks are in flight at once.
    """

    owner: "Promoter"
    port: TierPort
    reservation: Reservation
    positions: range  # into the reservation
    hashes: list[ChainHash]  # the blocks at these positions
    deadline: float
    waiters: set[LocalClaim] = field(default_factory=set)
    is_joined: bool = False  # to the call of an earlier read

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def run(self) -> Sequence[BlockRecord | Outcome]:
        return self.port.read(self.hashes, self._begin())

    def run_with(self, others: Sequence[JoinedJob]) -> list[Sequence[BlockRecord | Outcome]]:
        reads = [self, *(other for other in others if isinstance(other, TierRead))]
        for read in reads[1:]:
            read.is_joined = True
        slots = [slot for read in reads for slot in read._begin()]
        results = self.port.read([name for read in reads for name in read.hashes], slots)
        ends = [*accumulate(len(read.hashes) for read in reads)]
        return [results[end - len(read.hashes) : end] for read, end in zip(reads, ends, strict=True)]

    def _begin(self) -> list[memoryview]:
        """The slots to read into. Sets the deadline of the read itself, without the time in the queue."""
        self.deadline = self.owner.clock() + self.port.settings.deadline
        region = self.owner.host.region
        return [region.slot(slot) for slot in self.reservation.slots[self.positions.start : self.positions.stop]]

    def end(self, result: Sequence[BlockRecord | Outcome] | Outcome, *, late: bool) -> None:
        results = [result] * len(self.positions) if isinstance(result, Outcome) else result
        self.owner.landed(self, results, late=late)

    def overdue(self) -> None:
        if not self.is_joined:  # a joined call that hangs is one failure
            self.port.failed("read")
        self.owner.gave_up(self)


@dataclass(eq=False, slots=True)
class HostCheck(Job):
    """Verifies consecutive blocks in L2, under a lease of its own."""

    owner: "Promoter"
    claim: LocalClaim
    first: int  # index in the run of its first block
    lease: Lease
    deadline: float = math.inf

    def run(self) -> tuple[int, Outcome]:
        """Compare names and checksums, up to the first damaged block; returns how many are good."""
        host = self.owner.host
        for num_whole, (slot, chain_hash) in enumerate(zip(self.lease.slots, self.lease.hashes, strict=True)):
            if self not in self.claim.checks:  # the claim no longer waits for it
                return num_whole, Outcome.ABORTED
            record = host.records[slot]
            if record is None or record.chain_hash != chain_hash or record.checksum != checksum(host.region.slot(slot)):
                return num_whole, Outcome.CHECKSUM
        return len(self.lease), Outcome.OK

    def end(self, result: tuple[int, Outcome] | Outcome, *, late: bool) -> None:
        """Unverified blocks are not promised."""
        num_whole, outcome = (0, result) if isinstance(result, Outcome) else result
        self.owner.checked(self, num_whole, outcome)


class Promoter:
    """All promotions of one hierarchy: one read per block, windows of at most a quarter of L2 per request.

    Lock: `lock` (the hierarchy's) guards this bookkeeping; inside it the pool's, a port's, a queue's or a tier's index
    lock may be taken, never the other way round; never held across I/O.
    A request larger than the whole limit is loaded in pieces. The room for its next piece is reserved: the request may
    keep L1 from all others, so one that waited for L1 with that room would deadlock.
    Law (`check`): every read under way is in the index, every waiter of a read lists it; at idle there are none. A
    claim in the line has neither leases nor reads.
    """

    def __init__(
        self,
        host: HostTier,
        ports: Sequence[TierPort],
        lock: ProgressCondition,
        metrics: Metrics,
        clock: Callable[[], float],
        lease_deadline: float,
    ) -> None:
        self.host = host
        self._ports = ports
        self._lock, self._mutex = lock, lock.mutex
        self._lease_whole = host.pool.lease_whole
        self._metrics = metrics
        self.clock = clock
        self._lease_deadline = lease_deadline
        self._window = max(1, host.pool.num_slots // 4)
        self._max_waiting = max(1, host.pool.num_slots // 2)
        self._batch = max(1, BATCH_BYTES // host.region.slot_bytes)
        self._reads: dict[ChainHash, TierRead] = {}
        self._given_up: set[TierRead] = set()  # reads that hang; their slots are quarantined
        self.active: set[LocalClaim] = set()  # not yet taken or cancelled
        self._line: dict[LocalClaim, None] = {}  # of these: claims that wait for room, in order of arrival
        self._short: dict[LocalClaim, None] = {}  # of these: claims whose last read found no slot
        self._next_piece: tuple[ChainHash, int, float] | None = None  # its first block, room kept for it, until when
        self._waited = WaitedBlocks(host.pool.num_slots)  # blocks leased to or awaited by active claims
        self._checking = IoQueue("verify", 1, _MAX_CHECKS, clock) if host.verify else None

    # a claim's life

    def lease_whole(self, claim: LocalClaim, run: list[ChainHash]) -> list[int] | None:
        """Promise a whole run at once, if L2 has all of it and there is room. Else nothing changes.

        Returns L2's slots of the run's leading blocks, if it looked them up and did not promise.
        """
        if self._checking is not None:
            return None
        with self._mutex:
            is_next, most = False, self._max_waiting
            if self._next_piece is not None:
                is_next, most = self._is_next(run), self._most(run)
            if self._line and not is_next:
                return None
            lease: Lease | list[int] = self._lease_whole(run)
            if isinstance(lease, list):
                return lease
            if self._waited.at_most + len(run) > most and self._waited.room(run, lease.slots, most) < len(run):
                lease.release()
                return lease.slots
            if is_next:
                self._next_piece = None
            claim.run, claim.leases, claim.done, claim.polled_at = run, (lease,), True, self.clock()
            claim.end = claim.promised = len(run)
            self._waited.hold(claim, run, lease.slots)
            self.active.add(claim)
        return None

    def start(
        self,
        claim: LocalClaim,
        run: list[ChainHash],
        parent: ChainHash,
        places: list[int],
        source: tuple[TierPort, int] | None,
        patience: tuple[float, float],
    ) -> None:
        """Load a run of consecutive blocks. Waiting requests together may use half of L2.

        `places`: L2's slots of its leading blocks just now; `source`: the tier that had all others, if L2 had none.
        `patience`: seconds for reads, and before that for room. If other requests use the room, the claim waits in
        line; when that time is over it takes what room there is.
        """
        now = self.clock()
        with self._lock:
            claim.run, claim.run_parent, claim.end, claim.next = run, parent, len(run), 0
            claim.reads, claim.checks, claim.position, claim.source = set(), set(), {}, None
            claim.patience, for_room = patience
            claim.polled_at, claim.room_until = now, now + for_room
            self.active.add(claim)
            room, is_next = len(run), False
            if self._next_piece is not None or self._waited.at_most + room > self._max_waiting:
                room, is_next = self._waited.room(run, places, self._most(run)), self._is_next(run)
            if is_next:
                self._next_piece = None
            if for_room > 0 and ((self._line and not is_next) or room < min(claim.end, self._max_waiting)):
                self._line = {claim: None, **self._line} if is_next else {**self._line, claim: None}
                self._call_up()
            else:
                claim.source = source
                self._begin(claim, places, room)

    def poll(self, claim: LocalClaim) -> int | Pending:
        """How many leading blocks are in L2, verified and leased; PENDING while more may arrive before the deadline."""
        now = self.clock()
        with self._lock:
            claim.polled_at = now
            if claim in self._line:
                if now < claim.room_until:
                    return PENDING
                self._end_waiting(claim)
            if not claim.done and now >= claim.deadline:
                self._settle_late(claim)
            claim.is_reported = claim.done
            if not claim.done:
                return PENDING
            return len(claim.leases[0].hashes) if claim.leases else 0

    def lease(self, claim: Claim) -> Lease:
        """The lease of the promised blocks, once; then an empty one. The copy that follows releases it."""
        assert isinstance(claim, LocalClaim)
        with self._mutex:
            if self._line and claim in self._line:
                self._end_waiting(claim)
            if claim.run and not claim.done:
                self._settle_late(claim)
            leases, claim.leases = claim.leases, ()
            if claim in self.active:
                rest = len(claim.run) - self._max_waiting
                if rest > 0 and leases and len(leases[0]) == self._max_waiting:
                    until = self.clock() + min(claim.patience, _BETWEEN_PIECES)
                    self._next_piece = claim.run[self._max_waiting], min(rest, self._max_waiting), until
                if claim.held and not (self._line or self._short):  # `_leave`, without a call
                    self.active.remove(claim)
                    self._waited.drop(claim)
                else:
                    self._leave(claim)
            return leases[0] if leases else self.host.pool.lease([])

    def cancel(self, claim: LocalClaim) -> None:
        """Release the claim's blocks. Its reads under way continue. Idempotent."""
        with self._lock:
            if claim in self.active or claim.leases:
                if claim in self.active:
                    self._leave(claim)
                self._release(claim)

    def tick(self) -> None:
        """Retry waiting claims; expire promises not polled for `lease_deadline` seconds (no copy uses them)."""
        now = self.clock()
        with self._lock:
            short, self._short = self._short, {}
            if self._line:
                self._call_up()
            for claim in short:
                self._advance(claim)
                if claim.done:
                    self._lock.notify_all()
            for claim in [each for each in self.active if now - each.polled_at >= self._lease_deadline]:
                self._metrics.missed(Outcome.TIMEOUT, claim.end)
                self._release(claim)
                claim.end = 0
                self._leave(claim)
                self._lock.notify_all()

    @property
    def idle(self) -> bool:
        is_checking = self._checking is not None and not self._checking.idle
        return not (self.active or self._reads or self._given_up or is_checking)

    def has_progress(self) -> bool:
        """Whether a claim has an answer that no poll has returned. The caller holds the lock."""
        return any(claim.done and not claim.is_reported for claim in self.active)

    def check(self) -> None:
        with self._lock:
            for chain_hash, read in self._reads.items():
                if read in self._given_up or chain_hash not in read.hashes:
                    raise AssertionError(f"the index of reads names one that does not read {chain_hash.hex()[:16]}")
                if any(read not in waiter.reads for waiter in read.waiters):
                    raise AssertionError("a waiter does not list its read")
            if any(claim not in self.active or claim.leases or claim.reads or claim.held for claim in self._line):
                raise AssertionError("a claim in the line has leases or reads")
            self._waited.check()
            if not self.active and len(self._waited):
                raise AssertionError(f"no claim is active, but {len(self._waited)} blocks are counted as waited for")

    def close(self, timeout: float) -> None:
        """Stop verification: blocks that wait for it are misses."""
        if self._checking is not None:
            self._checking.close(timeout)

    # reports of I/O threads

    def landed(self, read: TierRead, results: Sequence[BlockRecord | Outcome], *, late: bool) -> None:
        """A read ended: seal good blocks, lease them to every live waiter, free the other slots."""
        pool = self.host.pool
        with self._lock:
            if late:
                self._given_up.discard(read)
                pool.settle(read.reservation, read.positions)
                self._lock.notify_all()
                return
            for chain_hash in read.hashes:
                del self._reads[chain_hash]
            records = {
                at: result for at, result in zip(read.positions, results, strict=True) if type(result) is BlockRecord
            }
            self.host.describe([read.reservation.slots[at] for at in records], list(records.values()))
            lease = pool.seal(read.reservation, list(records))
            try:
                if len(records) < len(results):
                    pool.abandon(read.reservation, [at for at in read.positions if at not in records])
                self._notify_waiters(read, results)
            finally:
                lease.release()

    def gave_up(self, read: TierRead) -> None:
        """A read hangs past its deadline: its waiters go on without it, and its slots are quarantined until it ends."""
        with self._lock:
            self._given_up.add(read)
            for chain_hash in read.hashes:
                del self._reads[chain_hash]
            self.host.pool.quarantine(read.reservation, read.positions)
            self._notify_waiters(read, [Outcome.TIMEOUT] * len(read.positions))

    def checked(self, check: HostCheck, num_whole: int, outcome: Outcome) -> None:
        """Blocks in L2 were verified: a damaged one is evicted and ends the run."""
        claim, name = check.claim, check.lease.hashes[num_whole : num_whole + 1]
        with self._lock:
            if outcome is Outcome.CHECKSUM:
                self._metrics.corrupted(L2, 1)
                self.host.pool.evict(name, Outcome.CHECKSUM)
            check.lease.release()
            if check in claim.checks:
                claim.checks.discard(check)
                if name:
                    self._shorten(claim, check.first + num_whole, outcome)
                self._advance(claim)
                self._lock.notify_all()

    # bookkeeping, under the lock

    def _leave(self, claim: LocalClaim) -> None:
        """Remove an active claim."""
        self.active.remove(claim)
        if self._line or self._short:
            self._line.pop(claim, None)
            self._short.pop(claim, None)
        if claim.held:
            self._waited.drop(claim)
        if self._line:
            self._call_up()

    def _call_up(self) -> None:
        """Start the claims in the line, oldest first, until one does not get the room it needs."""
        while claim := next(iter(self._line), None):
            places = self.host.pool.places(claim.run)
            room = self._waited.room(claim.run, places, self._most(claim.run))
            if room < min(claim.end, self._max_waiting):  # it waits for no more than the limit
                return
            del self._line[claim]
            self._begin(claim, places, room)
            self._lock.notify_all()

    def _end_waiting(self, claim: LocalClaim) -> None:
        """Take a claim out of the line; it gets what room there is."""
        del self._line[claim]
        places = self.host.pool.places(claim.run)
        self._begin(claim, places, self._waited.room(claim.run, places, self._most(claim.run)))

    def _is_next(self, run: Sequence[ChainHash]) -> bool:
        """Whether the run is the next piece of the request that took one."""
        return self._next_piece is not None and run[0] == self._next_piece[0]

    def _most(self, run: Sequence[ChainHash]) -> int:
        """How many blocks waiting requests may use together, including this one."""
        if self._next_piece is None or self._is_next(run):
            return self._max_waiting
        _, room, until = self._next_piece
        if self.clock() >= until:  # that request was aborted, or its blocks were evicted
            self._next_piece, room = None, 0
        return self._max_waiting - room

    def _begin(self, claim: LocalClaim, places: list[int], room: int) -> None:
        """Count what there is `room` for, lease what L2 has of it, and read the rest."""
        run = claim.run
        claim.deadline = self.clock() + claim.patience
        if not room:
            claim.refusal, claim.end, claim.done = Outcome.NO_SLOT, 0, True
            return
        if room < claim.end:
            self._shorten(claim, room, Outcome.NO_SLOT)
        wanted = run if claim.end == len(run) else run[: claim.end]
        if not (num_held := len(places)):
            self._waited.hold(claim, wanted, [])
            self._advance(claim)
            return
        first = self.host.pool.lease(wanted[:num_held])
        self._waited.hold(claim, wanted, first.slots)
        if self._checking is None and len(first.slots) == claim.end:  # L2 has all of it
            claim.leases = (first,)
            claim.next, claim.done = claim.end, True
            return
        claim.source = claim.source if len(first.slots) == num_held else None
        self._take(claim, first)
        self._advance(claim)

    def _release(self, claim: LocalClaim) -> None:
        """Release everything that was being read or leased."""
        self._finish(claim)
        for lease in claim.leases:
            lease.release()
        claim.leases = ()

    def _settle_late(self, claim: LocalClaim) -> None:
        """Out of time: promise the blocks that have arrived."""
        reason = Outcome.NO_SLOT if claim in self._short else Outcome.TIMEOUT
        self._shorten(claim, 0, reason, keep_arrived=True)
        self._finish(claim)

    def _notify_waiters(self, read: TierRead, results: Sequence[BlockRecord | Outcome]) -> None:
        """Lease what landed to each waiter, up to its first hole; that waiter's run ends there.

        After a timeout of a shared tier it is read again, as long as computing would take longer than waiting has: a
        server on a busy or throttled machine answers late now and then.
        """
        hashes, num_hashes = read.hashes, len(read.hashes)
        for waiter in read.waiters:
            waiter.reads.discard(read)
            if waiter.trace is not None:
                self._trace_read(read, results, waiter.trace)
            position = waiter.position
            first = next((i for i, chain_hash in enumerate(hashes) if chain_hash in position), num_hashes)
            whole = next((i for i in range(first, num_hashes) if not isinstance(results[i], BlockRecord)), num_hashes)
            if wanted := [chain_hash for chain_hash in hashes[first:whole] if chain_hash in position]:
                waiter.leases += (self.host.pool.lease(wanted),)
            if whole == num_hashes or hashes[whole] not in position:
                continue
            outcome, waiter.failed = results[whole], read.port
            assert isinstance(outcome, Outcome)
            may_retry = outcome is Outcome.TIMEOUT and read.port.is_shared and read.port.readable() is not None
            if may_retry and self.clock() < waiter.room_until:
                waiter.next = min(waiter.next, position[hashes[whole]])
            else:
                self._shorten(waiter, position[hashes[whole]], outcome)
        for waiter in read.waiters:
            self._advance(waiter)
        read.waiters.clear()
        self._lock.notify_all()

    def _trace_read(self, read: TierRead, results: Sequence[BlockRecord | Outcome], trace: tracing.Trace) -> None:
        failed = [each for each in results if isinstance(each, Outcome)]
        name, num_bytes = read.port.name, (len(results) - len(failed)) * self.host.region.slot_bytes
        counts = {"blocks": len(results), "bytes": num_bytes, **tracing.outcomes_in(failed)}
        trace.record(f"read {name}", read.deadline - read.port.settings.deadline, counts)

    def _advance(self, claim: LocalClaim) -> None:
        """Lease, join or launch until the window is full or the run ends; finish if no read or check is under way."""
        on_the_way = sum(len(read.positions) for read in claim.reads)
        size = _FIRST_LEASE
        while not claim.done and claim.next < claim.end:
            if on_the_way >= self._window:
                return
            start = claim.next
            rest = claim.run[start : min(claim.end, start + self._window - on_the_way)]
            source, claim.source = claim.source, None
            num_leased = 0 if source is not None else self._take(claim, self.host.pool.lease(rest[:size]))
            if num_leased:
                size = 2 * size if num_leased == size else _FIRST_LEASE
            elif read := self._reads.get(rest[0]):
                self._join(claim, read, rest)
                on_the_way += len(read.positions)
            else:
                reason = self._launch(claim, rest, source)
                on_the_way += claim.next - start
                if reason is Outcome.NO_SLOT and self.clock() < claim.room_until:
                    self._short[claim] = None  # slots become free as copies and stores end
                    return
                if reason:
                    self._shorten(claim, claim.next, reason)
        if not claim.reads and not claim.checks:
            self._finish(claim)

    def _take(self, claim: LocalClaim, lease: Lease) -> int:
        """Add a lease on the run's next blocks. Returns how many."""
        if not len(lease):
            return 0
        claim.leases += (lease,)
        start, claim.next = claim.next, claim.next + len(lease)
        if self._checking is not None:
            self._check(claim, start, lease, self._checking)
        return len(lease)

    def _check(self, claim: LocalClaim, start: int, lease: Lease, queue: IoQueue) -> None:
        """Verify leased blocks of L2, starting with the run's block `start`."""
        for first in range(0, len(lease), self._batch):
            at = slice(first, first + self._batch)
            slots, checked = lease.slots[at], self.host.pool.lease(lease.hashes[at])
            if checked.slots != slots[: len(checked)]:  # stored anew meanwhile: not the slots that the claim leased
                checked.release()
                checked = self.host.pool.lease([])
            if len(checked):
                check = HostCheck(self, claim, start + first, checked)
                claim.checks.add(check)
                if not queue.submit(check):
                    checked.release()
                    claim.checks.discard(check)
                    self._shorten(claim, start + first, Outcome.QUEUE_FULL)
                    return
            if len(checked) < len(slots):  # evicted since it was leased, as a damaged one is
                self._shorten(claim, start + first + len(checked), Outcome.EVICTED)
                return

    def _missing_run(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks L2 lacks, in time proportional to that. The first one is known to be missing."""
        first, size = 1, 64
        while first < len(hashes):
            present = self.host.pool.holds(hashes[first : first + size])
            if True in present:
                return first + present.index(True)
            first, size = first + size, 2 * size
        return len(hashes)

    def _join(self, claim: LocalClaim, read: TierRead, rest: Sequence[ChainHash]) -> None:
        read.waiters.add(claim)
        claim.reads.add(read)
        claim.position = claim.position or {chain_hash: i for i, chain_hash in enumerate(claim.run)}
        ahead = read.hashes[read.hashes.index(rest[0]) :]
        claim.next += sum(1 for a, b in zip(ahead, rest, strict=False) if a == b)

    def _launch(
        self, claim: LocalClaim, rest: Sequence[ChainHash], source: tuple[TierPort, int] | None
    ) -> Outcome | None:
        """Start reading the leading blocks of `rest` from the first tier that has them, or return why not."""
        pool = self.host.pool
        if source is None:
            rest = rest[: self._missing_run(rest)]
            source = next(((p, n) for p in self._ports if p is not claim.avoid and (n := p.lookup(rest))), None)
            if source is None:
                return Outcome.EVICTED
        port, num_found = source
        rest = rest[: next((i for i, h in enumerate(rest[:num_found]) if h in self._reads), num_found)]
        parent = claim.run[claim.next - 1] if claim.next else claim.run_parent
        after = claim.next + len(rest)
        behind = [h for h in claim.run[after : after + 1] if pool.holds([h])[0]]
        reservation = pool.reserve([*rest, *behind], parent)  # links the block after the gap to its parent again
        if reservation is None:  # perhaps only its own ancestors could be evicted
            reservation = pool.reserve(rest, None)
        while reservation is None and len(rest) > 1:  # the head matters more than the end
            rest = rest[: len(rest) // 2]
            reservation = pool.reserve(rest, parent)
        if reservation is None:
            return Outcome.NO_SLOT
        run = next((i for i, index in enumerate(reservation.indices) if index != i), len(reservation.indices))
        if run < len(reservation.indices):
            pool.abandon(reservation, range(run, len(reservation.indices)))
        if not run:  # a store of the first one is under way or just ended
            return None if pool.lookup(rest[:1]) else Outcome.NO_SLOT
        deadline = self.clock() + port.settings.deadline
        claim.position = claim.position or {chain_hash: i for i, chain_hash in enumerate(claim.run)}
        for first in range(0, run, self._batch):
            positions = range(first, min(run, first + self._batch))
            names = reservation.hashes[positions.start : positions.stop]
            read = TierRead(self, port, reservation, positions, names, deadline)
            if not port.queue.submit(read, urgent=True):
                pool.abandon(reservation, range(first, run))
                return Outcome.QUEUE_FULL
            self._reads.update(dict.fromkeys(names, read))
            read.waiters.add(claim)
            claim.reads.add(read)
            claim.next += len(positions)
        return None

    def _shorten(self, claim: LocalClaim, end: int, reason: Outcome, *, keep_arrived: bool = False) -> None:
        """The run ends at block `end` (with `keep_arrived`: after the blocks that have arrived)."""
        if keep_arrived:
            end = self.host.pool.lookup(claim.run[: claim.end])
            if self._checking is not None:  # blocks that were stored meanwhile are not verified
                end = min([end, claim.next, *(check.first for check in claim.checks)])
        if end < claim.end:
            self._metrics.missed(reason, claim.end - end)
            claim.end, claim.next = end, min(claim.next, end)
            claim.checks = {check for check in claim.checks if check.first < end}
            for read in [f for f in claim.reads if self._first_wanted(claim, f) >= end]:
                read.waiters.discard(claim)  # none of its blocks can be used
                claim.reads.discard(read)

    @staticmethod
    def _first_wanted(claim: LocalClaim, read: TierRead) -> int:
        return next((i for h in read.hashes if (i := claim.position.get(h)) is not None), claim.end)

    def _finish(self, claim: LocalClaim) -> None:
        """Settle the promise: the leased leading run, under one lease; release everything beyond it."""
        if claim.done:
            return
        claim.done = True
        for read in claim.reads:
            read.waiters.discard(claim)
        claim.reads.clear()
        claim.checks.clear()
        if [len(lease.hashes) for lease in claim.leases] != [claim.end]:  # else one lease has all of it
            lease = self.host.pool.lease(claim.run[: claim.end])
            for piece in claim.leases:
                piece.release()
            claim.leases = (lease,)
            claim.end = len(lease.hashes)


class WaitedBlocks:
    """Counts the distinct blocks of waiting requests: by slot if L2 has them, since a name costs ten times as much.

    Takes no lock. Nothing is counted block by block while all requests fit even if they shared none. A block is counted
    by name if it was not in L2 when first waited for, even after it arrives. One in L2 after one that is not may be
    counted twice: then waiting requests get less room, never more.
    """

    def __init__(self, num_slots: int) -> None:
        self._by_slot = make_slot_counts(num_slots)
        self._by_name: Counter[ChainHash] = Counter()
        self._uncounted: dict[LocalClaim, None] = {}  # in order of arrival; blocks they share count several times
        self.at_most = 0  # upper bound of `len`: shared blocks count several times until counted one by one

    def __len__(self) -> int:
        """Distinct blocks."""
        self._count_all()
        return self._by_slot.num_slots + len(self._by_name)

    def room(self, run: Sequence[ChainHash], slots: list[int], most: int) -> int:
        """How many leading blocks of a run fit, if all requests may use `most`. `slots`: of its leading blocks."""
        if self.at_most + len(run) <= most:
            return len(run)
        room = most - len(self)
        return len(run) if room >= len(run) else self._by_slot.fitting(run, slots, self._by_name, room)

    def hold(self, claim: LocalClaim, run: Sequence[ChainHash], slots: list[int]) -> None:
        """Add a request's run; `slots`: of its leading blocks."""
        claim.held, claim.held_slots = run, slots
        self._uncounted[claim] = None
        self.at_most += len(run)

    def drop(self, claim: LocalClaim) -> None:
        """Remove a request's run."""
        if claim in self._uncounted:
            del self._uncounted[claim]
            self.at_most -= len(claim.held)
            return
        names, by_slot = self._by_name, self._by_slot
        self.at_most -= by_slot.num_slots + len(names)
        by_slot.remove(claim.held_slots)
        left = list(map(names.pop, claim.held_names, repeat(0)))  # in C
        if sum(left) > len(left):  # usually no other request has any
            names.update({h: count - 1 for h, count in zip(claim.held_names, left, strict=True) if count > 1})
        self.at_most += by_slot.num_slots + len(names)

    def check(self) -> None:
        """Raise AssertionError if the counts are inconsistent."""
        num_uncounted, by_slot = sum(len(each.held) for each in self._uncounted), self._by_slot
        assert self.at_most == num_uncounted + by_slot.num_slots + len(self._by_name), "blocks at most"
        assert by_slot.num_slots == (by_slot.counts > 0).sum(), "slots in use"
        assert (by_slot.counts >= 0).all(), "a negative count"
        assert all(count > 0 for count in self._by_name.values()), "a name with no request"

    def _count_all(self) -> None:
        """Count block by block the runs that are not counted yet."""
        for claim in self._uncounted:
            run, slots = claim.held, claim.held_slots
            names = run[len(slots) :]
            if self._by_name and not self._by_name.keys().isdisjoint(run[: len(slots)]):
                known = [name in self._by_name for name in run[: len(slots)]]
                names = [*(name for name, is_known in zip(run, known, strict=False) if is_known), *names]
                slots = claim.held_slots = [slot for slot, is_known in zip(slots, known, strict=True) if not is_known]
            self._by_slot.add(slots)
            self._by_name.update(names)
            claim.held_names = names
        self._uncounted.clear()
        self.at_most = self._by_slot.num_slots + len(self._by_name)


@dataclass(eq=False, slots=True)
class Question:
    """A query under way: how many leading blocks of a chain does a shared tier have? Implements `Job`."""

    owner: "Locator"
    port: TierPort
    hashes: list[ChainHash]
    deadline: float
    done: bool = False  # answered or timed out; the port's `lookup` has the result
    num_held: int = 0
    num_asking: int = 0  # callers that have not read the answer yet

    def run(self) -> int | Outcome:
        return self.port.locate(self.hashes)

    def end(self, result: int | Outcome, *, late: bool) -> None:
        if not late:
            self.owner.answered(self, result)

    def overdue(self) -> None:
        self.port.failed("read")
        self.owner.answered(self, Outcome.TIMEOUT)


class Locator:
    """All queries of one hierarchy; two about the same blocks are joined.

    Lock: `news` (the hierarchy's), never held across I/O. Law (`check`): the index has only unanswered queries.
    """

    def __init__(self, ports: Sequence[TierPort], news: ProgressCondition, clock: Callable[[], float]) -> None:
        self._ports = ports
        self._news = news
        self._clock = clock
        self._open: dict[tuple[str, ChainHash], Question] = {}  # (tier, first block) → the query
        self.unread: set[Question] = set()  # answered, but not read yet

    def ask(self, hashes: Sequence[ChainHash], avoid: TierPort | None = None) -> list[Question]:
        """Query every shared tier that answers, but `avoid`, about these blocks, which no index has."""
        questions = []
        for port in self._ports:
            if port is avoid or not (port.locates and hashes):
                continue
            with self._news:
                question = self._open.get((port.name, hashes[0]))
                if question is not None and question.hashes == list(hashes[: len(question.hashes)]):
                    question.num_asking += 1
                    questions.append(question)
                    continue
                deadline = self._clock() + port.settings.deadline
                question = Question(self, port, list(hashes[:_MOST]), deadline, num_asking=1)
                self._open[port.name, hashes[0]] = question
            if port.queue.submit(question, urgent=True):
                questions.append(question)
            else:
                self.read([question])
                question.end(Outcome.QUEUE_FULL, late=False)
        return questions

    def answered(self, question: Question, result: int | Outcome) -> None:
        """Called on an I/O thread, or by the tick that finds the deadline passed."""
        with self._news:
            question.done = True
            question.num_held = result if not isinstance(result, Outcome) else 0
            if question.num_asking > 0:
                self.unread.add(question)
            if self._open.get((question.port.name, question.hashes[0])) is question:
                del self._open[question.port.name, question.hashes[0]]
            self._news.notify_all()

    def read(self, questions: Sequence[Question]) -> None:
        """The caller has read these answers or no longer needs them; called once for each `ask`."""
        with self._news:
            for question in questions:
                question.num_asking -= 1
            self.unread.difference_update(questions)

    def check(self) -> None:
        with self._news:
            if any(question.done for question in self._open.values()):
                raise AssertionError("the index of queries has an answered one")

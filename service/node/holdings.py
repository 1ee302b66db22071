"""What one client of the daemon holds: buffers, the processes that copy for it, claims, leases and reservations."""

import ctypes
import itertools
import os
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvtier.connector.daemon import Peer, pidfd_of, wire
from kvtier.service.node.loop import Loop, now
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers import L2, FormatError, Outcome, tracing
from kvtier.tiers.hierarchy import PENDING, Attribution, Claim, Filled, Wanted, end_lookup
from kvtier.tiers.pool import Lease, Reservation

Who = TypeVar("Who")

MAX_BUFFERED: Final = 64 << 20  # bytes of frames not whole yet and of answers not read yet, over all clients
MAX_PROCESSES: Final = 256  # that copy for one client
MAX_HELD: Final = 8192  # claims and leases of one client
MAX_RESERVATIONS: Final = 8192  # of one client, open at once
_MAX_UNREAD: Final = 512 << 10  # bytes that a client has not read: above that its other claims are not answered
_CLIENTS: Final = itertools.count(1)  # their numbers in hints' accounts
_TENANTS: Final = 16  # accounts of one client; tenants beyond share one by their number


class Buffers(Generic[Who]):
    """The bytes that each client keeps the daemon from freeing. Lives on the loop's thread.

    Past `limit`, `cut` disconnects the client with most, until the rest fits; of equals the least recently recorded.
    So a client within its equal share of the limit is never cut off, whatever the others do, and none waits.
    """

    def __init__(self, cut: Callable[[Who], None], limit: int = MAX_BUFFERED) -> None:
        self._cut, self.limit = cut, limit
        self.used = 0  # bytes
        self._kept: dict[Who, int] = {}

    def record(self, who: Who, num_bytes: int) -> None:
        """The client now keeps so many bytes; 0 removes it. May cut off any client, this one too."""
        self.used += num_bytes - self._kept.pop(who, 0)
        if num_bytes:
            self._kept[who] = num_bytes
        while self.used > self.limit:
            self._cut(max(self._kept, key=self._kept.__getitem__))

    def check(self) -> None:
        """Raise AssertionError if the sum is not that of the parts, or exceeds the limit."""
        assert self.used == sum(self._kept.values()) <= self.limit, f"{self.used} bytes kept, {self.limit} at most"


def return_freed_memory() -> None:
    """Give memory that is free in this process back to the system; some milliseconds for 100 MB of it.

    glibc keeps freed pieces up to the largest one seen (malloc_trim(3)). So buffers of clients that were cut off stayed
    with the process, beyond the bound.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps no large pieces
    if trim is not None:
        trim(0)


class ClientProcesses:
    """The processes that copy for one client. Lives on the loop's thread. True while one of them lives."""

    def __init__(self, loop: Loop, all_ended: Callable[[], None]) -> None:
        self._loop, self._all_ended = loop, all_ended
        # By pidfd: the pid, and the pidfd's inode (one for all before Linux 6.9), since pids are used again.
        self._live: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def pids(self) -> list[int]:
        """The live ones; 0 for one in a pid namespace that this process does not see."""
        return sorted({pid for pid, _ in self._live.values()})

    def watch(self, connection: socket.socket, peer: Peer) -> int:
        """Watch the process that connected; returns its pidfd's inode, which identifies it. OSError."""
        fd = pidfd_of(connection, peer)
        process = os.fstat(fd).st_ino
        if peer.pid and (peer.pid, process) in self._live.values():
            os.close(fd)
        elif len(self._live) >= MAX_PROCESSES:
            os.close(fd)
            raise OSError(f"more than {MAX_PROCESSES} processes")
        else:
            self._live[fd] = peer.pid, process
            self._loop.watch(fd, lambda events: self._ended(fd))
        return process

    def forget(self) -> None:
        for fd in self._live:
            self._loop.forget(fd)
            os.close(fd)
        self._live.clear()

    def _ended(self, fd: int) -> None:
        self._loop.forget(fd)
        os.close(fd)
        del self._live[fd]
        if not self._live:
            self._all_ended()


class HeldCounts(NamedTuple):
    claims: int
    leases: int
    reservations: int
    preallocated: int  # slots


class Holdings:
    """One client's claims, leases and reservations, by the client's numbers; unknown numbers are ignored."""

    def __init__(self, tiers: ServedTiers, block_size: int, deadline: float, version: int, takes_parts: bool) -> None:
        """`version`: the client's protocol version. `takes_parts`: it wants to know children."""
        self._tiers = tiers
        self._hierarchy = tiers.hierarchy
        self._token_bytes = 4 * block_size  # that a block can have
        self._lease_deadline = deadline
        self._version, self._takes_parts = version, takes_parts
        self._claims: dict[int, Claim] = {}
        self._renewed: dict[int, float] = {}  # claim answered → when the client last renewed it
        self.waiting: dict[int, Claim] = {}  # those of the claims that have no answer yet
        self.news: list[wire.News] = []  # answers of claims; the sender empties it
        self.num_unread = 0  # bytes of `news`, and of what the client has not read; the sender sets it
        self.waits_for_reader = False  # some of the claims; the sender looks again, and unsets it
        self._client = next(_CLIENTS)  # this client's number in hints' accounts
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self.sealed: list[Filled] = []  # not passed on yet
        self._preallocated: dict[int, int] = {}  # slot → generation
        self._preallocated_at, self._round = 0.0, 0  # renewed last; of `Preallocate`
        self._spare: dict[int, tuple[int, int]] = {}  # reservations of blocks not to be stored → slot, generation
        self.granted: wire.Preallocated | None = None  # the sender empties it
        self.traces: dict[int, str] = {}  # of claims and reservations that are coming
        self.verbs: dict[type[wire.Operation], Callable[[Any], Any]] = {
            wire.Ask: self._ask,
            wire.Renew: self._renew,
            wire.Cancel: self._cancel,
            wire.Take: lambda op: self.take([op]),
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.ReserveAt: self._reserve_at,
            wire.Preallocate: self._preallocate,
            wire.Offer: lambda op: (self._reserve(op), self._tiers.is_short),
            wire.Seal: self._seal,
            wire.Abandon: self._abandon,
            wire.Computed: lambda op: self._hierarchy.computed(op.num_tokens, op.seconds, op.position),
            wire.Holds: lambda op: bytes(self._hierarchy.holds(wire.unpack_hashes(op.hashes))),
            wire.RequestEnded: self._request_ended,
        }
        """The handler of each operation; it returns an answer or None."""

    @property
    def counts(self) -> HeldCounts:
        num_reservations = len(self._reservations) + len(self._spare)
        return HeldCounts(len(self._claims), len(self._leases), num_reservations, len(self._preallocated))

    def look(self) -> None:
        for number in list(self.waiting):
            if self.num_unread >= _MAX_UNREAD:
                self.waits_for_reader = True
                return
            self._look(number)

    def publish(self) -> None:
        """Seal what clients have filled. After the answers, since hashing takes the GIL while clients wait for them."""
        sealed, self.sealed = self.sealed, []
        self._hierarchy.seal_each(sealed)

    def expire(self, at: float) -> int:
        """Cancel promises not renewed within the lease deadline; returns how many. First read all that was sent.

        Preallocated slots not renewed within it are freed, which ends their round.
        """
        if self._preallocated and at - self._preallocated_at >= self._lease_deadline:
            self._deallocate()
            self._round += 1
        late = [number for number, since in self._renewed.items() if at - since >= self._lease_deadline]
        for number in late:
            self._drop(number)
        return len(late)

    def may_expire(self, at: float) -> bool:
        since = [self._preallocated_at, *self._renewed.values()] if self._preallocated else self._renewed.values()
        return any(at - each >= self._lease_deadline for each in since)

    def drop_claims(self, *, may_be_taken: bool = False) -> None:
        """The client has disconnected: cancel what it was promised and has not taken; no copy was planned for it.

        `may_be_taken`: a `Take` may be unread, and its copy under way. So promises become leases.
        """
        if may_be_taken:
            for number in self._renewed:
                self._leases[number] = self._hierarchy.lease(self._claims.pop(number))
            self._renewed.clear()
        for number in list(self._claims):
            self._drop(number)

    def release_all(self) -> HeldCounts:
        self.publish()
        counts = self.counts
        self.drop_claims()
        for lease in self._leases.values():
            lease.release()
        for reservation in self._reservations.values():
            self._hierarchy.abandon(reservation, Outcome.ABORTED)
        self._preallocated |= dict(self._spare.values())
        self._spare.clear()
        self._deallocate()
        self._leases.clear()
        self._reservations.clear()
        return counts

    def _ask(self, op: wire.Ask) -> None:
        number, names = op.claim, wire.unpack_hashes(op.hashes)
        if number in self._claims or number in self._leases:
            raise FormatError(f"claim {number} is there already")
        if op.num_l1 > len(names):
            raise FormatError(f"claim {number}: L1 has {op.num_l1} of {len(names)} blocks")
        if len(self._claims) + len(self._leases) >= MAX_HELD:
            nothing = Attribution(len(names), l1=op.num_l1, miss=len(names) - op.num_l1)
            self._hierarchy.metrics.missed(Outcome.QUEUE_FULL, nothing.miss)
            found = wire.pack_found(nothing, self._version)
            self.news.append(wire.News(number, found, Outcome.NO_SLOT, 0.0, b"", b"", (), None))
            return
        if len(set(names)) < len(names):
            raise FormatError(f"claim {number} names a block twice")
        if self.sealed:
            self.publish()  # the claim may name what was sealed just before
        trace = self._begin_lookup(number, len(names)) if self.traces else None
        claim = self._hierarchy.submit(
            names, op.parent, op.num_l1, block_size=op.block_size, overlap=op.overlap, trace=trace
        )
        self._claims[number] = self.waiting[number] = claim
        if self.num_unread < _MAX_UNREAD:
            self._look(number)
        else:
            self.waits_for_reader = True

    def expect(self, traces: wire.Traces) -> None:
        """What a request's operations belong to, if this daemon traces, too."""
        if tracing.ON:
            self.traces = {**self.traces, **dict(traces)} if len(self.traces) < MAX_HELD else dict(traces)

    def _begin_lookup(self, number: int, num_blocks: int) -> tracing.Trace | None:
        if (traceparent := self.traces.pop(number, None)) is None:
            return None
        return tracing.begin("lookup", traceparent, "server", {"blocks": num_blocks})

    def _look(self, number: int) -> None:
        claim = self.waiting[number]
        promised = self._tiers.poll(claim)
        if promised is PENDING:
            return
        assert claim.found is not None
        del self.waiting[number]
        if claim.trace is not None:
            end_lookup(claim, promised)
        at, slots, generations = now(), b"", b""
        if promised and (lease := self._hierarchy.promised(claim)) is not None:
            self._renewed[number] = at
            slots, generations = array("q", lease.slots).tobytes(), array("q", lease.generations).tobytes()
        else:
            del self._claims[number]
            self._hierarchy.cancel(claim)
        found, good_for = wire.pack_found(claim.found, self._version), max(0.0, claim.good_until - at)
        children = claim.children if self._takes_parts else ()
        news = wire.News(number, found, claim.refusal, good_for, slots, generations, children, claim.split)
        self.news.append(news)
        self.num_unread += len(slots) + len(generations)

    def _renew(self, op: wire.Renew) -> None:
        self._renewed |= dict.fromkeys(self._renewed.keys() & op.claims, now())

    def _cancel(self, op: wire.Cancel) -> None:
        for number in op.claims:
            self._drop(number)

    def take(self, operations: Sequence[wire.Take]) -> None:
        for number in [number for each in operations for number in each.claims]:
            if self._renewed.pop(number, None) is not None:
                self._leases[number] = self._tiers.lease(self._claims.pop(number))  # nothing is left to cancel

    def _release(self, op: wire.Release) -> None:
        for number in op.leases:
            if (lease := self._leases.pop(number, None)) is not None:
                lease.release()

    def _drop(self, number: int) -> None:
        if (claim := self._claims.pop(number, None)) is not None:
            self.waiting.pop(number, None)
            self._renewed.pop(number, None)
            self._hierarchy.cancel(claim)
            if claim.trace is not None:
                claim.trace.end()

    def _reserve(self, op: wire.Reserve) -> wire.Grants:
        self._tiers.is_short, wanted = False, self._wanted(op)
        lengths = [len(each.hashes) for each in wanted]
        if len(lengths) > self._num_free or max(lengths, default=0) > wire.MAX_ITEMS:
            self._hierarchy.metrics.dropped(L2, Outcome.QUEUE_FULL, sum(lengths))
            return wire.pack_grants([None] * len(lengths))
        try:
            reservations = self._tiers.reserve(wanted, may_retry=isinstance(op, wire.Offer))
        except ValueError as error:  # a name given twice; the slots reserved before are abandoned
            raise FormatError(str(error)) from None
        if self._tiers.is_short and isinstance(op, wire.Offer) and not op.keeps:
            ends = [0 if each is None else each.indices[-1] + 1 if each.indices else -1 for each in reservations]
            num_lost = sum([length - end for length, end in zip(lengths, ends, strict=True) if end >= 0])
            self._hierarchy.metrics.dropped(L2, Outcome.NO_SLOT, num_lost)
        for number, reservation in enumerate(reservations, op.first):
            if reservation is not None and reservation.hashes:
                self._reservations[number] = reservation
        return wire.pack_grants(
            [None if each is None else (each.indices, each.slots, each.generations) for each in reservations]
        )

    def _wanted(self, op: wire.Reserve) -> list[Wanted]:
        """The stores, with their traces. FormatError."""
        wanted = op.wanted()
        numbers = range(op.first, op.first + len(wanted))
        if not (self._reservations.keys().isdisjoint(numbers) and self._spare.keys().isdisjoint(numbers)):
            raise FormatError(f"a reservation from {op.first} on is there already")
        if op.partial and any([len(wanted[i].hashes) != 1 for i in op.partial]):
            raise FormatError("reserve: a partial block is one block")
        if self.traces:
            for number, each in zip(numbers, wanted, strict=True):
                if (traceparent := self.traces.pop(number, None)) is not None:
                    each.trace = tracing.Trace(traceparent)
        return wanted

    def _preallocate(self, op: wire.Preallocate) -> None:
        """Allocate up to the limit, and renew what this client has. Slots in use never come here: see `_reserve_at`.

        A later round frees what is left of those before. One that has ended gets no answer: its client was stopped, and
        would take slots for renewed that have lapsed.
        """
        if op.round > self._round:
            self._deallocate()
            self._round = op.round
        if op.round < self._round or not op.most:
            return
        most = min(op.most, self._hierarchy.num_slots // wire.CLIENT_SHARE) - len(self._preallocated)
        slots, generations = self._tiers.preallocate(max(0, min(most, self._num_free)))
        self._preallocated.update(zip(slots, generations, strict=True))
        self._preallocated_at = now()
        self.granted = op.round, op.at, array("q", slots).tobytes(), array("q", generations).tobytes()

    @property
    def _num_free(self) -> int:
        """How many reservations more this client may have."""
        return MAX_RESERVATIONS - sum(self.counts[2:])

    def _deallocate(self) -> None:
        slots, self._preallocated = self._preallocated, {}
        self._hierarchy.deallocate(list(slots), list(slots.values()))

    def _reserve_at(self, op: wire.ReserveAt) -> None:
        """A late client may name slots that it has no more: those stores are ignored, as their seals will be."""
        wanted, slots = self._wanted(op.stores), wire.unpack_numbers(op.slots, 1 << 62)
        if not len(slots) == len(set(slots)) == len(wanted) or any([len(each.hashes) != 1 for each in wanted]):
            raise FormatError("reserve: not one block for each of the preallocated slots")
        ours = [i for i, slot in enumerate(slots) if slot in self._preallocated]
        slots, wanted = [slots[i] for i in ours], [wanted[i] for i in ours]
        generations = [self._preallocated.pop(slot) for slot in slots]
        made = self._tiers.reserve_at(wanted, slots, generations)
        for i, reservation, slot, generation in zip(ours, made, slots, generations, strict=True):
            if reservation is None:
                self._spare[op.stores.first + i] = slot, generation
            else:
                self._reservations[op.stores.first + i] = reservation

    def _free_spare(self, number: int) -> None:
        if (spare := self._spare.pop(number, None)) is not None:
            self._hierarchy.deallocate([spare[0]], [spare[1]])

    def _seal(self, op: wire.Seal) -> None:
        if max(map(len, op.tokens), default=0) > self._token_bytes:  # other clients receive them
            raise FormatError(f"seal: more than the {self._token_bytes // 4} tokens of a block")
        for number, tokens in op.filled():
            if (reservation := self._reservations.get(number)) is None:
                self._free_spare(number)
                continue
            if len(tokens) != len(reservation.hashes):
                raise FormatError(f"seal: tokens of {len(tokens)} blocks, {len(reservation)} are reserved")
            if reservation.is_partial and not 0 < len(tokens[0]) < self._token_bytes:
                raise FormatError("seal: a partial block has a token or more, and fewer than a block")
            del self._reservations[number]
            self.sealed.append((reservation, tokens, op.epoch))

    def _abandon(self, op: wire.Abandon) -> None:
        for number in op.reservations:
            if (reservation := self._reservations.pop(number, None)) is None:
                self._free_spare(number)
            else:
                self._hierarchy.abandon(reservation, op.reason)

    def _request_ended(self, op: wire.RequestEnded) -> None:
        account = self._client * _TENANTS + op.client % _TENANTS  # a client's hints affect its own account alone
        self._tiers.ended(op.end()._replace(client=account), op.client)

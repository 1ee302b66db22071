"""What one client holds of the tiers, and what its operations do to it. No socket, no waiting."""

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvtier.connector.daemon import MAX_ITEMS, messages, wire
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers import L2, FormatError, Outcome
from kvtier.tiers.hierarchy import Attribution, Claim, Filled, Pending
from kvtier.tiers.pool import Lease, Reservation

MAX_HELD: Final = 8192  # claims and leases of one client
MAX_RESERVATIONS: Final = 8192  # of one client, open at once
_CLIENTS: Final = itertools.count(1)  # their numbers in hints' accounts
_TENANTS: Final = 16  # accounts of one client; tenants beyond share one by their number


class HeldCounts(NamedTuple):
    claims: int
    leases: int
    reservations: int


class Holdings:
    """The claims, leases and reservations of one client, each by the number the client gave it.

    A number the client has no (more) thing of is passed over: both sides may let it go at the same time.
    Only what no client of ours would send is a FormatError.

    `_on_…` serves the operation of that name (`wire.handlers_of`).
    """

    def __init__(self, tiers: ServedTiers, block_size: int, lease_deadline: float, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._hierarchy = tiers.hierarchy
        self._token_bytes = 4 * block_size  # that a block can have
        self._lease_deadline = lease_deadline
        self._clock = clock
        self._claims: dict[int, Claim] = {}
        self._renewed: dict[int, float] = {}  # claim answered → when the client last wanted it
        self.waiting: dict[int, Claim] = {}  # those of the claims that have no answer yet
        self._client = next(_CLIENTS)  # whose hints they are
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self.sealed: list[Filled] = []  # not passed on yet

    @property
    def counts(self) -> HeldCounts:
        return HeldCounts(len(self._claims), len(self._leases), len(self._reservations))

    def apply(self, operation: messages.Operation, news: list[messages.News]) -> Any:
        """Do it. Returns its answer as on the wire, None if it has none; `news` gets what is known at once."""
        answer = _HANDLERS[type(operation)](self, operation)
        if isinstance(answer, messages.News):
            news.append(answer)
            return None
        return answer

    def news(self) -> list[messages.News]:
        """The claims that have an answer now and had none before."""
        return [news for number in list(self.waiting) if (news := self._look(number)) is not None]

    def publish(self) -> None:
        """Pass on what was sealed: behind the answers, since hashing it takes the GIL while somebody waits for them."""
        if self.sealed:
            sealed, self.sealed = self.sealed, []
            self._hierarchy.seal_each(sealed)

    def lapse(self, now: float) -> int:
        """Let go of the promises nobody has renewed for the lease deadline; returns how many.

        Whoever calls has read all that the client sent until `now`: a `Take` on its way is never overtaken.
        """
        late = [number for number, at in self._renewed.items() if now - at >= self._lease_deadline]
        for number in late:
            self._drop(number)
        return len(late)

    def may_lapse(self, now: float) -> bool:
        return any(now - at >= self._lease_deadline for at in self._renewed.values())

    def forgo(self) -> None:
        """The client is gone: what it was promised and has not taken can go, since no copy was ever planned for it."""
        for number in list(self._claims):
            self._drop(number)

    def let_go(self) -> HeldCounts:
        """No copy of the client's is under way any more: all goes. Returns how much there was."""
        self.publish()
        counts = self.counts
        self.forgo()
        for lease in self._leases.values():
            lease.release()
        for reservation in self._reservations.values():
            self._hierarchy.abandon(reservation, Outcome.ABORTED)
        self._leases.clear()
        self._reservations.clear()
        return counts

    # claims

    def _on_ask(self, op: messages.Ask) -> messages.News | None:
        if op.claim in self._claims or op.claim in self._leases:
            raise FormatError(f"claim {op.claim} is there already")
        if len(self._claims) + len(self._leases) >= MAX_HELD:
            nothing = Attribution(len(op.hashes), l1=op.num_l1, miss=len(op.hashes) - op.num_l1)
            self._hierarchy.metrics.missed(Outcome.QUEUE_FULL, nothing.miss)
            return messages.News(op.claim, nothing, Outcome.NO_SLOT, 0.0, _NONE, _NONE)
        if len(set(op.hashes)) < len(op.hashes):
            raise FormatError(f"claim {op.claim} names a block twice")
        self.publish()  # what was sealed just before may be what is asked for
        claim = self._hierarchy.ask(op.hashes, op.parent, op.num_l1, block_size=op.block_size, ends=op.ends)
        self._claims[op.claim] = self.waiting[op.claim] = claim
        return self._look(op.claim)

    def _look(self, number: int) -> messages.News | None:
        claim = self._claims[number]
        promised = self._tiers.poll(claim)
        if isinstance(promised, Pending):
            return None
        assert claim.found is not None
        del self.waiting[number]
        now = self._clock()
        slots: list[int]
        generations: list[int]
        lease = self._hierarchy.promised(claim) if promised else None
        if lease is not None:
            self._renewed[number] = now
            slots, generations = lease.slots, lease.generations
        else:
            self._drop(number)
            slots, generations = _NONE, _NONE
        good_for = max(0.0, claim.good_until - now)
        more = claim.children, claim.meeting
        return messages.News(number, claim.found, claim.refusal, good_for, slots, generations, *more)

    def _on_renew(self, op: messages.Renew) -> None:
        now = self._clock()
        for number in op.claims:
            if number in self._renewed:
                self._renewed[number] = now

    def _on_cancel(self, op: messages.Cancel) -> None:
        for number in op.claims:
            self._drop(number)

    def _on_take(self, op: messages.Take) -> None:
        for number in op.claims:
            if number in self._renewed:
                self._leases[number] = self._tiers.take(self._claims[number])  # nothing is left to cancel
                self._forget(number)

    def _on_release(self, op: messages.Release) -> None:
        for number in op.leases:
            if (lease := self._leases.pop(number, None)) is not None:
                lease.release()

    def _drop(self, number: int) -> None:
        if (claim := self._claims.get(number)) is not None:
            self._hierarchy.cancel(claim)
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._claims[number]
        self.waiting.pop(number, None)
        self._renewed.pop(number, None)

    # stores

    def _on_reserve(self, op: messages.Reserve) -> list[bytes]:
        if not self._reservations.keys().isdisjoint(range(op.first, op.first + len(op.wanted))):
            raise FormatError(f"a reservation from {op.first} on is there already")
        lengths = [len(each.hashes) for each in op.wanted]
        if [length for length, each in zip(lengths, op.wanted, strict=True) if each.is_tail and length != 1]:
            raise FormatError("reserve: a tail is one block")
        if len(self._reservations) + len(lengths) > MAX_RESERVATIONS or max(lengths, default=0) > MAX_ITEMS:
            self._hierarchy.metrics.dropped(L2, Outcome.QUEUE_FULL, sum(lengths))
            return wire.pack_grants([None] * len(lengths))
        try:
            reservations = self._tiers.reserve(op.wanted)
        except ValueError as error:  # a name given twice; slots taken before it came are dropped, and so abandoned
            raise FormatError(str(error)) from None
        for number, reservation in enumerate(reservations, op.first):
            if reservation is not None and reservation.hashes:
                self._reservations[number] = reservation
        return wire.pack_grants(
            [None if each is None else (each.indices, each.slots, each.generations) for each in reservations]
        )

    def _on_seal(self, op: messages.Seal) -> None:
        if max(map(len, op.tokens), default=0) > self._token_bytes:  # other clients are told of them
            raise FormatError(f"seal: more than the {self._token_bytes // 4} tokens of a block")
        first = 0
        for number, count in zip(op.reservations, op.counts, strict=True):
            tokens = op.tokens[first : first + count]
            first += count
            if (reservation := self._reservations.get(number)) is None:
                continue
            if count != len(reservation.hashes):
                raise FormatError(f"seal: tokens of {count} blocks, {len(reservation)} are reserved")
            if reservation.is_tail and not 0 < len(tokens[0]) < self._token_bytes:
                raise FormatError("seal: a tail has a token or more, and fewer than a block")
            del self._reservations[number]
            self.sealed.append((reservation, tokens, op.epoch))

    def _on_abandon(self, op: messages.Abandon) -> None:
        for number in op.reservations:
            if (reservation := self._reservations.pop(number, None)) is not None:
                self._hierarchy.abandon(reservation, op.reason)

    # the rest

    def _on_computed(self, op: messages.Computed) -> None:
        self._hierarchy.computed(op.num_tokens, op.seconds, op.position)

    def _on_requestended(self, op: messages.RequestEnded) -> None:
        account = self._client * _TENANTS + op.end.client % _TENANTS  # a client is judged for no other's hints
        self._tiers.ended(op.end._replace(client=account), op.end.client)

    def _on_holds(self, op: messages.Holds) -> bytes:
        return bytes(self._hierarchy.holds(op.hashes))


_HANDLERS: Final = wire.handlers_of(Holdings)
_NONE: Final[list[int]] = []  # nobody changes it

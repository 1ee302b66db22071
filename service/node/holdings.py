"""What one client holds of the tiers, and what its operations do to it. No socket, no waiting."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from kvtier.connector.frames import MAX_ITEMS
from kvtier.connector.messages import (
    Abandon,
    Ask,
    Cancel,
    Computed,
    Granted,
    Holds,
    News,
    Operation,
    Release,
    Renew,
    Reserve,
    Seal,
    Take,
    pack_grants,
)
from kvtier.tiers.below import Attribution, Claim
from kvtier.tiers.errors import FormatError
from kvtier.tiers.lease import Lease, Reservation
from kvtier.tiers.local_tiers import LocalTiers
from kvtier.tiers.prefetch import Pending
from kvtier.tiers.tier import BlockRecord, Outcome

MAX_HELD: Final = 8192  # claims and leases of one client
MAX_RESERVATIONS: Final = 8192  # of one client, open at once


class Counts(NamedTuple):
    """How much one client holds."""

    claims: int
    leases: int
    reservations: int


class Holdings:
    """The claims, leases and reservations of one client, each by the number the client gave it.

    A number the client has no (more) thing of is passed over: the two sides may say goodbye to it at the same time.
    Only what no client of ours would send is a FormatError.
    """

    def __init__(self, tiers: LocalTiers, lease_deadline: float, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._lease_deadline = lease_deadline
        self._clock = clock
        self._claims: dict[int, Claim] = {}
        self._renewed: dict[int, float] = {}  # claim answered → when the client last wanted it
        self._waiting: dict[int, Claim] = {}  # those of the claims that have no answer yet
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self._sealed: list[tuple[Reservation, Seal]] = []  # not passed on yet
        self._do: dict[type, Callable[[Any], Any]] = {
            Ask: self._ask,
            Renew: self._renew,
            Cancel: self._cancel,
            Take: self._take,
            Release: self._release,
            Reserve: self._reserve,
            Seal: self._seal,
            Abandon: self._abandon,
            Computed: self._computed,
            Holds: self._holds,
        }

    @property
    def counts(self) -> Counts:
        """How much there is."""
        return Counts(len(self._claims), len(self._leases), len(self._reservations))

    @property
    def waits(self) -> bool:
        """Whether some claim has no answer yet."""
        return bool(self._waiting)

    def apply(self, operation: Operation, news: list[News]) -> Any:
        """Do it. Returns its answer as on the wire, None where it has none; `news` gets what is known at once."""
        answer = self._do[type(operation)](operation)
        if isinstance(answer, News):
            news.append(answer)
            return None
        return answer

    def news(self) -> list[News]:
        """The claims that have an answer now and had none before."""
        return [news for number in list(self._waiting) if (news := self._look(number)) is not None]

    def publish(self) -> None:
        """Pass on what was sealed: behind the answers, since hashing it takes the GIL while somebody waits for them."""
        sealed, self._sealed = self._sealed, []
        for reservation, op in sealed:
            records = [
                BlockRecord(chain_hash, parent or b"", tokens, 0)
                for chain_hash, parent, tokens in zip(reservation.hashes, reservation.parents, op.tokens, strict=True)
            ]
            self._tiers.seal(reservation, records, op.epoch)

    def lapse(self, now: float) -> int:
        """Let go of the promises nobody has renewed for the lease deadline; returns how many.

        Whoever calls has read all that the client sent until `now`: a `Take` on its way is never overtaken.
        """
        late = [number for number, at in self._renewed.items() if now - at >= self._lease_deadline]
        for number in late:
            self._drop(number)
        return len(late)

    def may_lapse(self, now: float) -> bool:
        """Whether `lapse` would find something."""
        return any(now - at >= self._lease_deadline for at in self._renewed.values())

    def forgo(self) -> None:
        """The client is gone: what it was promised and has not taken can go, since no copy was ever planned for it."""
        for number in list(self._claims):
            self._drop(number)

    def let_go(self) -> Counts:
        """No copy of the client's is under way any more: all goes. Returns how much there was."""
        self.publish()
        counts = self.counts
        self.forgo()
        for lease in self._leases.values():
            lease.release()
        for reservation in self._reservations.values():
            self._tiers.abandon(reservation, Outcome.ABORTED)
        self._leases.clear()
        self._reservations.clear()
        return counts

    # claims

    def _ask(self, op: Ask) -> News | None:
        if op.claim in self._claims or op.claim in self._leases:
            raise FormatError(f"claim {op.claim} is there already")
        if len(self._claims) + len(self._leases) >= MAX_HELD:
            nothing = Attribution(len(op.hashes), l1=op.num_l1, miss=len(op.hashes) - op.num_l1)
            self._tiers.metrics.missed(Outcome.QUEUE_FULL, nothing.miss)
            return News(op.claim, nothing, Outcome.NO_SLOT, 0.0, _NONE, _NONE)
        if len(set(op.hashes)) < len(op.hashes):
            raise FormatError(f"claim {op.claim} names a block twice")
        claim = self._tiers.ask(op.hashes, op.parent, op.num_l1, block_size=op.block_size)
        self._claims[op.claim] = self._waiting[op.claim] = claim
        return self._look(op.claim)

    def _look(self, number: int) -> News | None:
        claim = self._claims[number]
        promised = self._tiers.poll(claim)
        if isinstance(promised, Pending):
            return None
        assert claim.found is not None
        del self._waiting[number]
        now = self._clock()
        lease = self._tiers.promised(claim)
        if promised and lease is not None:
            self._renewed[number] = now
            slots, generations = lease.slots, lease.generations
        else:
            self._drop(number)
            slots = generations = _NONE
        return News(number, claim.found, claim.refusal, max(0.0, claim.good_until - now), slots, generations)

    def _renew(self, op: Renew) -> None:
        now = self._clock()
        for number in op.claims:
            if number in self._renewed:
                self._renewed[number] = now

    def _cancel(self, op: Cancel) -> None:
        for number in op.claims:
            self._drop(number)

    def _take(self, op: Take) -> None:
        for number in op.claims:
            if number in self._renewed:
                self._leases[number] = self._tiers.take(self._claims[number])
                self._drop(number)

    def _release(self, op: Release) -> None:
        for number in op.leases:
            if (lease := self._leases.pop(number, None)) is not None:
                lease.release()

    def _drop(self, number: int) -> None:
        if (claim := self._claims.pop(number, None)) is not None:
            self._tiers.cancel(claim)
            self._waiting.pop(number, None)
            self._renewed.pop(number, None)

    # stores

    def _reserve(self, op: Reserve) -> list[bytes]:
        if any(number in self._reservations for number in range(op.first, op.first + len(op.wanted))):
            raise FormatError(f"a reservation from {op.first} on is there already")
        is_bounded = all(len(each.hashes) <= MAX_ITEMS for each in op.wanted)
        if len(self._reservations) + len(op.wanted) > MAX_RESERVATIONS or not is_bounded:
            num_blocks = sum(len(each.hashes) for each in op.wanted)
            self._tiers.metrics.dropped("l2", Outcome.QUEUE_FULL, num_blocks)
            return pack_grants([None] * len(op.wanted))
        try:
            reservations = self._tiers.reserve(op.wanted)
        except ValueError as error:  # a name given twice; slots taken before it came are dropped, and so abandoned
            raise FormatError(str(error)) from None
        for number, reservation in enumerate(reservations, op.first):
            if reservation is not None and len(reservation):
                self._reservations[number] = reservation
        return pack_grants(
            [
                None if each is None else Granted(np.array(each.indices, np.int64), each.slots, each.generations)
                for each in reservations
            ]
        )

    def _seal(self, op: Seal) -> None:
        reservation = self._reservations.get(op.reservation)
        if reservation is None:
            return
        if len(op.tokens) != len(reservation):
            raise FormatError(f"seal: tokens of {len(op.tokens)} blocks, {len(reservation)} are reserved")
        self._sealed.append((self._reservations.pop(op.reservation), op))

    def _abandon(self, op: Abandon) -> None:
        if (reservation := self._reservations.pop(op.reservation, None)) is not None:
            self._tiers.abandon(reservation, op.reason)

    # the rest

    def _computed(self, op: Computed) -> None:
        self._tiers.computed(op.num_tokens, op.seconds)

    def _holds(self, op: Holds) -> bytes:
        return bytes(self._tiers.holds(op.hashes))


_NONE: Final = np.empty(0, np.int64)

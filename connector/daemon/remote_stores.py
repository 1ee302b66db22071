"""A client's stores at the daemon: what of them one message takes, and what was granted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.connector.daemon.attachment import Link
from kvtier.connector.daemon.fields import MAX_HASHES
from kvtier.connector.daemon.messages import Granted, Seal
from kvtier.connector.daemon.wire import MAX_ITEMS
from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import Wanted
from kvtier.tiers.pool import Reservation


@dataclass(eq=False, slots=True)
class RemoteReservation(Reservation):
    number: int = 0
    link: Link | None = None


def heads_of(wanted: Sequence[Wanted]) -> Sequence[Wanted]:
    """As much of each as one message takes: mostly all."""
    most, room = max(len(each.hashes) for each in wanted), MAX_HASHES
    if most <= MAX_ITEMS and most * len(wanted) <= room:
        return wanted
    heads = []
    for each in wanted:
        if (count := min(MAX_ITEMS, room)) < len(each.hashes):
            each = replace(each, hashes=each.hashes[:count], is_tail=False)
        room -= len(each.hashes)
        heads.append(each)
    return heads


def reserved(
    link: Link,
    first: int,
    wanted: Sequence[Wanted],
    granted: Sequence[Granted | None],
    ended: Callable[[Reservation, bool], None],
) -> list[Reservation | None]:
    """The slots that were granted for what was wanted, held by the link under numbers from `first` on."""
    made: list[Reservation | None] = []
    held: list[int] = []
    for number, (each, grant) in enumerate(zip(wanted, granted, strict=True), first):
        if grant is None:
            made.append(None)
            continue
        indices, slots, generations = grant
        hashes = list(each.hashes)
        parents: list[ChainHash | None] = [each.parent] if len(hashes) == 1 else [each.parent, *hashes[:-1]]
        if len(indices) < len(hashes):
            hashes, parents = [hashes[i] for i in indices], [parents[i] for i in indices]
        made.append(
            RemoteReservation(hashes, indices, slots, generations, parents, 0, len(indices), ended, number, link)
        )
        if indices:
            held.append(number)
    link.held.update(held)
    return made


def seals_of(filled: Sequence[tuple[RemoteReservation, Sequence[bytes], int]]) -> list[Seal]:
    """What tells the daemon of filled reservations, each with its tokens and epoch: mostly one message for all."""
    seals = [Seal(0, [], [], [])]
    for reservation, tokens, epoch in filled:
        seal = seals[-1]
        if epoch != seal.epoch or max(len(seal.reservations) + 1, len(seal.tokens) + len(tokens)) > MAX_ITEMS:
            seals.append(seal := Seal(epoch, [], [], []))
        seal.reservations.append(reservation.number)
        seal.counts.append(len(tokens))
        seal.tokens.extend(tokens)
    return [seal for seal in seals if seal.reservations]

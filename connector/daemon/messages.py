"""The messages between a client and the daemon: each one typed, its fields checked when it is decoded.

After the handshake (`handshake.py`) a client sends requests `[number, [operation, …]]` and the daemon replies
`[number, epoch, answers, news]`. The number is the request's, or 0 if nobody waits for an answer. docs/format.md has
the fields one by one.

To add an operation: its class, its row in `OPERATIONS`, and the daemon's method for it (`handlers_of`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.connector.daemon.frames import (
    ID_BYTES,
    decoded,
    flag,
    number,
    numbers,
    octets,
    pack_frame,
    pack_hashes,
    pack_numbers,
    seconds,
    text,
    unpack_hashes,
    unpack_numbers,
)
from kvtier.tiers import TIERS, ChainHash, FormatError, Outcome
from kvtier.tiers.hierarchy import Attribution, Wanted

_MAX_SLOTS: Final = 1 << 32
_NONE: Final = np.empty(0, np.int64)


class Ask(NamedTuple):
    """Where are these blocks, and may I have those beyond the first `num_l1`? News of the claim follows."""

    claim: int
    parent: ChainHash  # of hashes[0]
    num_l1: int
    block_size: int
    hashes: Sequence[ChainHash]


class Renew(NamedTuple):
    """These claims are still wanted."""

    claims: Sequence[int]


class Cancel(NamedTuple):
    """These are not."""

    claims: Sequence[int]


class Take(NamedTuple):
    """These become leases, of the same numbers."""

    claims: Sequence[int]


class Release(NamedTuple):
    """The copies out of these leases have ended."""

    leases: Sequence[int]


class Reserve(NamedTuple):
    """Slots for what a step stores; answered by `pack_grants`. The reservations count up from `first`."""

    first: int
    wanted: Sequence[Wanted]


class Seal(NamedTuple):
    """A reservation's slots are filled; `tokens` of each of its blocks, u32 little-endian."""

    reservation: int
    epoch: int
    tokens: Sequence[bytes]


class Abandon(NamedTuple):
    """A reservation's slots will not be filled; no copy into them is under way."""

    reservation: int
    reason: Outcome


class Computed(NamedTuple):
    """A step prefilled `num_tokens` in `seconds`."""

    num_tokens: int
    seconds: float


class Lookup(NamedTuple):
    """Where are these blocks? Answered as `News.found` is told, within `timeout` seconds if nodes share a tier."""

    hashes: Sequence[ChainHash]
    timeout: float


class Holds(NamedTuple):
    """Which of the blocks does L2 hold? Answered by a byte for each, 1 or 0."""

    hashes: Sequence[ChainHash]


class Ended(NamedTuple):
    """The copies of a client this process was before have ended: what that one still holds can go."""

    client: bytes


class Bye(NamedTuple):
    """The client closes; none of its copies is under way."""


class Reset(NamedTuple):
    """Forget everything in every tier. Answered by true when it is done."""


class Drain(NamedTuple):
    """Wait for stores. Answered by whether all were written within `timeout` seconds."""

    timeout: float
    below: bool


class Check(NamedTuple):
    """Hold every conservation law. Answered by what is broken, "" if nothing is."""


Operation: TypeAlias = tuple[Any, ...]
"""One of the messages above; `OPERATIONS` has them all."""


class Granted(NamedTuple):
    """Slots reserved for one `Wanted`: for its hashes at `indices`."""

    indices: NDArray[np.int64]
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]


class News(NamedTuple):
    """What became of a claim, told once: the slots of the blocks promised, none if nothing is."""

    claim: int
    found: Attribution
    refusal: Outcome | None
    good_for: float  # seconds before an answer that nothing is held can be another one
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]


class Reply(NamedTuple):
    """What the daemon sends: answers to a request, news of claims, and the epoch now."""

    request: int  # 0: nobody asked
    epoch: int
    answers: list[Any]  # of the operations that have one, in their order; as they are on the wire
    news: list[News]


def pack_request(request: int, operations: Sequence[Operation]) -> bytes:
    """A client's frame. `request` is 0 if nobody waits for an answer."""
    packed = []
    for each in operations:
        row = _BY_MESSAGE[type(each)]
        packed.append([row.code, *(each if row.pack is None else row.pack(each))])
    return pack_frame([request, packed])


def unpack_request(body: Any) -> tuple[int, list[Operation]]:
    """Inverse of `pack_request`."""
    return decoded(_request, body)


def pack_reply(reply: Reply) -> bytes:
    """The daemon's frame."""
    return pack_frame([reply.request, reply.epoch, reply.answers, [_pack_news(news) for news in reply.news]])


def unpack_reply(body: Any) -> Reply:
    """Inverse of `pack_reply`; the answers stay as they are until the caller unpacks them."""
    return decoded(_reply, body)


def pack_grants(grants: Sequence[Granted | None]) -> list[bytes]:
    """The answer to a `Reserve`: how many slots each `Wanted` has, or -1, then the columns of all of them in a row."""
    counts = np.array([-1 if grant is None else len(grant.slots) for grant in grants], np.int64)
    granted = [grant for grant in grants if grant is not None]
    columns = [np.concatenate(column) if granted else _NONE for column in zip(*granted, strict=True)] or [_NONE] * 3
    return [pack_numbers(column) for column in (counts, *columns)]


def unpack_grants(answer: Any, num_wanted: Sequence[int], num_slots: int) -> list[Granted | None]:
    """Inverse of `pack_grants`, for `Wanted` of so many hashes each and a region of `num_slots`."""
    return decoded(lambda body: _grants(body, num_wanted, num_slots), answer)


def _grants(answer: Any, num_wanted: Sequence[int], num_slots: int) -> list[Granted | None]:
    counts, *columns = answer
    how_many = (unpack_numbers(counts, 1 << 32, least=-1)).tolist()
    most = max(num_wanted, default=0)
    indices, slots, generations = map(unpack_numbers, columns, (most, num_slots, 1 << 62))
    if not len(indices) == len(slots) == len(generations) == sum(n for n in how_many if n > 0):
        raise FormatError("a grant's columns differ in length")
    grants: list[Granted | None] = []
    first = 0
    for count, wanted in zip(how_many, num_wanted, strict=True):
        end = first + max(0, count)
        if count > 0 and not int(indices[first:end].max()) < wanted:
            raise FormatError("a slot for a block that nobody asked for")
        grants.append(None if count < 0 else Granted(indices[first:end], slots[first:end], generations[first:end]))
        first = end
    return grants


def pack_found(found: Attribution) -> list[int]:
    """Blocks, then how many of them in each tier of the table, nearest first, then the misses."""
    return [found.blocks, *(found[tier] for tier in TIERS), found.miss]


def unpack_found(found: Any) -> Attribution:
    """Inverse of `pack_found`."""
    blocks, *counts, miss = numbers(found)
    if len(counts) != len(TIERS):
        raise FormatError(f"counts of {len(counts)} tiers, there are {len(TIERS)}: run one kvtier on both sides")
    return Attribution(blocks, miss=miss, **dict(zip(TIERS, counts, strict=True)))


def _request(body: Any) -> tuple[int, list[Operation]]:
    request, operations = body
    codes = numbers([code for code, *_ in operations])
    return number(request), [
        _BY_CODE[code].unpack(*fields) for code, (_, *fields) in zip(codes, operations, strict=True)
    ]


def _reply(body: Any) -> Reply:
    request, epoch, answers, news = body
    if type(answers) is not list:
        raise FormatError("answers are not a list")
    return Reply(number(request), number(epoch), answers, [_unpack_news(*fields) for fields in news])


def _pack_news(news: News) -> list[Any]:
    refusal = None if news.refusal is None else str(news.refusal)
    slots, generations = pack_numbers(news.slots), pack_numbers(news.generations)
    return [news.claim, pack_found(news.found), refusal, news.good_for, slots, generations]


def _unpack_news(claim: Any, where: Any, refusal: Any, good_for: Any, slots: Any, generations: Any) -> News:
    found = unpack_found(where)
    why = None if refusal is None else Outcome(text(refusal))
    places = unpack_numbers(slots, _MAX_SLOTS), unpack_numbers(generations, 1 << 62)
    if len(places[0]) != len(places[1]) or len(places[0]) > found.loadable:
        raise FormatError("more blocks promised than found, or columns of different lengths")
    return News(number(claim), found, why, seconds(good_for), *places)


def _ask(claim: Any, parent: Any, num_l1: Any, block_size: Any, hashes: Any) -> Ask:
    names = unpack_hashes(hashes)
    return Ask(number(claim), octets(parent, 32), number(num_l1, len(names) + 1), number(block_size, 1 << 20), names)


def _wanted(hashes: Any, parent: Any, tenant: Any) -> Wanted:
    return Wanted(unpack_hashes(hashes), octets(parent, 32), octets(tenant, 32))


def _pack_wanted(wanted: Wanted) -> list[bytes]:
    return [pack_hashes(wanted.hashes), wanted.parent, wanted.tenant]


def _seal(reservation: Any, epoch: Any, tokens: Any) -> Seal:
    if type(tokens) is not list or not all(type(each) is bytes for each in tokens):
        raise FormatError("tokens are not a list of bytes")
    return Seal(number(reservation), number(epoch), tokens)


class OperationRow(NamedTuple):
    """One operation on the wire: `[code, *fields]`."""

    code: int  # never given to another operation within a version of the protocol
    message: type[Operation]
    pack: Callable[[Any], Sequence[Any]] | None  # a message's fields on the wire; None: they go as they are
    unpack: Callable[..., Operation]  # inverse of `pack`, which checks every field


OPERATIONS: Final = (
    OperationRow(0, Ask, lambda op: [op.claim, op.parent, op.num_l1, op.block_size, pack_hashes(op.hashes)], _ask),
    OperationRow(1, Renew, None, lambda claims: Renew(numbers(claims))),
    OperationRow(2, Cancel, None, lambda claims: Cancel(numbers(claims))),
    OperationRow(3, Take, None, lambda claims: Take(numbers(claims))),
    OperationRow(4, Release, None, lambda leases: Release(numbers(leases))),
    OperationRow(
        5,
        Reserve,
        lambda op: [op.first, [_pack_wanted(wanted) for wanted in op.wanted]],
        lambda first, wanted: Reserve(number(first), [_wanted(*fields) for fields in wanted]),
    ),
    OperationRow(6, Seal, None, _seal),
    OperationRow(7, Abandon, None, lambda reservation, reason: Abandon(number(reservation), Outcome(text(reason)))),
    OperationRow(8, Computed, None, lambda num_tokens, spent: Computed(number(num_tokens), seconds(spent))),
    OperationRow(9, Holds, lambda op: [pack_hashes(op.hashes)], lambda hashes: Holds(unpack_hashes(hashes))),
    OperationRow(
        10,
        Lookup,
        lambda op: [pack_hashes(op.hashes), op.timeout],
        lambda hashes, timeout: Lookup(unpack_hashes(hashes), seconds(timeout)),
    ),
    OperationRow(11, Ended, None, lambda client: Ended(octets(client, ID_BYTES))),
    OperationRow(12, Bye, None, Bye),
    OperationRow(13, Reset, None, Reset),
    OperationRow(14, Drain, None, lambda timeout, below: Drain(seconds(timeout), flag(below))),
    OperationRow(15, Check, None, Check),
)

_BY_CODE: Final = {row.code: row for row in OPERATIONS}
_BY_MESSAGE: Final = {row.message: row for row in OPERATIONS}


def handlers_of(owner: type) -> dict[type[Operation], Callable[..., Any]]:
    """Which of the owner's methods serves which operation: `_on_ask` serves `Ask`. Others are not in the result."""
    methods = ((row.message, getattr(owner, f"_on_{row.message.__name__.lower()}", None)) for row in OPERATIONS)
    return {message: method for message, method in methods if method is not None}

"""The messages between a client and the daemon, each one typed. How they look on the wire: `wire.py`.

After the handshake (`handshake.py`) a client sends requests, each a number and operations. The daemon replies with the
request's number (0 if nobody waits for an answer), its epoch, the answers of those operations that have one, and news
of claims.

To add an operation: its class, its row in `OPERATIONS` of `wire.py`, and the daemon's method for it (`handlers_of`).
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from kvtier.tiers import ChainHash, ChildBlock, Outcome
from kvtier.tiers.hierarchy import Attribution, Ends, Meeting, Wanted
from kvtier.tiers.reuse import RequestEnd


class Ask(NamedTuple):
    """Where are these blocks, and may I have those beyond the first `num_l1`? News of the claim follows."""

    claim: int
    parent: ChainHash  # of hashes[0]
    num_l1: int
    block_size: int
    hashes: Sequence[ChainHash]
    ends: Ends = Ends.FRONT


class Renew(NamedTuple):
    """These claims are still wanted."""

    claims: list[int]


class Cancel(NamedTuple):
    """These are not."""

    claims: list[int]


class Take(NamedTuple):
    """These become leases, of the same numbers."""

    claims: list[int]


class Release(NamedTuple):
    """The copies out of these leases have ended."""

    leases: list[int]


class Reserve(NamedTuple):
    """Slots for what a step stores; answered by `pack_grants`. The reservations count up from `first`."""

    first: int
    wanted: Sequence[Wanted]


class Seal(NamedTuple):
    """These reservations' slots are filled; `tokens` of each block of theirs in turn, u32 little-endian."""

    epoch: int
    reservations: list[int]
    counts: list[int]  # blocks of each
    tokens: list[bytes]


class Abandon(NamedTuple):
    """These reservations' slots will not be filled; no copy into them is under way."""

    reason: Outcome
    reservations: list[int]


class Computed(NamedTuple):
    """A step prefilled `num_tokens` in `seconds`."""

    num_tokens: int
    seconds: float
    position: int = 0  # tokens before them, on average


class RequestEnded(NamedTuple):
    """A request has ended: a `RequestEnd` with at most the last MAX_ENDED of its names."""

    end: RequestEnd


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
"""One of the messages above; `OPERATIONS` in `wire.py` has them all."""


def taken_along(before: Operation, operation: Operation, most: int) -> bool:
    """Have the operation before do what this one would, if they are of a kind: what a step ends or seals is many.

    Not if one of its lists would be longer than `most`. Both must be of those that have no answer.
    """
    kind = type(before)
    if kind is not type(operation) or kind not in _OF_A_KIND:
        return False
    alike, lists = _OF_A_KIND[kind]
    if before[:alike] != operation[:alike] or any(len(before[i]) + len(operation[i]) > most for i in lists):
        return False
    for i in lists:
        before[i].extend(operation[i])
    return True


# How many leading fields have to be equal, and which are lists that may be put one behind another.
_OF_A_KIND: Final = {Seal: (1, (1, 2, 3)), Abandon: (1, (1,)), Cancel: (0, (0,)), Release: (0, (0,))}


Granted: TypeAlias = tuple[list[int], list[int], list[int]]
"""Slots reserved for one `Wanted`: for its hashes at these indices, these slots, of these generations."""


class News(NamedTuple):
    """What became of a claim, told once: the slots of the blocks promised, none if nothing is."""

    claim: int
    found: Attribution
    refusal: Outcome | None
    good_for: float  # seconds before an answer that nothing is held can be another one
    slots: list[int]
    generations: list[int]
    children: Sequence[ChildBlock] = ()  # as `Claim.children`
    meeting: Meeting | None = None  # as `Claim.meeting`


class Reply(NamedTuple):
    """What the daemon sends: answers to a request, news of claims, and the epoch now."""

    request: int  # 0: nobody asked
    epoch: int
    answers: list[Any]  # of the operations that have one, in their order; as they are on the wire
    news: list[News]

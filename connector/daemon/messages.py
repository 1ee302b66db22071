"""The messages between a client and the daemon, each one typed. How they look on the wire: `wire.py`.

After the handshake (`handshake.py`) a client sends requests, each a number and operations. The daemon replies with the
request's number (0 if nobody waits for an answer), its epoch, the answers of those operations that have one, and news
of claims.

To add an operation: its class, its row in `OPERATIONS` of `wire.py`, and the daemon's method for it (`handlers_of`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, ChildBlock, Outcome
from kvtier.tiers.hierarchy import Attribution, Ends, Meeting, Wanted


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
    position: int = 0  # tokens before them, on average


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
    children: Sequence[ChildBlock] = ()  # as `Claim.children`
    meeting: Meeting | None = None  # as `Claim.meeting`


class Reply(NamedTuple):
    """What the daemon sends: answers to a request, news of claims, and the epoch now."""

    request: int  # 0: nobody asked
    epoch: int
    answers: list[Any]  # of the operations that have one, in their order; as they are on the wire
    news: list[News]

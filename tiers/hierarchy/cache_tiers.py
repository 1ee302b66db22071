"""The contract of the tiers below L1, in this process or behind the node's daemon: claims, stores and upkeep.

A claim is one request's question, and then the promise made to it: `ask` → `poll` until it is not PENDING → `take`, or
`cancel` at any time. A store is `reserve` → the worker copies → `seal`, or `abandon`. `bring` is a claim for a caller
that can wait.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Condition
from typing import Final, NamedTuple, Protocol

from kvtier.tiers import L1, TIERS, BlockRecord, ChainHash, ChildBlock, Metrics, Outcome
from kvtier.tiers.host import HostRegion
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import RequestEnd

_LOOK: Final = 0.05  # seconds `bring` waits for news before it looks at its deadline
_REFUSED: Final = 0.01  # seconds before `bring` asks again after a refusal


class Pending:
    """The answer "ask again": blocks are still on their way and the deadline has not passed."""

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = Pending()


@dataclass(slots=True, unsafe_hash=True)  # nobody changes it: see `value`
class Attribution:
    """Where the blocks of one lookup were when first asked: `found["l2"]`, or any other tier of the table by its name.

    `Attribution(4, l2=1, file=2, miss=1)`: AssertionError if the parts do not sum to `blocks`, KeyError for no tier.
    """

    blocks: int
    miss: int
    by_tier: Mapping[str, int] = field(hash=False)  # of the tiers that had any
    loadable: int = field(compare=False, repr=False)  # blocks found below L1

    def __init__(self, blocks: int, *, miss: int = 0, **by_tier: int) -> None:
        self.blocks, self.miss = blocks, miss
        self.by_tier = {TIERS[name].name: count for name, count in by_tier.items() if count}
        self.loadable = blocks - miss - by_tier.get(L1, 0)
        if sum(by_tier.values()) + miss != blocks:
            raise AssertionError(f"attribution does not sum: {self}")

    def __getitem__(self, tier: str) -> int:
        """Blocks found in this tier; 0 if it had none."""
        return self.by_tier.get(TIERS[tier].name, 0)


class Meeting(NamedTuple):
    """Where computing from the front and loading from the back meet."""

    block: int  # of the chain: the first that is loaded
    seconds: float  # until then, as measured rates foretell


class Ends(IntEnum):
    """From which ends the request comes to its blocks."""

    FRONT = 0  # from the front: what is loaded comes first, what is computed behind it
    BOTH = 1  # it could compute the front while what lies behind is loaded, if that is fastest: see `Claim.meeting`
    BACK = 2  # this claim is a part of what lies behind: the question was counted, loading it is decided


LooksBehind = Callable[[bytes], Sequence[ChildBlock]]
"""Tokens, u32 little-endian → blocks held now that follow a claim's last one and begin with them."""


@dataclass(eq=False)
class Claim:
    """One request's question, and then the promise made to it. `ask` makes it; each implementation adds its own."""

    hashes: list[ChainHash]
    parent: ChainHash  # of hashes[0]
    num_l1: int  # leading blocks that L1 holds: counted, not claimed
    block_size: int  # tokens; 0: nobody could compute the blocks instead, so they are always worth loading
    found: Attribution | None = None  # where the blocks were; None while a tier is still being asked
    refusal: Outcome | None = None  # RECOMPUTE: final, computing is faster; NO_SLOT: for now, others have the room
    good_until: float = 0.0  # on the monotonic clock: an answer that nothing is held may be asked for anew from then on
    missing: Outcome | None = Outcome.ABSENT  # why the misses of `found` are misses; None: that is counted already
    ends: Ends = Ends.FRONT
    # Set together with `found`: compute up to there, and ask for what lies behind as `Ends.BACK`. Only the leading
    # blocks that L2 has are claimed then, and there are no `children`. None: what is loaded is claimed.
    meeting: Meeting | None = None
    promised: int | None = None  # what `poll` would answer now, if that is known as the claim is made
    told: bool = False  # the answer was read: by a poll, or as `promised` by whoever sets this
    # Set together with `found`: looks for `children` that begin with these tokens. Most callers never do.
    behind: LooksBehind | None = field(default=None, init=False, repr=False)
    # Set together with `found` where blocks are missing: what became of them. Asked once, when they are counted.
    why: Callable[[], Causes] | None = field(default=None, init=False, repr=False)

    @property
    def causes(self) -> Causes | None:
        """Good once `found` is: how many of its misses left which tier, and why. None: nobody here knows."""
        return None if self.why is None else self.why()

    @property
    def children(self) -> Sequence[ChildBlock]:
        """Good once `found` is: up to eight blocks, held by L2 or the slab, that follow the last block found.

        That is `parent`, if none was. The next block asked for is not among them. They are held when looked at, not
        promised: ask for them to have one.
        """
        return () if self.behind is None else self.behind(b"")


class NewsCondition(Condition):
    """The lock of claims served in this process, and the news that one moved on.

    It also tells watchers, which wait for something else than a lock: an event loop does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called at every step forward. It is called under the lock, so it may only make a note."""
        self._watchers.append(told)

    def notify_all(self) -> None:
        """Wake every thread that waits, and tell every watcher."""
        super().notify_all()
        for told in self._watchers:
            told()


@dataclass(slots=True, unsafe_hash=True)  # not frozen: what is wanted becomes what is stored (`StoringOp`)
class Wanted:
    """Consecutive new blocks of one chain that a step wants to store; or a tail, a chain's unfinished last block."""

    hashes: Sequence[ChainHash]
    parent: ChainHash  # of hashes[0]
    tenant: ChainHash  # whose blocks they are: the root of chains with their cache_salt
    is_tail: bool = False  # `hashes` is one name, with fewer tokens than a block has; of no use to who wants blocks
    is_rest: bool = False  # offered again, as there was no room: it waits until a lower tier has what comes before it


Filled = tuple[Reservation, Sequence[bytes], int]
"""A reservation whose slots are filled, the tokens of each of its blocks (u32 little-endian), and the epoch then."""


class BlockClaims(Protocol):
    """How a request comes to blocks. No method raises for a storage failure; only `wait_news` waits."""

    def ask(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        ends: Ends = Ends.FRONT,
    ) -> Claim:
        """Ask where the blocks of a chain are, and claim those beyond the first `num_l1` that are worth loading."""

    def poll(self, claim: Claim) -> int | Pending:
        """How many blocks beyond `num_l1` are in L2, verified and leased; PENDING: more may come, ask again.

        Polling renews the promise: one that nobody polls lapses after the lease deadline.
        """

    def take(self, claim: Claim) -> Lease:
        """The lease of the promised blocks; empty if the promise lapsed. Release it when its copies have ended."""

    def cancel(self, claim: Claim) -> None:
        """The request went away. Idempotent."""

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT, causes: Causes | None = None) -> None:
        """Count a request's blocks by where they were, and its misses for that reason: once per request.

        `causes`: what became of those that are absent.
        """

    def wait_news(self, timeout: float) -> None:
        """Wait until a claim moved on, at most `timeout` seconds: for a caller with nothing else to do."""


class BlockStores(Protocol):
    """How computed blocks come to L2. No method raises for a storage failure.

    Only `reserve` may wait for an answer, once for a whole step and up to a deadline of its own.
    """

    is_late: bool
    """Whether the last `reserve` got no slots because no answer came in time."""

    @property
    def is_short(self) -> bool:
        """Whether the last `reserve` had no room for some blocks now, and left it to the caller to count them."""

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """L2 slots for all that a step stores: of each chain as many leading blocks as fit, None if not one does.

        Blocks already held need no slot and are left out of the reservation; so is a tail where none are kept.
        `may_retry`: if it `is_late` or `is_short`, the caller tries again, or counts what it drops.
        """

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The reservation's slots are filled: hash, publish and offer them to the lower tiers, in the background.

        `records` are its blocks in order, their checksums ignored; `epoch` is that in which they were computed.
        """

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """`seal` of all that a step has filled: one job, however many there are. Names and parents are as reserved."""

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        """The store failed or was called off: its slots are free again, nothing became visible.

        Not behind `seal`: of this process's tiers that is a ValueError, and the daemon passes it over.
        """

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        """As `abandon`, but a device may still write to the slots: they are not used again while this process lives."""


class TierUpkeep(Protocol):
    """The tiers as a whole: their memory, their figures, their deadlines and their end.

    No method raises for a storage failure. `locate` and `holds` may wait for an answer and are not for a scheduler's
    thread; `drain`, `reset` and `close` wait.
    """

    metrics: Metrics
    sends_later: bool
    """Whether what is said waits for company before it is sent: a caller that has nothing more to say calls `tick`."""

    @property
    def region(self) -> HostRegion | None:
        """L2's memory. Another one after the daemon was restarted; None before it was ever reached."""

    @property
    def epoch(self) -> int:
        """Counts resets: what was admitted before one is not stored after it."""

    @property
    def num_slots(self) -> int:
        """Slots in L2; 0 before the daemon was ever reached."""

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below L2."""

    @property
    def wanting(self) -> dict[str, str]:
        """What of the configuration is not there now → why; its blocks are misses. Thread-safe, and never waits."""

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step prefilled `num_tokens` in `seconds`, behind `position` others: what loading competes with."""

    def ended(self, end: RequestEnd) -> None:
        """A request has ended: what the order of eviction learns from."""

    def locate(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """Where the blocks are, without a claim; waits up to `timeout` seconds for tiers that nodes share."""

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks L2 holds, each by itself."""

    def tick(self) -> None:
        """Let deadlines pass; `ask` and `poll` do it too."""

    def reset(self) -> None:
        """Forget everything in every tier; stores and reads under way will not become visible."""

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store offered so far is found in L2 and, with `below`, written; False when time ran out."""

    def stats(self) -> dict[str, float]:
        """Every counter and gauge by its exposition name."""

    def check(self) -> None:
        """Raise AssertionError if a conservation law is broken."""

    def close(self, timeout: float = 5.0) -> None:
        """Let go of everything. Idempotent."""


class CacheTiers(BlockClaims, BlockStores, TierUpkeep, Protocol):
    """The tiers below L1. Implemented by `Hierarchy` and by the daemon's client, `RemoteTiers`."""


def bring(
    tiers: BlockClaims,
    hashes: Sequence[ChainHash],
    parent: ChainHash,
    deadline: float,
    *,
    block_size: int = 0,
    cancelled: Callable[[], bool] = bool,
) -> Lease | None:
    """Have leading blocks of a chain in L2, verified, and lease them; waits until `deadline` (monotonic clock).

    The lease is as long as the blocks that came in time, maybe empty. None: until the deadline other requests held all
    that waiting requests may hold. `block_size` as in `ask`. Nothing is counted as a lookup. Once `cancelled` returns
    True it waits no more; what has come by then is returned all the same, and is the caller's to release.
    """
    while True:
        claim = tiers.ask(hashes, parent, block_size=block_size)
        try:
            while isinstance(tiers.poll(claim), Pending) and (left := deadline - time.monotonic()) > 0:
                if cancelled():
                    break
                tiers.wait_news(min(left, _LOOK))
            lease = tiers.take(claim)
            if claim.refusal is not Outcome.NO_SLOT:
                return lease
        finally:
            tiers.cancel(claim)  # taken, it has nothing left to give up
        if cancelled() or (left := deadline - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, _REFUSED))

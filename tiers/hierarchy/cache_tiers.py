"""The contract of the tiers below L1, in this process or behind the node's daemon: claims, stores and upkeep.

A claim is a request's lookup and then the promise made to it: `submit` → `poll` until it is not PENDING → `lease`, or
`cancel` at any time. A store is `reserve` → the worker copies → `seal`, or `abandon`. `load_and_lease` is a claim for a
caller that can wait.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Condition, RLock
from typing import Final, NamedTuple, Protocol

from kvtier.tiers import L1, TIERS, BlockRecord, ChainHash, ChildBlock, Metrics, Outcome, tracing
from kvtier.tiers.host import HostRegion
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import RequestEnd

_LOOK: Final = 0.05  # seconds `load_and_lease` waits for progress before it checks its deadline
_REFUSED: Final = 0.01  # seconds before `load_and_lease` retries after a refusal


class Pending:
    """ "Poll again": blocks are still being loaded and the deadline has not passed."""

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = Pending()


@dataclass(slots=True, unsafe_hash=True)  # never mutated: see `value`
class Attribution:
    """Where the blocks of one lookup were at first: `found["l2"]`, or any other tier of the table by its name.

    `Attribution(4, l2=1, file=2, miss=1)`: AssertionError if the parts do not sum to `blocks`, KeyError: unknown tier.
    """

    blocks: int
    miss: int
    by_tier: Mapping[str, int] = field(hash=False)  # only tiers that had any
    loadable: int = field(compare=False, repr=False)  # blocks found below L1

    def __init__(self, blocks: int, *, miss: int = 0, **by_tier: int) -> None:
        self.blocks, self.miss = blocks, miss
        self.loadable = blocks - miss - by_tier.get(L1, 0)
        self.by_tier = found = {}
        for name, count in by_tier.items():
            if count:
                found[TIERS[name].name] = count
                miss += count
        if miss != blocks:
            raise AssertionError(f"attribution does not sum: {self}")

    def __getitem__(self, tier: str) -> int:
        """Blocks found in this tier; 0 if it had none."""
        return self.by_tier.get(TIERS[tier].name, 0)


class SplitPoint(NamedTuple):
    """The split point of an overlapped load: blocks before it are computed while those from it on are loaded."""

    block: int  # the first loaded block of the chain
    seconds: float  # until both are done, as measured rates predict


class Overlap(IntEnum):
    """Which part of the chain the claim loads."""

    NONE = 0  # the leading blocks; what follows them is computed
    ALLOWED = 1  # the caller may compute the front while the rest is loaded, if that is fastest: see `Claim.split`
    BACK = 2  # the part after a split point: the lookup was counted before, and loading it is decided
    WHOLE = 3  # all of it or nothing: a recurrent state is worth nothing without the others of its prefix


LooksBehind = Callable[["Claim", bytes], Sequence[ChildBlock]]
"""(claim, tokens, u32 little-endian) → stored blocks that follow the claim's last one and begin with these tokens."""


@dataclass(eq=False, slots=True)
class Claim:
    """A request's lookup, then the promise made to it. `submit` makes it; each implementation adds fields."""

    hashes: list[ChainHash]
    parent: ChainHash  # of hashes[0]
    num_l1: int  # leading blocks in L1: counted, not claimed
    block_size: int  # tokens that a loaded block spares; 0: it cannot be computed, so it is always worth loading
    overlap: Overlap = Overlap.NONE
    found: Attribution | None = None  # where the blocks were; None while a tier is still queried
    refusal: Outcome | None = None  # RECOMPUTE: final, computing is faster; NO_SLOT: others use the slots for now
    good_until: float = 0.0  # on the monotonic clock: from then on the caller may repeat a lookup that missed
    missing: Outcome | None = Outcome.ABSENT  # why the misses of `found` are misses; None: already counted
    # Set together with `found`: compute up to there, and claim the rest with `Overlap.BACK`. Then this claim covers
    # only the leading blocks in L2, and has no `children`. None: everything to load is claimed.
    split: SplitPoint | None = None
    promised: int | None = None  # the result of `poll`, if known at `submit`
    is_reported: bool = False  # a poll has returned the answer, or the caller read `promised`
    # Set together with `found`: finds `children` that begin with these tokens. Most callers never do.
    behind: LooksBehind | None = None
    # Set together with `found` if blocks are missing: why they left. Called once, when the misses are counted.
    why: Callable[[], Causes] | None = None
    trace: tracing.Trace | None = None  # of the lookup, if its request is traced

    @property
    def causes(self) -> Causes | None:
        """Valid once `found` is set: how many of the misses left which tier, and why. None: unknown here."""
        return None if self.why is None else self.why()

    @property
    def children(self) -> Sequence[ChildBlock]:
        """Valid once `found` is set: up to eight blocks of L2 or the slab that follow the last block found.

        If none was found they follow `parent`. The next block of the chain is left out. They are not promised:
        claim them to load one.
        """
        return () if self.behind is None else self.behind(self, b"")


class ProgressCondition(Condition):
    """The lock of claims in this process; notified when a claim moves on.

    Watchers are callbacks for those that cannot wait on a lock, such as an event loop.
    """

    def __init__(self) -> None:
        self.mutex = RLock()  # the lock itself: to enter the condition takes a call more
        super().__init__(self.mutex)
        self._watchers: list[Callable[[], None]] = []

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` at every notification. It runs under the lock, so it may only set a flag."""
        self._watchers.append(callback)

    def notify_all(self) -> None:
        """Wake every waiting thread and call every watcher."""
        super().notify_all()
        for callback in self._watchers:
            callback()


@dataclass(slots=True, unsafe_hash=True)  # not frozen: `StoringOp` extends it
class Wanted:
    """Consecutive new blocks of one chain that a step is to store; or the partial block at its end."""

    hashes: Sequence[ChainHash]
    parent: ChainHash  # of hashes[0]
    tenant: ChainHash  # the root of the chains with its cache_salt
    is_partial: bool = False  # `hashes` is one name, with fewer tokens than `block_size`
    is_rest: bool = False  # offered again after NO_SLOT: waits until a lower tier has its parent
    trace: tracing.Trace | None = field(default=None, compare=False)  # of the request, if it is traced


Filled = tuple[Reservation, Sequence[bytes], int]
"""A reservation with filled slots, the tokens of each of its blocks (u32 little-endian), and the epoch of the fill."""


def end_lookup(claim: Claim, promised: object) -> None:
    """End the span of a lookup that is answered."""
    if claim.trace is not None and claim.trace.is_open:
        refused = {} if claim.refusal is None else {"refused": str(claim.refusal)}
        blocks = {"blocks.promised": promised if isinstance(promised, int) else 0}
        claim.trace.end({**blocks, **tracing.found_in(claim.found, claim.causes), **refused})


class BlockClaims(Protocol):
    """How a request claims blocks. No method raises for a storage failure; only `wait_progress` waits."""

    def submit(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        overlap: Overlap = Overlap.NONE,
        trace: tracing.Trace | None = None,
    ) -> Claim:
        """Look up the blocks of a chain, and claim those beyond the first `num_l1` that are worth loading.

        What tiers read for it belongs below `trace`.
        """

    def poll(self, claim: Claim) -> int | Pending:
        """How many blocks beyond `num_l1` are in L2, verified and leased; PENDING: more may arrive, poll again.

        Polling renews the promise, which otherwise expires after the lease deadline.
        """

    def lease(self, claim: Claim) -> Lease:
        """The lease of the promised blocks; empty if the promise expired. Release it after its copies."""

    def cancel(self, claim: Claim) -> None:
        """The request no longer needs the claim. Idempotent."""

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT, causes: Causes | None = None) -> None:
        """Count a request's blocks by tier, and its misses under `missing`: once per request.

        `causes`: why the absent ones left.
        """

    def wait_progress(self, timeout: float) -> None:
        """Wait until a claim moved on, at most `timeout` seconds: for a caller with nothing else to do."""


class BlockStores(Protocol):
    """How computed blocks are stored in L2. No method raises for a storage failure.

    Only `reserve` may wait for an answer, once for a whole step and up to a deadline of its own.
    """

    offers_again: bool
    """Set by the caller: while there is a tier below L2 it retries what finds no slot, else it counts it at once."""

    is_late: bool
    """Whether the last `reserve` got no slots because no answer came in time."""

    @property
    def is_short(self) -> bool:
        """Whether the last `reserve` lacked slots for some blocks and left counting them to the caller."""

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """L2 slots for all that a step stores: of each chain as many leading blocks as fit, None if not even one.

        Blocks that are in L2 need no slot and are left out of the reservation, as are partial blocks if they are off.
        `may_retry`: if it `is_late` or `is_short`, the caller retries, or counts what it drops.
        """

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The reservation's slots are filled: hash, publish and offer them to the lower tiers, in the background.

        `records` are its blocks in order, their checksums ignored; `epoch`: when they were computed.
        """

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """`seal` for everything a step has filled, as one job. Names and parents are as reserved."""

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        """The store failed or was cancelled: its slots become free, nothing is published.

        Not after `seal`: the tiers of this process raise ValueError, the daemon's client ignores it.
        """

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        """As `abandon`, but a device may still write to the slots: they are not used again while this process lives."""


class TierUpkeep(Protocol):
    """The tiers as a whole: memory, metrics, deadlines, shutdown.

    No method raises for a storage failure. `locate` and `holds` may wait for an answer: do not call them on a
    scheduler's thread. `drain`, `reset` and `close` wait.
    """

    metrics: Metrics
    sends_later: bool
    """Whether messages are batched before they are sent: a caller calls `tick` after its last one."""

    @property
    def region(self) -> HostRegion | None:
        """L2's memory. A new one after the daemon restarted; None until it was first reached."""

    @property
    def epoch(self) -> int:
        """Counts resets: a block computed before a reset is not stored after it."""

    @property
    def num_slots(self) -> int:
        """Slots in L2; 0 until the daemon was first reached."""

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below L2."""

    @property
    def wanting(self) -> dict[str, str]:
        """Configured tiers that are unavailable → why; their blocks are misses. Thread-safe, never waits."""

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step prefilled `num_tokens` in `seconds`, after `position` others: loading is weighed against it."""

    def ended(self, end: RequestEnd) -> None:
        """A request has finished; the eviction policy learns from it."""

    def locate(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """Where the blocks are, without a claim; waits up to `timeout` seconds for shared tiers."""

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """For each block, whether L2 holds it."""

    def tick(self) -> None:
        """Expire what is past its deadline; `submit` and `poll` do it too."""

    def reset(self) -> None:
        """Forget everything in every tier; stores and reads under way will not become visible."""

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store is published in L2 and, with `below`, written to lower tiers; False at timeout."""

    def stats(self) -> dict[str, float]:
        """Every counter and gauge by its exposition name."""

    def check(self) -> None:
        """Raise AssertionError if a conservation law is broken."""

    def close(self, timeout: float = 5.0) -> None:
        """Release everything. Idempotent."""


class CacheTiers(BlockClaims, BlockStores, TierUpkeep, Protocol):
    """The tiers below L1. Implemented by `Hierarchy` and by the daemon's client, `RemoteTiers`."""


def load_and_lease(
    tiers: BlockClaims,
    hashes: Sequence[ChainHash],
    parent: ChainHash,
    deadline: float,
    *,
    block_size: int = 0,
    cancelled: Callable[[], bool] = bool,
) -> Lease | None:
    """Load leading blocks of a chain into L2, verify and lease them; waits until `deadline` (monotonic clock).

    The lease covers the blocks that arrived in time, maybe none. None: until the deadline other requests used all slots
    that waiting requests may lease. `block_size` as in `submit`. Counts no lookup. Once `cancelled` returns True it
    stops waiting; it still returns the blocks that arrived, and the caller releases them.
    """
    while True:
        claim = tiers.submit(hashes, parent, block_size=block_size)
        try:
            while isinstance(tiers.poll(claim), Pending) and (left := deadline - time.monotonic()) > 0:
                if cancelled():
                    break
                tiers.wait_progress(min(left, _LOOK))
            lease = tiers.lease(claim)
            if claim.refusal is not Outcome.NO_SLOT:
                return lease
        finally:
            tiers.cancel(claim)  # no effect after `lease`
        if cancelled() or (left := deadline - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, _REFUSED))

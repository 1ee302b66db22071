"""What the hierarchy needs of a tier below host memory: look up, read, write, all in batches, all verified."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeVar, dataclass_transform

if TYPE_CHECKING:  # most that import this need no arrays
    import numpy as np
    from numpy.typing import NDArray

ChainHash = bytes
"""32 bytes naming a block and everything before it (`chain.py`). Never truncated."""


Direction = Literal["read", "write"]
"""From a tier towards the engine, or away from it."""

BATCH_BYTES: Final = 8 << 20
"""Payload of one `read` or `write` at most, unless one block alone has more: as large as a call that the slab makes."""


class Outcome(StrEnum):
    """What became of one block in a batch. Everything but OK is a miss or a dropped store, counted under this name."""

    OK = "ok"
    ABSENT = "absent"  # no tier has it
    EVICTED = "evicted"  # was there at lookup, gone at read
    KEY_MISMATCH = "key_mismatch"  # the record found is another block's
    CHECKSUM = "checksum"  # the bytes are not those stored
    IO_ERROR = "io_error"  # the storage said no, or returned fewer bytes
    TIMEOUT = "timeout"  # the deadline passed first
    FULL = "full"  # no room and nothing evictable, or the disk is full
    QUEUE_FULL = "queue_full"  # the bounded store queue refused it
    QUOTA = "quota"  # its tenant has all the host memory it may have, and uses it
    NO_SLOT = "no_slot"  # no L2 slot to read into: all leased or filling
    PARENT_FAILED = "parent_failed"  # an earlier block of its chain failed, so it could never be reached
    BREAKER_OPEN = "breaker_open"  # the tier is detached for now
    NOT_ADMITTED = "not_admitted"  # seen fewer times than the admission threshold
    RECOMPUTE = "recompute"  # computing it again is faster than loading it
    SKIPPED = "skipped"  # of a prompt that was computed and loaded at once, from both ends: the front came first
    ABORTED = "aborted"  # its request went away first
    COPY_FAILED = "copy_failed"  # a d2h or h2d copy failed
    EPOCH = "epoch"  # admitted before the last reset
    CLOSED = "closed"  # the tier is shutting down
    UNSUPPORTED = "unsupported"  # of a call or a cache that blocks cannot hold
    OUTRANKED = "outranked"  # by the learned order, what would have to go is needed sooner


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen class of few fields, made by hundreds: real `frozen=True` takes four times as long to make one."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@value
class BlockRecord:
    """What is known of a stored block besides its bytes: enough to verify it and to rebuild its chain."""

    chain_hash: ChainHash
    parent: ChainHash
    tokens: bytes  # u32 little-endian, one per token
    checksum: int  # xxh3-64 of the payload (`checksum.py`)


class ChildBlock(NamedTuple):
    """A held block by what a partial hit needs: a request may share its leading tokens with it.

    Its name may stand for more (an image, an adapter): a caller that takes its KV checks `is_named_by`.
    """

    chain_hash: ChainHash
    tokens: bytes  # u32 little-endian, as hashed; fewer than a block has if it is partial


@dataclass(frozen=True, slots=True)
class Changes:
    """What brings a reader's idea of a tier up to date: forget `gone`, then learn `stored`.

    `gone` names only blocks that the reader knows, `stored` only blocks that it does not, in the order they became
    findable. With `cleared`, `gone` is all the reader knew.
    """

    gone: list[ChainHash]
    stored: list[BlockRecord]
    cleared: bool = False


class Lineage(NamedTuple):
    """Which blocks a tier holds, in no order, and what is before each, as `[n, 4]` uint64; some may have left."""

    names: "NDArray[np.uint64]"
    parents: "NDArray[np.uint64]"

    def pairs(self) -> Iterator[tuple[ChainHash, ChainHash]]:
        """The same as Python objects."""
        names, parents = self.names.tobytes(), self.parents.tobytes()
        return ((names[at : at + 32], parents[at : at + 32]) for at in range(0, len(names), 32))


class BlockShape(Protocol):
    """What a tier needs to know of a model's blocks. A `KVShape` says it."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""


class StoragePlace(NamedTuple):
    place: str  # a directory, or the server's address
    used: int  # bytes, by all users
    limit: int | None  # bytes that there may be; None: no bound is set
    is_own: bool = False  # a file of the tier alone, which grows as it is filled: a slab


class ChangeFeed(Protocol):
    """The blocks that a tier adds and removes, for one reader. Thread-safe; no method waits for I/O."""

    def listen(self) -> None:
        """Keep a log from now on, for a reader that knows no block. A second call starts over."""

    @property
    def waiting(self) -> bool:
        """Whether there may be changes for the reader."""

    def take(self, limit: int) -> Changes:
        """The blocks that the reader has to forget and, up to `limit`, to learn. None before `listen`."""

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns the names of blocks that the reader knows."""


class TenantBound(NamedTuple):
    tenant: ChainHash  # the root of its chains
    num_bytes: int  # that it may have in a tier


TenantBounds = Callable[[ChainHash], TenantBound | None]
"""The bound of the tenant that stored a block, which is in host memory now; None: it has none. No I/O."""


class Tier(ABC):
    """A tier below host memory. Thread-safe. No method raises for a storage failure: failures are outcomes.

    `lookup` and `holds` are index-only, without I/O, and may be called on the scheduler's thread.
    `read` and `write` block; the hierarchy calls them from its I/O threads and holds the deadline.
    What is not abstract is a capability: a tier that lacks it inherits what is right then.
    """

    @abstractmethod
    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks of the chain are held."""

    @abstractmethod
    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks are held, each by itself."""

    @abstractmethod
    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """Read each block into its buffer (slot_bytes each, writable) and verify its whole key and checksum.

        A BlockRecord: exactly the bytes stored under that key. An Outcome: why not, and the buffer holds rubbish.
        """

    @abstractmethod
    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """Store consecutive blocks of one chain; evicts as its size demands. OK also for a block already held whole."""

    @abstractmethod
    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Forget blocks (found bad, or on request)."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every block."""

    @abstractmethod
    def probe(self, direction: Direction) -> bool:
        """One small operation on the storage itself: does it answer, and is it still ours? For an open breaker."""

    @abstractmethod
    def stats(self) -> Mapping[str, int]:
        """Counts of its own since it was opened, `evicted` among them, and `slots_{state}` now."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if the tier's conservation law does not hold."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks once the last running operation has ended; returns at once; idempotent."""

    # Storage that nodes share.

    is_shared: ClassVar[bool] = False
    """Others store in it too: its `lookup` knows only what it wrote itself, or learned by `locate`."""

    @property
    def knows_all(self) -> bool:
        """Whether `locate` would find no more than `lookup` does now. No I/O."""
        return not self.is_shared

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        """Query the storage for how many leading blocks it has; `lookup` knows them then. An Outcome: why not."""
        return self.lookup(hashes)

    stays_open: ClassVar[bool] = False
    """Opening it anew could not repair its writes: each request is independent."""

    # What the maker of its namespace computes of a few tokens (`naming/kv_probe.py`). All three may block, and raise
    # TierUnavailable if the storage does not answer: they are called while the tier is opened.

    def kv_probe(self) -> bytes | None:
        """The packed probe that it keeps; None if there is none."""
        return None

    def keep_kv_probe(self, packed: bytes) -> None:
        """Keep it, unless there is one by now."""
        return

    def set_kv_probe(self, packed: bytes) -> None:
        """Each holder's blocks are its own: from now on take them only from holders with an equal KV probe."""
        return

    def compares_kv(self, compare: Callable[[], None]) -> None:
        """Call `compare` when the storage may keep another probe: before blocks are read or written then.

        It keeps the probe if there is none. KVMismatch: another model's KV is there. TierUnavailable.
        """
        return

    # Its changes, and its order of eviction.

    change_feed: ChangeFeed | None = None
    """The feed of its changes. Of a shared store: blocks that this process wrote or read there."""

    eviction_log: Any = None
    """The `EvictionLog` (`tiers/pool`) of its blocks, with times and reasons; None: it keeps none."""

    def ended(self, end: Any) -> None:
        """A request has ended, by this `ClassifiedEnd` (`tiers/reuse`): for the order of eviction. No I/O."""
        return

    bounds: "TenantBounds | None" = None
    """Set by the holder: bounds of tenants here. A tier without quotas ignores them."""

    breaker_limits: tuple[int, float] = 5, 1.0
    """Set by the holder, at any time, for breakers of the tier's own: failures in a row; seconds to the first probe."""

    def used_by(self, tenant: ChainHash) -> int:
        """Bytes of the tenant's blocks that were stored under a bound since the tier was opened. No I/O."""
        return 0

    def children(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        """Up to `limit` held blocks of this parent that begin with `start`. Index-only; some may be left out."""
        return []

    def lineage(self) -> Lineage | None:
        """Every block; None of a shared store. No I/O; the tier's lock is held for some blocks at a time."""
        return None

    def room(self) -> Sequence[StoragePlace]:
        """How full its storage is, by the last check of each place. Never waits for a server or a disk."""
        return ()


def require_space(fingerprint: bytes, slot_bytes: int, block_size: int) -> None:
    """ValueError for blocks that no tier could hold."""
    if len(fingerprint) != 32 or slot_bytes < 1 or block_size < 1:
        raise ValueError("fingerprint must be 32 bytes; slot_bytes and block_size at least 1")


def require_buffers(count: int, buffers: Sequence[memoryview], slot_bytes: int) -> None:
    """ValueError unless each of `count` blocks has its buffer of `slot_bytes`."""
    if len(buffers) != count or any(buffer.nbytes != slot_bytes for buffer in buffers):
        raise ValueError(f"one buffer of {slot_bytes} bytes per block")


def require_records(
    records: Sequence[BlockRecord], payloads: Sequence[memoryview], slot_bytes: int, block_size: int
) -> None:
    """ValueError for a record that is none of blocks of `block_size` tokens, or without `slot_bytes` of payload."""
    if len(payloads) != len(records):
        raise ValueError(f"one buffer of {slot_bytes} bytes per block")
    for record, payload in zip(records, payloads, strict=True):
        if payload.nbytes != slot_bytes:
            raise ValueError(f"one buffer of {slot_bytes} bytes per block")
        if len(record.chain_hash) != 32 or len(record.parent) != 32:
            raise ValueError("chain_hash and parent must be 32 bytes")
        if len(record.tokens) > 4 * block_size or len(record.tokens) % 4:
            raise ValueError(f"tokens must be at most {block_size} u32")


@dataclass(frozen=True, slots=True)
class ConfiguredTier:
    """A tier below host memory as it is configured, not open yet."""

    open: Callable[[], Tier]  # raises TierUnavailable or OSError if trying again later is right
    deadline: float  # seconds one operation may take: no less than the tier gives itself for a whole batch
    joined: int = 1  # blocks of small reads that one `read` may bring together: it has them in flight at once
    takes_stores: bool = True  # False: nothing is offered to `write`


_EVERY: Final = 10.0  # seconds between two looks, at least


class LastRoom:
    """The last result of a check of storage, which runs regularly in the background. Thread-safe."""

    def __init__(self, look: Callable[[], Iterable[StoragePlace]], known: Sequence[StoragePlace] = ()) -> None:
        """`look` may wait for ever: then no other check starts, and the `known` result stays."""
        self._look = look
        self._lock = Lock()  # guards what follows
        self._latest = tuple(known)
        self._is_looking = False
        self._due = time.monotonic() + _EVERY if known else 0.0

    def latest(self) -> Sequence[StoragePlace]:
        """Returns at once; an old result starts a check. Empty until the first check has ended."""
        with self._lock:
            if not self._is_looking and time.monotonic() >= self._due:
                self._is_looking = True
                Thread(target=self._look_again, name="kvtier-room", daemon=True).start()
            return self._latest

    def _look_again(self) -> None:
        found: tuple[StoragePlace, ...] = ()
        try:
            found = tuple(self._look())
        finally:
            with self._lock:
                self._latest, self._is_looking, self._due = found, False, time.monotonic() + _EVERY

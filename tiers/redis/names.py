"""Blocks' keys in Redis (docs/format.md), and when they expire."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from threading import Lock
from typing import Final

from kvtier.tiers import ChainHash
from kvtier.tiers.reuse import MOST_AHEAD, ClassifiedEnd
from kvtier.tiers.shared import RecordForm, format_epoch


class Keyspace:
    """Keys and records of one model's blocks, below a key prefix, in the form that [redis] configures. Immutable.

    Every record of a namespace has the same length, `value_bytes`: a head of `head_bytes`, then `slot_bytes` of
    payload. So a reader knows what to expect before it reads, and refuses any other length. Records of a form that
    compresses are at most as long, and refused if they are not as long as their head says.
    """

    def __init__(self, prefix: str, form: RecordForm, slot_bytes: int, block_size: int) -> None:
        self.form = form
        self.slot_bytes = slot_bytes
        self.block_size = block_size
        self._stem = f"{prefix}:{form.name}:".encode()
        self.head_bytes = form.head_bytes
        self.value_bytes = self.head_bytes + slot_bytes

    @property
    def epoch_key(self) -> bytes:
        return self._stem + b"epoch"

    @property
    def probe_key(self) -> bytes:
        return self._stem + b"probe"

    def kv_probe_key(self, epoch: int) -> bytes:
        """For the KV probe of the epoch's first process."""
        return self._stem + b"kv-probe:" + format_epoch(epoch)

    def keys(self, hashes: Iterable[ChainHash], epoch: int) -> list[bytes]:
        """`{prefix}:{the form's name}:{epoch}:{the block's name}` of each: all of one length."""
        stem = self._stem + format_epoch(epoch) + b":"
        return [stem + name for name in self.form.names(hashes)]


_MOST_WAITING: Final = 65_536  # blocks; of more the oldest keep the expiry they have


class LearnedExpiries:
    """Expiries learned from ends of requests that were not sent to the servers yet. Thread-safe, no I/O."""

    def __init__(self, ttl: float) -> None:
        """`ttl`: the longest time that a block is kept, in seconds."""
        self._ttl = ttl
        self._scale = min(1.0, ttl / (4 * MOST_AHEAD))
        self._lock = Lock()
        self._due: OrderedDict[ChainHash, int] = OrderedDict()  # of blocks that are stored: milliseconds
        self._early: OrderedDict[ChainHash, int] = OrderedDict()  # of blocks whose request ended before the write

    def ended(self, end: ClassifiedEnd, are_stored: Sequence[bool]) -> None:
        """A request has ended. `are_stored`: which of its blocks are known to be stored."""
        last = self._expiry(end, end.kind)
        head = self._expiry(end, end.head_kind) if end.num_head else last
        with self._lock:
            for depth, (name, is_stored) in enumerate(zip(end.names, are_stored, strict=True)):
                waiting = self._due if is_stored else self._early
                # A chain's end goes first: blocks without their parent cannot be reached.
                waiting[name] = max(1, (head if depth < end.num_head else last) - depth)
                waiting.move_to_end(name)
            for waiting in (self._due, self._early):
                while len(waiting) > _MOST_WAITING:
                    waiting.popitem(last=False)

    def _expiry(self, end: ClassifiedEnd, kind: int) -> int:
        """Milliseconds that blocks of this class are kept."""
        return int(1000 * (self._ttl - self._scale * (MOST_AHEAD - end.order.ahead(kind))))

    def stored(self, hashes: Iterable[ChainHash]) -> None:
        """These were just written, with the longest expiry."""
        with self._lock:
            for name in hashes:
                if (milliseconds := self._early.pop(name, None)) is not None:
                    self._due[name] = milliseconds

    def take(self, count: int) -> dict[ChainHash, int]:
        """Remove and return up to `count` blocks and the milliseconds after which each expires."""
        with self._lock:
            names = list(islice(self._due, count))
            return {name: self._due.pop(name) for name in names}

    def clear(self) -> None:
        """No such block is stored any more."""
        with self._lock:
            self._due.clear()
            self._early.clear()

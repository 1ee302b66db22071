"""PrefixIndex: which worker holds how long a prefix of a prompt, and in which tier: what KV events add up to."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgpack
import numpy as np
import xxhash

from kvtier.service.events import holders as interpreted
from kvtier.service.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, as_u64
from kvtier.tiers import TIERS, TierKind, naming
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import MAX_BLOCKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtier.service.events.holders import Holders

_log = logging.getLogger(__name__)

_PARTIAL: Final = ("sliding", "mamba", "chunked", "cross")  # kinds of KV groups that drop part of a prefix
_MOST: Final = 1 << 29  # blocks of an index
_PIECE: Final = 4096  # blocks forgotten at a time
_LOG_PAUSE: Final = 1.0  # seconds between two lines of one kind
_U64: Final = 2**64 - 1


def prompt_hashes(
    tokens: naming.Tokens, block_size: int, lora_name: str | None = None, namespace: str | None = None
) -> list[int]:
    """A prompt's blocks as an index names them: Dynamo's sequence hashes, of the full blocks."""
    return naming.dynamo_block_hashes(tokens, block_size, naming.dynamo_seed(lora_name, namespace))


def new_holders(num_tiers: int) -> "Holders":
    """Compiled where it was built, else interpreted."""
    form: Any = extension("kvtier.service.events.holders_compiled") or interpreted
    made: Holders = form.Holders(num_tiers)
    return made


class _Worker:
    def __init__(self, number: int) -> None:
        self.number = number  # in `Holders`
        self.group: int | None = None  # the KV group whose blocks count
        self.has_forgotten = False  # its oldest were dropped here: later events of them are no contradiction


class Feeds(NamedTuple):
    """The workers of some replicas, in one order; None: there is none, or what it says cannot be believed now."""

    engines: Sequence[str | None]
    nodes: Sequence[str | None]
    tellers: Sequence[str | None]  # who says whether the replica has blocks in a tier that all share


class PrefixIndex:
    """Blocks by Dynamo's sequence hash, computed from the events' token ids, with who holds each where. Thread-safe.

    The index believes what a worker announces, and raises nothing for it. An event that cannot be true is skipped,
    counted in `counts` by its reason, and logged with the probable cause: at most one line a second for each reason, as
    an error if `strict`. A worker of several KV groups counts by the first of them that keeps whole prefixes.

    All workers together have at most `max_blocks`, each counted for every worker that holds it. Beyond that the worker
    with the most forgets its oldest (`num_forgotten`), so that it costs the others nothing.

    Law (`check`): a block's holders are the workers with a name for it, in the tiers where they have it. A
    look-up costs the prefix and the sets of its holders; a worker that goes costs each of its names once (`drop`).
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int = MAX_BLOCKS,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.counts: Counter[str] = Counter()
        self._media = tuple(kind.medium for kind in TIERS.values())  # nearest first
        self._tier_of = _words(TIERS.values())
        self._every = (1 << len(self._media)) - 1  # bits of all tiers
        self._shared = sum(1 << tier for tier, kind in enumerate(TIERS.values()) if kind.is_shared)
        self.num_forgotten = 0  # blocks, for lack of room
        self._max_blocks = min(max_blocks, _MOST)
        self._level = logging.ERROR if strict else logging.WARNING
        self._clock = clock
        self._log_from: dict[str, float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._workers: dict[str, _Worker] = {}
        self._holders = new_holders(len(self._media))
        self._numbered: tuple[Feeds, NDArray[np.int64]] | None = None  # workers' numbers, while they stay the same

    @property
    def num_blocks(self) -> int:
        return self._holders.num_blocks

    def holdings(self, worker: str) -> dict[str, int]:
        with self._lock:
            known = self._workers.get(worker)
            return {} if known is None else self._by_medium(self._holders.counts(known.number))

    def apply(self, worker: str, event: KVEvent) -> None:
        """Apply what a worker announced. The caller keeps the order in which it did."""
        if isinstance(event, AllBlocksCleared):  # of vLLM, whose events name KV groups, only what is on the GPU
            with self._lock:
                known = self._worker(worker)
            self._release_all(known, self._every if known.group is None else 1)
            known.has_forgotten = known.has_forgotten and self._holders.size(known.number) > 0
            return
        with self._lock:
            known = self._worker(worker)
            tier = self._tier_of.get(event.medium)
            if tier is None:
                self._skip("medium", f"{worker}: medium {event.medium!r:.40}: known are {', '.join(self._media)}")
            elif not self._is_partial(known, event):
                if isinstance(event, BlockRemoved):
                    self._remove(worker, known, tier, event)
                else:
                    self._store(worker, known, tier, event)
                    self._make_room()

    def drop(self, worker: str) -> None:
        """Forget a worker. Look-ups show it no more at once; its names go in pieces, a millisecond of the lock each."""
        with self._lock:
            known = self._workers.pop(worker, None)
            if known is None:
                return
            self._numbered = None
            self._holders.shut(known.number)
        self._release_all(known, self._every)

    def matches(self, sequence_hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each worker with the first block: its leading blocks, by the best tier of each."""
        with self._lock:
            names = {known.number: name for name, known in self._workers.items()}
            found = self._holders.leading(list(sequence_hashes))
            return {names[worker]: self._by_medium(counts) for worker, counts in found}

    def prefixes(self, sequence_hashes: Sequence[int], feeds: Feeds) -> "NDArray[np.uint32]":
        """`[replicas, 8]`: leading blocks that a replica need not compute, by the tier that has them, nearest first.

        That is its engine's prefix, what its node has beyond that, and what any worker has beyond both in tiers
        that all share, if the replica's own publisher has blocks there.
        """
        with self._lock:
            if self._numbered is None or self._numbered[0] is not feeds:
                self._numbered = feeds, self._numbers(feeds)
            found: NDArray[np.uint32] = self._holders.prefixes(list(sequence_hashes), self._numbered[1], self._shared)
            return found.reshape(-1, 8)

    def _numbers(self, feeds: Feeds) -> "NDArray[np.int64]":
        numbers: dict[str | None, int] = {name: each.number for name, each in self._workers.items()}
        rows = [numbers.get(worker, -1) for each in zip(*feeds, strict=True) for worker in each]
        return np.array(rows, np.int64)

    def check(self) -> None:
        with self._lock:
            self._holders.check()
            assert self._holders.num_names <= self._max_blocks, "names of all workers"

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            self._workers[name] = _Worker(self._holders.open())
            self._numbered = None
        return self._workers[name]

    def _by_medium(self, counts: Iterable[int]) -> dict[str, int]:
        return {medium: count for medium, count in zip(self._media, counts, strict=False) if count}

    def _is_partial(self, worker: _Worker, event: BlockStored | BlockRemoved) -> bool:
        """Whether the event is of a KV group that does not count: it drops part of a prefix, or another one counts."""
        if event.group_idx is None:
            return False
        if worker.group is None and isinstance(event, BlockStored):
            kind = event.kv_cache_spec_kind or ""
            if event.kv_cache_spec_sliding_window is None and not kind.startswith(_PARTIAL):
                worker.group = event.group_idx
        return worker.group != event.group_idx

    def _store(self, who: str, worker: _Worker, tier: int, event: BlockStored) -> None:
        num_blocks = len(event.block_hashes)
        if event.block_size != self.block_size or len(event.token_ids) != num_blocks * self.block_size:
            self._skip(
                "block_size",
                f"{who}: {len(event.token_ids)} tokens in {num_blocks} blocks of {event.block_size}: this index is of "
                f"full blocks of {self.block_size}; start both sides with one block size",
            )
            return
        parent = None
        if event.parent_block_hash is not None:
            parent = self._holders.sequence_of(worker.number, event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            if worker.has_forgotten:
                self.counts["forgotten"] += 1
                return
            self._skip(
                "unknown_parent",
                f"{who}: blocks behind an unknown parent {as_u64(event.parent_block_hash):#x}: events were missed, or "
                "its hash seed (PYTHONHASHSEED) or block size has changed",
            )
            return
        seed, sequences = self._sequences(event, parent)
        for place in self._holders.store(worker.number, event.block_hashes, sequences, tier, seed):
            name = as_u64(event.block_hashes[place])
            self._skip("other_tokens", f"{who}: block {name:#x} has other tokens now: {_UNSTABLE}")

    def _sequences(self, event: BlockStored, parent: tuple[int, int] | None) -> tuple[int, list[int]]:
        """The seed of the chain's hashes if it has a namespace, else 0; and the blocks' sequence hashes."""
        before, namespaced = (None, 0) if parent is None else parent
        named, keys = event.lora_name, [one or () for one in event.extra_keys or ()]
        if named is not None:  # the adapter's name comes first, and is a field of its own
            keys = [each[1:] if each and each[0] == named else each for each in keys]
        if parent is None and keys:
            namespace = next((key for key in keys[0] if isinstance(key, str)), None)
            if namespace is not None:
                keys[0] = tuple(key for key in keys[0] if key is not namespace)
                namespaced = naming.dynamo_seed(event.lora_name, namespace)
        seed = namespaced or naming.dynamo_seed(event.lora_name)
        if not any(keys):
            return namespaced, naming.dynamo_block_hashes(event.token_ids, self.block_size, seed, before)
        hashes = naming.dynamo_local_hashes(event.token_ids, self.block_size, seed)
        for block, key in enumerate(keys):
            if key:  # an image, an embedding: the same tokens, another block
                words = event.token_ids[block * self.block_size : (block + 1) * self.block_size]
                digest = xxhash.xxh3_64_intdigest(msgpack.packb(key), 2)
                hashes[block] = xxhash.xxh3_64_intdigest(naming.pack_tokens(words), (seed + digest) & _U64)
        return namespaced, naming.dynamo_sequence_hashes(hashes, before)

    def _remove(self, who: str, worker: _Worker, tier: int, event: BlockRemoved) -> None:
        unknown = self._holders.remove(worker.number, event.block_hashes, tier)
        if worker.has_forgotten:
            self.counts["forgotten"] += len(unknown)
            return
        for place in unknown:
            self._skip(
                "unknown_removal",
                f"{who}: removal of {as_u64(event.block_hashes[place]):#x}, which was not in {self._media[tier]}: "
                f"events were missed, or {_UNSTABLE}",
            )

    def _make_room(self) -> None:
        """If there are too many blocks, the worker with the most forgets its oldest, and some more than it must."""
        while (num_over := self._holders.num_names - self._max_blocks) > 0:
            who, worker = max(self._workers.items(), key=lambda each: self._holders.size(each[1].number))
            most = num_over + min(_PIECE, self._max_blocks // 16)
            if not (done := self._holders.forget(worker.number, most)):
                return  # the rest is of workers that are being dropped
            self.num_forgotten += done
            worker.has_forgotten = True
            self._warn(
                "forgotten",
                f"{who}: more blocks than the {self._max_blocks} of [router] max_blocks: its oldest are forgotten; "
                f"raise it, or find out why there are so many ({self.num_forgotten} so far)",
            )

    def _release_all(self, worker: _Worker, tiers: int) -> None:
        """Drop what it has in these tiers, the last stored first. In pieces, so that others get the lock in between."""
        after = -1
        while after:
            with self._lock:
                after = self._holders.release(worker.number, tiers, _PIECE, after)

    def _skip(self, reason: str, line: str) -> None:
        self.counts[reason] += 1
        self._warn(reason, f"{line} ({self.counts[reason]} of this kind, skipped)", self._level)

    def _warn(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        if self._clock() >= self._log_from.get(kind, 0.0):
            self._log_from[kind] = self._clock() + _LOG_PAUSE
            _log.log(level, "KV events: %s", line)


def _words(kinds: Iterable[TierKind]) -> dict[str | None, int]:
    """The place of each tier, by every word that a publisher may have for its medium. No word means the first."""
    words: dict[str | None, int] = {None: 0}
    for place, kind in enumerate(kinds):
        words |= dict.fromkeys((kind.medium, *kind.aliases), place)
    return words


_UNSTABLE: Final = "its hashes are not stable: give it a fixed PYTHONHASHSEED"

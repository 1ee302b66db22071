"""PrefixIndex: which worker holds how long a prefix of a prompt, and in which tier: what KV events add up to."""

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, repeat, takewhile
from typing import Final

import msgpack
import xxhash

from kvtier.service.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KVEvent, as_u64
from kvtier.tiers import TIERS, TierKind
from kvtier.tiers.config import MAX_BLOCKS
from kvtier.tiers.naming import Tokens, dynamo_local_hashes, dynamo_seed, dynamo_sequence_hashes, pack_tokens

_log = logging.getLogger(__name__)

_PARTIAL: Final = ("sliding", "mamba", "chunked", "cross")  # kinds of KV groups that drop part of a prefix
_MAX_MASKS: Final = 65_536  # remembered, so that equal ones are one object
_PIECE: Final = 4096  # blocks forgotten at a time
_LOG_PAUSE: Final = 1.0  # seconds between two lines of one kind
_LINK: Final = struct.Struct("<QQ")
_DYNAMO: Final = dynamo_seed()
_U64: Final = 2**64 - 1


def prompt_hashes(
    tokens: Tokens, block_size: int, lora_name: str | None = None, namespace: str | None = None
) -> list[int]:
    """A prompt's blocks as an index names them: Dynamo's sequence hashes, of the full blocks."""
    return dynamo_sequence_hashes(dynamo_local_hashes(tokens, block_size, dynamo_seed(lora_name, namespace)))


class _Worker:
    def __init__(self, slot: int, num_tiers: int) -> None:
        self.slot = slot
        self.shift = slot * num_tiers  # of its bits in a mask
        self.names: dict[int, int] = {}  # the engine's name → sequence hash, of blocks it holds in any tier
        self.counts = [0] * num_tiers  # names by tier
        # Of blocks that have several names: each one's tiers, as bits. None stands for the name that was first.
        self.several: dict[int, dict[int | None, int]] = {}
        self.group: int | None = None  # the KV group whose blocks count
        self.has_forgotten = False  # its oldest were dropped here: later events of them are no contradiction

    def key(self, name: int, sequence: int) -> int | None:
        return name if name in self.several[sequence] else None


class PrefixIndex:
    """Blocks by Dynamo's sequence hash, computed from the events' token ids, with who holds each where. Thread-safe.

    The index believes what a worker announces, and raises nothing for it. An event that cannot be true is skipped,
    counted in `counts` by its reason, and logged with the probable cause: at most one line a second for each reason, as
    an error if `strict`. A worker of several KV groups counts by the first of them that keeps whole prefixes.

    All workers together have at most `max_blocks`, each counted for every worker that holds it. Beyond that the worker
    with the most forgets its oldest (`num_forgotten`), so that it costs the others nothing.

    Law (`check`): a block's mask has a bit for a worker and tier exactly if that worker has a name for it there. No
    other place says so, and a block costs the same in one tier and in all.
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
        self._width = len(self._media)  # bits of one worker in a mask
        self._every = (1 << self._width) - 1  # those bits
        self._in = [[tier for tier in range(self._width) if bits >> tier & 1] for bits in range(self._every + 1)]
        self.num_forgotten = 0  # blocks, for lack of room
        self._max_blocks = max_blocks
        self._level = logging.ERROR if strict else logging.WARNING
        self._clock = clock
        self._log_from: dict[str, float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._workers: dict[str, _Worker] = {}
        self._slots: list[str | None] = []  # whose bits they are; None: nobody's, or of one that is being dropped
        self._free: list[int] = []
        self._num_names = 0  # of all workers
        self._masks: dict[int, int] = {}  # sequence hash → bit for each worker and tier
        self._shared: dict[int, int] = {}  # a mask → the one object that stands for it
        self._seeds: dict[int, int] = {}  # sequence hash → seed of its chain's hashes, of chains with a namespace

    @property
    def num_blocks(self) -> int:
        return len(self._masks)

    def holdings(self, worker: str) -> dict[str, int]:
        with self._lock:
            known = self._workers.get(worker)
            return {} if known is None else {m: n for m, n in zip(self._media, known.counts, strict=True) if n}

    def apply(self, worker: str, event: KVEvent) -> None:
        """Apply what a worker announced. The caller keeps the order in which it did."""
        if isinstance(event, AllBlocksCleared):  # of vLLM, whose events name KV groups, only what is on the GPU
            with self._lock:
                known = self._worker(worker)
            self._release_all(known, self._every if known.group is None else 1)
            known.has_forgotten = known.has_forgotten and bool(known.names)
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
        with self._lock:
            known = self._workers.pop(worker, None)
            if known is None:
                return
            self._slots[known.slot] = None
        self._release_all(known, self._every)
        with self._lock:
            self._free.append(known.slot)

    def matches(self, sequence_hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each worker with the first block: its leading blocks, by the best tier of each."""
        with self._lock:
            found: dict[str, dict[str, int]] = {}
            masks = list(takewhile(bool, map(self._masks.get, sequence_hashes, repeat(0))))
            tally, counted = Counter[int](), 0  # of leading blocks, by mask
            alive = frozenset(slot for slot, worker in enumerate(self._slots) if worker is not None)
            for mask in dict.fromkeys(masks):  # prefixes end where a mask appears first; few are different
                held = frozenset(slot for slot in alive if mask >> slot * self._width & self._every)
                if not alive <= held:
                    end = masks.index(mask, counted)
                    tally.update(masks[counted:end])
                    found.update(self._split(slot, tally) for slot in alive - held if tally)
                    alive, counted = alive & held, end
                    if not alive:
                        return found
            tally.update(masks[counted:])
            found.update(self._split(slot, tally) for slot in alive if tally)
            return found

    def shared(self, sequence_hashes: Sequence[int], medium: str) -> int:
        """How many leading blocks any worker holds in that tier: what all can load from a tier that they share."""
        with self._lock:
            bits = sum(1 << slot * self._width + self._tier_of[medium] for slot in range(len(self._slots)))
            return sum(1 for _ in takewhile(bits.__and__, map(self._masks.get, sequence_hashes, repeat(0))))

    def check(self) -> None:
        with self._lock:
            masks: Counter[int] = Counter()
            for worker in self._workers.values():
                counts = [0] * self._width
                for name, sequence in worker.names.items():
                    tiers = self._tiers(worker, name, sequence)
                    assert tiers, "a name of a block that is in no tier"
                    masks[sequence] |= tiers << worker.shift
                    for tier in self._in[tiers]:
                        counts[tier] += 1
                assert counts == worker.counts, "names by tier"
                several = {sequence: n for sequence, n in Counter(worker.names.values()).items() if n > 1}
                assert several == {sequence: len(each) for sequence, each in worker.several.items()}, "names of a block"
            num_names = sum(len(worker.names) for worker in self._workers.values())
            assert num_names == self._num_names <= self._max_blocks, "names of all workers"
            assert dict(masks) == self._masks, "the masks are not what workers hold"
            assert self._seeds.keys() <= self._masks.keys(), "a seed of a block that nobody holds"

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            if not self._free:
                self._free.append(len(self._slots))
                self._slots.append(None)
            slot = self._free.pop()
            self._slots[slot] = name
            self._workers[name] = _Worker(slot, self._width)
        return self._workers[name]

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
        parent = None if event.parent_block_hash is None else worker.names.get(as_u64(event.parent_block_hash))
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
        seed, locals_ = self._locals(event, parent)
        for name, local in zip(map(as_u64, event.block_hashes), locals_, strict=True):
            parent = local if parent is None else xxhash.xxh3_64_intdigest(_LINK.pack(parent, local), _DYNAMO)
            known = worker.names.get(name)
            if known is not None and known != parent:
                self._skip("other_tokens", f"{who}: block {name:#x} has other tokens now: {_UNSTABLE}")
                self._release(worker, name, self._tiers(worker, name, known))
            self._hold(worker, name, parent, tier)
            if seed is not None:
                self._seeds[parent] = seed

    def _locals(self, event: BlockStored, parent: int | None) -> tuple[int | None, list[int]]:
        """The seed of the chain's hashes if it has a namespace, and the blocks' local hashes."""
        keys = [_without(event.lora_name, one) for one in event.extra_keys or ()]
        namespaced = self._seeds.get(parent) if parent is not None else None
        if parent is None and keys:
            namespace = next((key for key in keys[0] if isinstance(key, str)), None)
            if namespace is not None:
                keys[0] = tuple(key for key in keys[0] if key is not namespace)
                namespaced = dynamo_seed(event.lora_name, namespace)
        seed = dynamo_seed(event.lora_name) if namespaced is None else namespaced
        hashes = dynamo_local_hashes(event.token_ids, self.block_size, seed)
        for block, key in enumerate(keys):
            if key:  # an image, an embedding: the same tokens, another block
                words = event.token_ids[block * self.block_size : (block + 1) * self.block_size]
                digest = xxhash.xxh3_64_intdigest(msgpack.packb(key), 2)
                hashes[block] = xxhash.xxh3_64_intdigest(pack_tokens(words), (seed + digest) & _U64)
        return namespaced, hashes

    def _remove(self, who: str, worker: _Worker, tier: int, event: BlockRemoved) -> None:
        for name in map(as_u64, event.block_hashes):
            sequence = worker.names.get(name)
            if sequence is not None and self._tiers(worker, name, sequence) >> tier & 1:
                self._release(worker, name, 1 << tier)
            elif worker.has_forgotten:
                self.counts["forgotten"] += 1
            else:
                self._skip(
                    "unknown_removal",
                    f"{who}: removal of {name:#x}, which was not in {self._media[tier]}: events were missed, or "
                    f"{_UNSTABLE}",
                )

    def _tiers(self, worker: _Worker, name: int, sequence: int) -> int:
        if sequence in worker.several:
            return worker.several[sequence][worker.key(name, sequence)]
        return self._masks[sequence] >> worker.shift & self._every

    def _hold(self, worker: _Worker, name: int, sequence: int, tier: int) -> None:
        mask, bit = self._masks.get(sequence, 0), 1 << tier
        if name not in worker.names:
            worker.names[name] = sequence
            self._num_names += 1
            if sequence in worker.several:
                worker.several[sequence][name] = 0
            elif others := mask >> worker.shift & self._every:
                worker.several[sequence] = {None: others, name: 0}
        elif self._tiers(worker, name, sequence) & bit:
            return
        if sequence in worker.several:
            worker.several[sequence][worker.key(name, sequence)] |= bit
        worker.counts[tier] += 1
        self._put(sequence, mask | bit << worker.shift)

    def _release(self, worker: _Worker, name: int, tiers: int) -> None:
        """The worker no longer has the block under this name in these tiers; it has it in each of them now."""
        sequence = worker.names[name]
        left = self._tiers(worker, name, sequence) & ~tiers
        for tier in self._in[tiers]:
            worker.counts[tier] -= 1
        if not left:
            del worker.names[name]
            self._num_names -= 1
        if (several := worker.several.get(sequence)) is not None:
            several[worker.key(name, sequence)] = left
            if not left:
                del several[worker.key(name, sequence)]
            if len(several) == 1:
                del worker.several[sequence]
            for others in several.values():
                left |= others
        mask = self._masks[sequence] & ~(self._every << worker.shift) | left << worker.shift
        if mask:
            self._put(sequence, mask)
        else:
            del self._masks[sequence]
            self._seeds.pop(sequence, None)

    def _make_room(self) -> None:
        """If there are too many blocks, the worker with the most forgets its oldest, and some more than it must."""
        while (num_over := self._num_names - self._max_blocks) > 0 and self._workers:
            who, worker = max(self._workers.items(), key=lambda each: len(each[1].names))
            oldest = list(islice(worker.names, num_over + min(_PIECE, self._max_blocks // 16)))
            for name in oldest:
                self._release(worker, name, self._tiers(worker, name, worker.names[name]))
            worker.has_forgotten = True
            self.num_forgotten += len(oldest)
            self._warn(
                "forgotten",
                f"{who}: more blocks than the {self._max_blocks} of [router] max_blocks: its oldest are forgotten; "
                f"raise it, or find out why there are so many ({self.num_forgotten} so far)",
            )

    def _put(self, sequence: int, mask: int) -> None:
        if len(self._shared) > _MAX_MASKS:
            self._shared.clear()
        self._masks[sequence] = self._shared.setdefault(mask, mask)

    def _release_all(self, worker: _Worker, tiers: int) -> None:
        """Drop what it has in these tiers, the last stored first. In pieces, so that others get the lock in between."""
        names = list(worker.names)
        while names:
            with self._lock:
                for name in names[-_PIECE:]:
                    if here := self._tiers(worker, name, worker.names[name]) & tiers:
                        self._release(worker, name, here)
            del names[-_PIECE:]

    def _split(self, slot: int, tally: Mapping[int, int]) -> tuple[str, dict[str, int]]:
        by_tier = [0] * self._width
        for mask, count in tally.items():
            bits = mask >> slot * self._width & self._every
            by_tier[(bits & -bits).bit_length() - 1] += count
        return str(self._slots[slot]), {m: n for m, n in zip(self._media, by_tier, strict=True) if n}

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


def _without(lora_name: str | None, keys: ExtraKeys | None) -> ExtraKeys:
    """A block's extra keys without the adapter's name, which comes first and is a field of its own."""
    if not keys:
        return ()
    return keys[1:] if lora_name is not None and keys[0] == lora_name else keys

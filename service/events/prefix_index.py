"""PrefixIndex: which worker holds how long a prefix of a prompt, and in which tier: what KV events add up to."""

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat, takewhile
from typing import Final

import msgpack
import xxhash

from kvtier.connector.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    KVEvent,
    as_u64,
)
from kvtier.tiers.chain import Tokens, pack_tokens
from kvtier.tiers.key_schemes import dynamo_local_hashes, dynamo_seed, dynamo_sequence_hashes

_log = logging.getLogger(__name__)

MEDIA: Final = ("GPU", "CPU", "STORAGE", "EXTERNAL")
"""The tiers of an index, best first."""

_AS: Final[Mapping[str | None, str]] = {None: "GPU", "CPU_PINNED": "CPU", "DISK": "STORAGE", "NVME": "STORAGE"}
_PARTIAL: Final = ("sliding", "mamba", "chunked", "cross")  # kinds of KV groups that drop part of a prefix
_WIDTH: Final = len(MEDIA)
_NIBBLE: Final = (1 << _WIDTH) - 1
_IN: Final = [[tier for tier in range(_WIDTH) if tiers >> tier & 1] for tiers in range(_NIBBLE + 1)]  # tiers of bits
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
    """What one worker said of its blocks."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.shift = slot * _WIDTH  # of its bits in a mask
        self.names: dict[int, int] = {}  # the engine's name → sequence hash, of blocks it holds in any tier
        self.counts = [0] * _WIDTH  # names by tier
        # Of blocks that have several names: each one's tiers, as bits. None stands for the name that was first.
        self.several: dict[int, dict[int | None, int]] = {}
        self.group: int | None = None  # the KV group whose blocks count

    def key(self, name: int, sequence: int) -> int | None:
        """By what the name stands in `several`."""
        return name if name in self.several[sequence] else None


class PrefixIndex:
    """Blocks by Dynamo's sequence hash, computed from the events' token ids, with who holds each where. Thread-safe.

    What a worker says is believed, and nothing is raised for it: an event that cannot be true is skipped, counted in
    `counts` by its reason, and logged with what probably causes it, at most a line a second for each reason; with
    `strict` as an error. A worker of several KV groups counts by its first that keeps whole prefixes.
    Law (`check`): a block's mask has a bit for a worker and tier just where that worker has a name for it there. It is
    written down nowhere else, so that a block costs no more in four tiers than in one.
    """

    def __init__(self, block_size: int, *, strict: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_size = block_size
        self.counts: Counter[str] = Counter()
        self._level = logging.ERROR if strict else logging.WARNING
        self._clock = clock
        self._log_from: dict[str, float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._workers: dict[str, _Worker] = {}
        self._slots: list[str | None] = []  # whose bits they are; None: nobody's, or of one that is being dropped
        self._free: list[int] = []
        self._masks: dict[int, int] = {}  # sequence hash → bit for each worker and tier
        self._shared: dict[int, int] = {}  # a mask → the one object that stands for it
        self._seeds: dict[int, int] = {}  # sequence hash → seed of its chain's hashes, of chains with a namespace

    @property
    def num_blocks(self) -> int:
        """Different blocks that any worker holds."""
        return len(self._masks)

    @property
    def workers(self) -> list[str]:
        """Those who hold blocks, or did and were not dropped since."""
        with self._lock:
            return list(self._workers)

    def holdings(self, worker: str) -> dict[str, int]:
        """How many blocks a worker holds in each tier it has any in."""
        with self._lock:
            known = self._workers.get(worker)
            return {} if known is None else {m: n for m, n in zip(MEDIA, known.counts, strict=True) if n}

    def apply(self, worker: str, event: KVEvent) -> None:
        """Take in what a worker said; the order in which it said it is the caller's to keep."""
        if isinstance(event, AllBlocksCleared):
            self._clear(worker)
            return
        with self._lock:
            known = self._worker(worker)
            medium = _AS.get(event.medium, event.medium)
            if medium not in MEDIA:
                self._skip("medium", f"{worker}: medium {event.medium!r:.40}: known are {', '.join(MEDIA)}")
            elif not self._is_partial(known, event):
                tier = MEDIA.index(medium)
                if isinstance(event, BlockRemoved):
                    self._remove(worker, known, tier, event)
                else:
                    self._store(worker, known, tier, event)

    def drop(self, worker: str) -> None:
        """Forget a worker and all it holds. Others are served meanwhile."""
        with self._lock:
            known = self._workers.pop(worker, None)
            if known is None:
                return
            self._slots[known.slot] = None
        self._release_all(known)
        with self._lock:
            self._free.append(known.slot)

    def matches(self, sequence_hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each worker that holds the first block: how many leading blocks it holds, by the best tier of each.

        `sequence_hashes` from `prompt_hashes`, with this index's block size.
        """
        with self._lock:
            found: dict[str, dict[str, int]] = {}
            masks = list(takewhile(bool, map(self._masks.get, sequence_hashes, repeat(0))))
            tally, counted = Counter[int](), 0  # of leading blocks, by mask
            alive = frozenset(slot for slot, worker in enumerate(self._slots) if worker is not None)
            for mask in dict.fromkeys(masks):  # where a mask comes first, prefixes end; few are different
                held = self._holders(mask)
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
        """How many leading blocks anybody holds in that tier: what all can load of a tier that workers share."""
        with self._lock:
            bits = sum(1 << slot * _WIDTH + MEDIA.index(medium) for slot in range(len(self._slots)))
            return sum(1 for _ in takewhile(bits.__and__, map(self._masks.get, sequence_hashes, repeat(0))))

    def check(self) -> None:
        """Raise AssertionError where the law is broken."""
        with self._lock:
            masks: Counter[int] = Counter()
            for worker in self._workers.values():
                counts = [0] * _WIDTH
                for name, sequence in worker.names.items():
                    tiers = self._tiers(worker, name, sequence)
                    assert tiers, "a name of a block that is in no tier"
                    masks[sequence] |= tiers << worker.shift
                    for tier in _IN[tiers]:
                        counts[tier] += 1
                assert counts == worker.counts, "names by tier"
                several = {sequence: n for sequence, n in Counter(worker.names.values()).items() if n > 1}
                assert several == {sequence: len(each) for sequence, each in worker.several.items()}, "names of a block"
            assert dict(masks) == self._masks, "the masks are not what workers hold"
            assert self._seeds.keys() <= self._masks.keys(), "a seed of a block that nobody holds"

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            if not self._free:
                self._free.append(len(self._slots))
                self._slots.append(None)
            slot = self._free.pop()
            self._slots[slot] = name
            self._workers[name] = _Worker(slot)
        return self._workers[name]

    def _is_partial(self, worker: _Worker, event: BlockStored | BlockRemoved) -> bool:
        """Whether the event is about a KV group that says nothing of whole prefixes, or one too many."""
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
        """The seed of the chain's hashes where it has a namespace, and the blocks' local hashes."""
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
            if sequence is None or not self._tiers(worker, name, sequence) >> tier & 1:
                self._skip(
                    "unknown_removal",
                    f"{who}: removal of {name:#x}, which was not in {MEDIA[tier]}: events were missed, or {_UNSTABLE}",
                )
            else:
                self._release(worker, name, 1 << tier)

    def _tiers(self, worker: _Worker, name: int, sequence: int) -> int:
        """The tiers in which the worker has the block under this name, as bits."""
        if sequence in worker.several:
            return worker.several[sequence][worker.key(name, sequence)]
        return self._masks[sequence] >> worker.shift & _NIBBLE

    def _hold(self, worker: _Worker, name: int, sequence: int, tier: int) -> None:
        mask, bit = self._masks.get(sequence, 0), 1 << tier
        if name not in worker.names:
            worker.names[name] = sequence
            if sequence in worker.several:
                worker.several[sequence][name] = 0
            elif others := mask >> worker.shift & _NIBBLE:
                worker.several[sequence] = {None: others, name: 0}
        elif self._tiers(worker, name, sequence) & bit:
            return
        if sequence in worker.several:
            worker.several[sequence][worker.key(name, sequence)] |= bit
        worker.counts[tier] += 1
        self._put(sequence, mask | bit << worker.shift)

    def _release(self, worker: _Worker, name: int, tiers: int) -> None:
        """The worker has the block under this name no more in these tiers, in each of which it has."""
        sequence = worker.names[name]
        left = self._tiers(worker, name, sequence) & ~tiers
        for tier in _IN[tiers]:
            worker.counts[tier] -= 1
        if not left:
            del worker.names[name]
        if (several := worker.several.get(sequence)) is not None:
            several[worker.key(name, sequence)] = left
            if not left:
                del several[worker.key(name, sequence)]
            if len(several) == 1:
                del worker.several[sequence]
            for others in several.values():
                left |= others
        mask = self._masks[sequence] & ~(_NIBBLE << worker.shift) | left << worker.shift
        if mask:
            self._put(sequence, mask)
        else:
            del self._masks[sequence]
            self._seeds.pop(sequence, None)

    def _put(self, sequence: int, mask: int) -> None:
        if len(self._shared) > _MAX_MASKS:
            self._shared.clear()
        self._masks[sequence] = self._shared.setdefault(mask, mask)

    def _clear(self, who: str) -> None:
        """All that a worker holds; of vLLM, whose events name KV groups, what is on the GPU: no more is meant."""
        with self._lock:
            worker = self._worker(who)
        self._release_all(worker, _NIBBLE if worker.group is None else 1)

    def _release_all(self, worker: _Worker, tiers: int = _NIBBLE) -> None:
        """What it has in these tiers. Piece by piece, for others have to look meanwhile; the last stored first."""
        names = list(worker.names)
        while names:
            with self._lock:
                for name in names[-_PIECE:]:
                    if here := self._tiers(worker, name, worker.names[name]) & tiers:
                        self._release(worker, name, here)
            del names[-_PIECE:]

    def _holders(self, mask: int) -> frozenset[int]:
        return frozenset(slot for slot in range(len(self._slots)) if mask >> slot * _WIDTH & _NIBBLE)

    def _split(self, slot: int, tally: Mapping[int, int]) -> tuple[str, dict[str, int]]:
        """The worker's name, and the counted blocks by the best tier it has each in."""
        by_tier = [0] * _WIDTH
        for mask, count in tally.items():
            bits = mask >> slot * _WIDTH & _NIBBLE
            by_tier[(bits & -bits).bit_length() - 1] += count
        return str(self._slots[slot]), {m: n for m, n in zip(MEDIA, by_tier, strict=True) if n}

    def _skip(self, reason: str, line: str) -> None:
        self.counts[reason] += 1
        if self._clock() >= self._log_from.get(reason, 0.0):
            self._log_from[reason] = self._clock() + _LOG_PAUSE
            _log.log(self._level, "KV events: %s (%d of this kind, skipped)", line, self.counts[reason])


_UNSTABLE: Final = "its hashes are not stable: give it a fixed PYTHONHASHSEED"


def _without(lora_name: str | None, keys: ExtraKeys | None) -> ExtraKeys:
    """A block's extra keys without the adapter's name, which comes first and is a field of its own."""
    if not keys:
        return ()
    return keys[1:] if lora_name is not None and keys[0] == lora_name else keys

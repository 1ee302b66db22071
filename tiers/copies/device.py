"""BlockPool, L1: the device tensor of KV blocks, shared by reference counts between the sequences that run."""

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.tiers import ChainHash, Changes, ChildBlock
from kvtier.tiers.host import BlockRecords, memory
from kvtier.tiers.naming import KVShape
from kvtier.tiers.pool import FILLING, READY, ChangeLog, make_child_index, make_core


class BlockPool:
    """Fixed-size KV blocks on a device, and which of them hold which block of a chain. Thread-safe.

    A block is free (no references), or referenced by sequences and copies in flight, once for each. A full block
    gets its name by `publish`. It keeps the name when its last reference goes, until the block is taken again.
    Unnamed free blocks are taken first, then the named one that has been free longest.
    Block ids in one call are distinct, in chain order.
    It is a `ChangeFeed` of its blocks, if `listen` is called before anything is published.
    With `partial_blocks` it knows each named block's tokens, and which blocks follow a block: `children`.
    `tensor` is `[num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]`, zeroed once at the start.
    A taken block holds old bytes, but never NaNs of uninitialised memory, which masked attention would spread.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        *,
        device: str = "cpu",
        enable_prefix_caching: bool = True,
        partial_blocks: bool = False,
    ) -> None:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        self.shape = shape
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._core = make_core(num_blocks, "lru")
        self.partial_blocks = self.wants_tokens = partial_blocks and enable_prefix_caching
        self._child_index = make_child_index(num_blocks) if self.partial_blocks else None
        self._records = self._new_records() if self.partial_blocks else None  # while a reader listens
        self._lock = threading.Lock()
        self.tensor = _zeros((num_blocks, *shape.block_shape), dtype, device)

    @property
    def num_free_blocks(self) -> int:
        """Blocks `allocate` can hand out now: unnamed free ones and named ones without references."""
        core = self._core
        return core.num_free + core.num_ready - core.num_leased

    def generation(self, block_id: int) -> int:
        """How many times the block was taken."""
        return self._core.generation_of(block_id)

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks are held. No side effect."""
        with self._lock:
            return self._core.lookup(list(hashes))

    def match(self, hashes: Sequence[ChainHash]) -> list[int]:
        """The ids of the leading blocks held, each with one reference more; the caller `free`s them."""
        with self._lock:
            return self._core.lease(list(hashes))[0]

    def children(self, parent: ChainHash, start: bytes = b"") -> list[ChildBlock]:
        """Blocks held now that follow this one and begin with these tokens; none without `partial_blocks`."""
        slots = self._child_index.find(parent) if self._child_index is not None else []
        if not slots or self._records is None:
            return []
        with self._lock:
            return self._records.children(slots, parent, start, self._core.is_ready)

    def allocate(self, n: int, leaving: int = 0) -> list[int] | None:
        """Take `n` unnamed blocks, one reference each, or None if then fewer than `leaving` would be left.

        ValueError, and nothing changes, if `n` is negative.
        """
        if n < 0:
            raise ValueError(f"allocate: {n} blocks; give 0 or more")
        with self._lock:
            core = self._core
            return None if n + leaving > core.num_free + core.num_ready - core.num_leased else core.allocate(n)

    def publish(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[ChainHash],
        parent: ChainHash | None,
        tokens: Sequence[bytes] = (),
        *,
        is_partial: bool = False,
    ) -> None:
        """Name full blocks, consecutive in a chain after `parent`. Their bytes must not change from now on.

        A hash that is held already keeps its block, and the duplicate stays unnamed; so does a block that has a name.
        `tokens`: each block's, u32 little-endian, if `wants_tokens`. ValueError if a block has no reference, or too
        many tokens, or the numbers of blocks, hashes and tokens wanted differ.
        `is_partial`: a chain's unfinished last block, named by its tokens. Once free it is the first to be taken. The
        reader of changes does not get it: it takes whole blocks.
        """
        slots, names = list(block_ids), list(hashes)
        if len(slots) != len(names) or (self._records is not None and len(tokens) != len(names)):
            raise ValueError(f"publish: {len(slots)} blocks, {len(names)} hashes and tokens of {len(tokens)}")
        if not self.enable_prefix_caching:
            return
        with self._lock:
            core = self._core
            if lacking := [slot for slot, refs in zip(slots, core.references(slots), strict=True) if not refs]:
                raise ValueError(f"publish: blocks {lacking} have no reference")
            new, slots_before = core.name(slots, names, parent)
            named, before = [slots[i] for i in new], [parent or b"", *names]
            if self._records is not None:
                parents = [before[i] for i in new]
                columns = [names[i] for i in new], parents, [tokens[i] for i in new], [0] * len(new)
                try:
                    self._records.put_columns(named, *columns)
                except ValueError:  # too many tokens: none has a name then
                    core.unname(named)
                    raise
                if self._child_index is not None:
                    self._child_index.enter(parents, named)
            core.publish(named, is_partial, 0)
            core.link(named, slots_before)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks on the device, each from the first to the second, before any later compute."""
        for source, target in pairs:
            self.tensor[target].copy_(self.tensor[source])

    def free(self, block_ids: Sequence[int]) -> None:
        """Return one reference to each block, a chain's head last. ValueError, and no change, if one has none."""
        slots = list(block_ids)
        with self._lock:
            self._core.unref(slots)
            if self._core.partial:
                self._core.retire(slots)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, for a copy in flight. ValueError, and no change, if a block has none."""
        with self._lock:
            self._core.hold(list(block_ids))

    def reset(self) -> None:
        """Forget every name. Blocks in use stay in use, unnamed."""
        with self._lock:
            self._core.reset()
            if self._child_index is not None:
                self._child_index.reset()

    def listen(self) -> None:
        """Keep a log of the blocks that come and go, for one reader. ValueError if blocks have a name already."""
        with self._lock:
            if self._core.num_ready:
                raise ValueError(f"listen: {self._core.num_ready} blocks have a name already")
            self.wants_tokens = True
            if self._records is None:
                self._records = self._new_records()
            self._core.changes = ChangeLog(self.num_blocks)

    @property
    def waiting(self) -> bool:
        log = self._core.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        """The blocks that the reader has to forget and, up to `limit`, to learn. None before `listen`."""
        with self._lock:
            records = self._records
            if self._core.changes is None or records is None:
                return Changes([], [])
            gone, slots, cleared = self._core.changes.take(limit)
            stored = [record for slot in slots.tolist() if (record := records[slot]) is not None]
            return Changes(gone, stored, cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns the names of blocks that the reader knows."""
        with self._lock:
            log, self._core.changes = self._core.changes, None
            self.wants_tokens = self.partial_blocks
            self._records = self._records if self.partial_blocks else None
            if log is None:
                return []
            log.cleared(self._core.words)
            known: list[ChainHash] = log.take(0)[0]
            return known

    def check(self) -> None:
        """Raise AssertionError if a law of the pool is broken. A full scan: at idle, in tests."""
        with self._lock:
            core = self._core
            core.check()
            state, refs = (np.asarray(each)[: self.num_blocks] for each in (core.state, core.refs))
            assert ((state == FILLING) <= (refs > 0)).all(), "a block is neither free nor referenced"
            assert np.count_nonzero(refs == 0) == self.num_free_blocks, "free count"
            if self._child_index is not None and self._records is not None:
                self._child_index.check()
                for slot in np.flatnonzero(state == READY).tolist():
                    record = self._records[slot]
                    assert record is not None, "a named block without a record"
                    assert core.find([record.chain_hash]) == [slot], "a block with another block's record"
            assert self.enable_prefix_caching or not (state == READY).any(), "named without prefix caching"

    def _new_records(self) -> BlockRecords:
        names, generations = memoryview(self._core.index.names), memoryview(np.asarray(self._core.generation))
        return BlockRecords(names, generations, self.shape.block_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros; on a CPU from a huge page's boundary: copies between L1 and L2 are then half as fast again."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.empty(num_bytes + memory.HUGE_PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % memory.HUGE_PAGE
    memory.advise_huge_pages(raw.data_ptr() + start, num_bytes)
    return raw[start : start + num_bytes].zero_().view(dtype).view(shape)

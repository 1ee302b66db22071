"""BareSlab: which blocks a slab of a given size would hold. Its real extents and its writer's rules, without a file."""

from collections.abc import Sequence
from typing import Final

from kvtier.tiers import BATCH_BYTES, ChainHash
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap, SlotRun
from kvtier.tiers.returns import ToldEnd

_NOBODY: Final = bytes(32)  # a fingerprint: extents do not depend on it


class BareSlab:
    """As `FileStore`, of names alone: for simulations. For one thread. Every write succeeds, and at once."""

    def __init__(self, num_bytes: int, slot_bytes: int, block_size: int) -> None:
        """A slab of at most `num_bytes`, blocks of `slot_bytes` each. Without room for one it holds nothing."""
        shape = slab.plan(_NOBODY, slot_bytes, block_size, num_bytes)
        self._blocks = ExtentMap(shape.num_extents, shape.slots_per_extent) if shape.segments else None
        self._batch = max(1, BATCH_BYTES // slot_bytes)
        self.num_written = 0  # blocks, those that were stored again with them

    @property
    def num_slots(self) -> int:
        """Blocks that it has room for."""
        return self._blocks.num_extents * self._blocks.per_extent if self._blocks is not None else 0

    @property
    def num_evicted(self) -> int:
        """Blocks that went to make room, since the start."""
        return self._blocks.num_evicted if self._blocks is not None else 0

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks it holds."""
        if self._blocks is None:
            return 0
        found = self._blocks.index.find_each(hashes)
        return next((i for i, slot in enumerate(found) if slot < 0), len(found))

    def read(self, hashes: Sequence[ChainHash]) -> None:
        """Count a use of each of these blocks."""
        if self._blocks is not None:
            for slot in self._blocks.index.find_each(hashes):
                if slot >= 0:
                    self._blocks.touch(slot)

    def ended(self, end: ToldEnd) -> None:
        """As `Tier.ended`."""
        if self._blocks is not None:
            self._blocks.ended(end)

    def write(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> None:
        """Store consecutive blocks of one chain, `parent` before them, batch by batch as they come from L2."""
        for first in range(0, len(hashes), self._batch):
            self._write(hashes[first : first + self._batch], hashes[first - 1] if first else parent)

    def check(self) -> None:
        """Raise AssertionError where the extents' law is broken."""
        if self._blocks is not None:
            self._blocks.check()

    def _write(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        slots = blocks.index.find_each(hashes)
        held = [slot for slot in slots if slot >= 0]
        entered = {slot // blocks.per_extent for slot in held}
        for extent in entered:
            blocks.enter(extent)
        for slot in held:
            blocks.touch(slot)
        todo = [position for position, slot in enumerate(slots) if slot < 0]
        names, done, filled = [hashes[position] for position in todo], 0, list[tuple[SlotRun, Sequence[ChainHash]]]()
        while done < len(todo):
            before = hashes[todo[done] - 1] if todo[done] else parent
            if (runs := self._reserve(names[done:] if done else names, before)) is None:
                break
            filled += runs
            done += runs[-1][0].size
        for run, stored in filled:
            blocks.publish(run, stored)
            self.num_written += run.size
        for extent in [*entered, *(run.extent for run, _ in filled)]:
            blocks.leave(extent)

    def _reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None
    ) -> list[tuple[SlotRun, Sequence[ChainHash]]] | None:
        """Slots for leading hashes, behind those of what is stored again. None: every extent is being written."""
        blocks = self._blocks
        assert blocks is not None
        run = blocks.take(hashes, parent)
        if run is None and (claim := blocks.claim()) is not None:
            blocks.opened(claim)
            again = blocks.take_in(claim.extent, claim.keep_hashes) if claim.keep else None
            run = blocks.take_in(claim.extent, hashes)
            if again is not None:
                return [(again, claim.keep_hashes), (run, hashes[: run.size])]
        elif run is None:
            run = blocks.take(hashes, None)
        return None if run is None else [(run, hashes[: run.size])]

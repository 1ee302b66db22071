"""The slab's read path: entries, then payloads with many in flight, each verified as it comes; what is bad goes."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.payload_io import PayloadIO
from kvtier.tiers.file.slab_codec import Codec, SlabEntry, verified
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.file.slab_space import SlabFile
from kvtier.tiers.file.slab_writer import SlabWriter
from kvtier.tiers.pool import Slots

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class SlabReader:
    """Reads blocks of one open slab. Thread-safe. `lock` guards `blocks` and `counts`; it is never held across I/O."""

    file: SlabFile
    payload: PayloadIO
    blocks: ExtentMap
    rows: SlabRows
    lock: threading.Lock
    codec: Codec
    writer: SlabWriter
    counts: Counter[str]  # of outcomes: read_{outcome}

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """See `Tier.read`. The caller is inside the store."""
        with self.lock:
            found, found_generations = self.blocks.find_each(hashes)
        slots = found.tolist()
        results: list[BlockRecord | Outcome] = [Outcome.ABSENT if slot < 0 else Outcome.IO_ERROR for slot in slots]
        positions = sorted((i for i, slot in enumerate(slots) if slot >= 0), key=slots.__getitem__)
        if positions:
            self._read_held(positions, slots, hashes, into, results)
        self._settle(hashes, found, found_generations, results)
        return results

    def _read_held(
        self,
        positions: list[int],
        slots: list[int],
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        results: list[BlockRecord | Outcome],
    ) -> None:
        """Put what became of each block at its position, these being in the order of their slots."""
        held = [slots[position] for position in positions]
        entries = list[SlabEntry | Outcome]()
        offsets = [self.file.superblock.payload_offset(slot) for slot in held]
        buffers = [into[position] for position in positions]
        reads = self.payload.read_runs(
            offsets,
            buffers,
            lambda: entries.extend(self.rows.entries(held)),  # while payloads are in flight
            hashed=not self.codec.hides_payloads,
        )
        with closing(reads):  # the buffers outlive what is in flight
            for run, readable, digests in reads:
                for at, is_there, digest in zip(range(run.start, run.stop), readable, digests, strict=True):
                    position, entry = positions[at], entries[at]
                    if isinstance(entry, Outcome):
                        results[position] = entry
                    elif is_there:
                        results[position] = verified(self.codec, entry, hashes[position], buffers[at], digest)

    def _settle(
        self,
        hashes: Sequence[ChainHash],
        slots: Slots,
        generations: NDArray[np.uint32],
        results: list[BlockRecord | Outcome],
    ) -> None:
        """Mark hits; tell bad blocks from those evicted under the read, and forget the bad.

        If the disk answers, but not for some, these go too: they would be promised again and again.
        """
        bad, lost = [], []
        answers = False
        with self.lock:
            current = zip(slots.tolist(), self.blocks.still_hold(slots, generations), strict=True)
            for position, (slot, is_current) in enumerate(current):
                result = results[position]
                if result is Outcome.ABSENT:
                    continue
                answers |= result is not Outcome.IO_ERROR
                if isinstance(result, BlockRecord):
                    if is_current:
                        self.blocks.touch(slot)
                elif result is Outcome.IO_ERROR:
                    lost.append(hashes[position])
                elif is_current:
                    bad.append(hashes[position])
                else:
                    results[position] = Outcome.EVICTED
            others = [result for result in results if isinstance(result, Outcome)]
            self.counts["read_ok"] += len(results) - len(others)
            self.counts.update(f"read_{other}" for other in others)
        if bad:
            _log.warning("[file] %s: dropped %d corrupt blocks, first %s", self.file.path, len(bad), bad[0].hex())
        if bad or (lost and answers):
            self.writer.discard([*bad, *lost] if answers else bad)

"""The slab's read path: entries, then payloads with many in flight, each verified as it comes; what is bad goes."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.payload_io import PayloadIO
from kvtier.tiers.file.slab_codec import Codec, SlabEntry, verified
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.file.slab_space import SlabFile
from kvtier.tiers.file.slab_writer import SlabWriter

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
            slots, generations = self.blocks.find_each(hashes)
        results: list[BlockRecord | Outcome] = [Outcome.ABSENT if slot < 0 else Outcome.IO_ERROR for slot in slots]
        positions = [i for i, slot in enumerate(slots) if slot >= 0]
        if len(positions) > 1:
            positions.sort(key=slots.__getitem__)
        if positions and not self.codec.hides_payloads:
            positions = self._read_compiled(positions, slots, hashes, into, results)
        if positions:
            self._read_held(positions, slots, hashes, into, results)
        self._settle(hashes, slots, generations, results)
        return results

    def _read_compiled(
        self,
        positions: list[int],
        slots: list[int],
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        results: list[BlockRecord | Outcome],
    ) -> list[int]:
        """By the twin: put the records of whole blocks at their positions; returns those left to `_read_held`."""
        held, names = [slots[position] for position in positions], [hashes[position] for position in positions]
        buffers = [into[position] for position in positions]
        records = self.payload.read_blocks(self.file.fd, self.file.superblock.layout, held, names, buffers)
        if records is None:
            return positions
        left = []
        for position, record in zip(positions, records, strict=True):
            if record is None:
                left.append(position)
            else:
                results[position] = record
        return left

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
        )
        with closing(reads):  # the buffers outlive what is in flight
            for run, readable in reads:
                for at, is_there in zip(range(run.start, run.stop), readable, strict=True):
                    position, entry = positions[at], entries[at]
                    if isinstance(entry, Outcome):
                        results[position] = entry
                    elif is_there:
                        results[position] = verified(self.codec, entry, hashes[position], buffers[at])

    def _settle(
        self,
        hashes: Sequence[ChainHash],
        slots: list[int],
        generations: list[int],
        results: list[BlockRecord | Outcome],
    ) -> None:
        """Mark hits; tell bad blocks from those evicted under the read, and forget the bad.

        If the disk answers, but not for some, these go too: they would be promised again and again.
        """
        bad, lost = list[ChainHash](), list[ChainHash]()
        num_whole, answers = 0, False
        with self.lock:
            are_current = self.blocks.still_hold(slots, generations)
            for position, (slot, is_current) in enumerate(zip(slots, are_current, strict=True)):
                result = results[position]
                if isinstance(result, BlockRecord):
                    num_whole += 1
                    if is_current:
                        self.blocks.touch(slot)
                elif result is Outcome.IO_ERROR:
                    lost.append(hashes[position])
                elif result is not Outcome.ABSENT:
                    answers = True
                    if is_current:
                        bad.append(hashes[position])
                    else:
                        results[position] = Outcome.EVICTED
            self.counts["read_ok"] += num_whole
            if num_whole < len(results):
                self.counts.update(f"read_{result}" for result in results if isinstance(result, Outcome))
        answers = answers or num_whole > 0
        if bad:
            _log.warning("[file] %s: dropped %d corrupt blocks, first %s", self.file.path, len(bad), bad[0].hex())
        if bad or (lost and answers):
            self.writer.discard(bad, Outcome.CHECKSUM)
            if answers:
                self.writer.discard(lost, Outcome.IO_ERROR)

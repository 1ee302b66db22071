"""The fsck of a slab, by path and for any model: reads every block and compares it with its entry."""

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvtier.tiers import ChainHash, TierUnavailable
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import CALL_BYTES, FileIO, PayloadIO
from kvtier.tiers.file.slab import Codec, Superblock, codec_of, verified
from kvtier.tiers.file.slab_file import SlabFile, blank_slots, open_existing, read_header, read_rows, write_superblock

ReportProgress = Callable[[int, int], None]
"""Called with the payload bytes read so far and in total, after every few MiB."""


@dataclass(frozen=True, slots=True)
class SlabCheck:
    """The result of a whole read of a slab that no process has open, each bad block by its name."""

    superblock: Superblock
    num_blocks: int
    bad_payloads: list[ChainHash]  # the bytes are not those stored
    bad_rows: list[ChainHash]  # rows that are not whole (the name may be rubbish): lost at the next start
    unreadable: list[ChainHash]  # the disk reported an error
    num_bad_headers: int  # of the superblock's two copies; the other one serves
    is_repaired: bool

    @property
    def is_clean(self) -> bool:
        return not (self.bad_payloads or self.bad_rows or self.unreadable or self.num_bad_headers)


def check_slab(
    path: Path,
    *,
    repair: bool = False,
    key: bytes | None = None,
    progress: ReportProgress | None = None,
    io: FileIO | None = None,
) -> SlabCheck:
    """Read a whole slab, locked meanwhile. Nothing in it changes without `repair`; read permission is then enough.

    `repair` blanks bad entries, so that their blocks are misses, and restores a damaged copy of the superblock from
    the other. `key` is for slabs that are encrypted; others are read as they are. Raises
    StoreLocked, FormatError, ConfigError for another key (the file is left untouched) and TierUnavailable.
    """
    io = io or FileIO()
    try:
        with ExitStack() as undo:
            file = open_existing(io, path, read_only=not repair)
            undo.callback(io.close, file.fd)
            payload = PayloadIO(io, path, file.fd, slot_bytes=file.superblock.slot_bytes, mode="direct", read_only=True)
            undo.callback(payload.close)
            codec = codec_of(file.superblock, key, str(path))
            return _check(io, file, payload, codec, progress, repair)
    except OSError as error:
        fix = "run it as the slab's owner" if isinstance(error, PermissionError) else "see the kernel's log of its disk"
        verb = "repair" if repair else "read"
        raise TierUnavailable(f"{path}: {error.strerror or error}; could not {verb} all of it: {fix}") from error


def _check(
    io: FileIO, file: SlabFile, payload: PayloadIO, codec: Codec, progress: ReportProgress | None, repair: bool
) -> SlabCheck:
    superblock = file.superblock
    num_bad_headers = slab.num_damaged(read_header(io, file.fd))
    rows = read_rows(io, file.fd, superblock)
    # Rows from before a reset are whole, and do not count.
    whole = slab.find_valid(rows, np.arange(len(rows)), replace(superblock, min_seq=0))
    is_blank = ~rows.view(np.uint8).reshape(len(rows), -1).any(axis=1)
    codec.show_names(rows, np.flatnonzero(~is_blank))
    bad_rows = np.flatnonzero(~whole & ~is_blank).tolist()
    held = np.flatnonzero(whole & (rows["seq"] >= superblock.min_seq))
    bad, unreadable = check_payloads(payload, superblock, held.tolist(), codec, rows[held], progress)
    payload_names, row_names, unread_names = (
        rows["chain_hash"][slots].tolist() for slots in (bad, bad_rows, unreadable)
    )
    # A crash may leave two whole entries for one block; both are checked, it is one block.
    num_blocks = len(set(rows["chain_hash"][held].tolist()))
    if repair:
        if num_bad_headers:
            write_superblock(io, file.fd, superblock)
        blank_slots(io, file.fd, superblock, sorted([*bad, *bad_rows, *unreadable]))
        io.sync(file.fd)
    return SlabCheck(superblock, num_blocks, payload_names, row_names, unread_names, num_bad_headers, repair)


def check_payloads(
    payload: PayloadIO,
    superblock: Superblock,
    slots: Sequence[int],
    codec: Codec,
    rows: slab.Rows,
    progress: ReportProgress | None = None,
) -> tuple[list[int], list[int]]:
    """Of `slots`, ascending: those whose payload does not match their `rows`, and those the disk cannot read."""
    stride, slot_bytes = superblock.stride, superblock.slot_bytes
    memory = memoryview(mmap.mmap(-1, max(stride, CALL_BYTES)))
    buffers = [memory[start : start + slot_bytes] for start in range(0, len(memory) - stride + 1, stride)]
    bad: list[int] = []
    unreadable: list[int] = []
    offsets = [superblock.payload_offset(slot) for slot in slots]
    for run in payload.runs(offsets):
        readable = payload.read_each(offsets[run.start], buffers[: run.stop - run.start])
        stored = zip(codec.to_records(rows[run]), codec.stamps(rows[run]), strict=True)
        for slot, is_read, buffer, entry in zip(slots[run], readable, buffers, stored, strict=False):
            if not is_read:
                unreadable.append(slot)
            elif verified(codec, entry, entry[0].chain_hash, buffer) is not entry[0]:
                bad.append(slot)
        if progress:
            progress(run.stop * stride, len(slots) * stride)
    return bad, unreadable

"""A process that writes to a slab until it is killed, for test_slab_crash.py: `_slab_child.py DIR KILL_AT SEED [KEY]`.

KILL_AT "" writes for ever; "invalidate:3" dies by SIGKILL right before the third invalidation, "+entry:2" right after
the second entry write. It prints `ready` once the slab is open.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord

FINGERPRINT = b"crash-test-fingerprint-of-32-byt"
SLOT_BYTES, BLOCK_SIZE, SIZE = 8192, 4, 600 * 1024
KEY: bytes | None = None  # of the slab; the child is told it in hexadecimal digits
BATCH = 6


def hash_of(number: int) -> bytes:
    """The chain hash of block `number`."""
    return (number + 1).to_bytes(8, "little") + b"chain hash of a block.." + b"\0"


def payload_of(number: int) -> bytes:
    """The only bytes block `number` may ever have."""
    return (number.to_bytes(8, "little") * (SLOT_BYTES // 8))[:SLOT_BYTES]


def record_of(number: int) -> BlockRecord:
    """Block `number`, child of the one before it."""
    payload = memoryview(payload_of(number))
    return BlockRecord(hash_of(number), hash_of(number - 1), number.to_bytes(4, "little") * 4, checksum(payload))


def open_store(directory: Path, io: FileIO | None = None, *, durable: bool = False) -> FileStore:
    """The slab both sides of the crash use."""
    return FileStore.open(directory, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=SIZE,
                          mode="buffered", durable=durable, key=KEY, io=io)  # fmt: skip


class DyingIO(FileIO):
    """Dies before ("what:n") or after ("+what:n") the n-th write of a kind; place and content tell the kinds apart."""

    def __init__(self, kill_at: str) -> None:
        what, _, count = kill_at.removeprefix("+").partition(":")
        self.what, self.left, self.after = what, int(count or 0), kill_at.startswith("+")
        self.payload_start = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """A write, and perhaps the last one."""
        if offset >= self.payload_start:
            kind = "payload"
        elif offset < 2 * 4096:
            kind = "superblock"
        else:
            kind = "entry" if any(buffers[0]) else "invalidate"
        dies = False
        if self.payload_start and kind == self.what:
            self.left -= 1
            dies = self.left == 0
        if dies and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and kind == "payload":  # torn: half of it arrives
            half = memoryview(b"".join(buffers))
            super().pwritev(fd, [half[: len(half) // 2 + 100]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        moved = super().pwritev(fd, buffers, offset)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved


def main() -> None:
    """Write chains for ever, touching some blocks so that evictions give second chances."""
    directory, kill_at, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    io = DyingIO(kill_at)
    if kill_at.startswith("recovery"):
        io.payload_start = 1 << 60
    store = open_store(directory, io)
    io.payload_start = store.superblock.payload_offset(0)
    print("ready", flush=True)
    number = first
    while True:
        numbers = range(number, number + BATCH)
        store.write([record_of(n) for n in numbers], [memoryview(payload_of(n)) for n in numbers])
        store.read([hash_of(number)], [memoryview(bytearray(SLOT_BYTES))])  # a hit: kept at eviction
        number += BATCH
        print(number, flush=True)


if __name__ == "__main__":
    KEY = bytes.fromhex(sys.argv[4]) if len(sys.argv) > 4 else None
    main()

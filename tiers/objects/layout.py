"""Where blocks lie in a bucket: keys, an object's table of names, a record for each block (docs/format.md)."""

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

from kvtier.tiers import ChainHash, checksum
from kvtier.tiers.shared import RecordForm, format_epoch

MAX_BLOCKS: Final = 256  # in one object
_MAGIC: Final = b"kvtobj\0\1"
_NAME_BYTES: Final = 32
_START: Final = Struct("<8sQQ")  # magic, number of blocks, bytes of a record
_END: Final = Struct("<Q")  # xxh3 of all before it
TABLE_BYTES: Final = _START.size + MAX_BLOCKS * _NAME_BYTES + _END.size


class ObjectSpace:
    """Keys and layout of one model's objects, below a key prefix. Immutable.

    An object is named by its first block. Its table has one length, and so have its records: a reader knows where each
    lies before it reads.
    """

    def __init__(self, prefix: str, form: RecordForm, slot_bytes: int, block_size: int) -> None:
        self.form = form
        self.slot_bytes = slot_bytes
        self.block_size = block_size
        self.record_bytes = form.head_bytes + slot_bytes
        self._stem = f"{prefix}/blocks/{form.name}/"
        self.epoch_key = f"{prefix}/epochs/{form.name}"
        self.probe_key = f"{self._stem}probe"

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """What stands for each block in tables: 32 bytes."""
        return [bytes.fromhex(name.decode()) for name in self.form.names(hashes)]

    def key(self, first: bytes, epoch: int) -> str:
        """Of the object whose first block has this name."""
        return f"{self._stem}{format_epoch(epoch).decode()}/{first.hex()}"

    def table(self, names: Sequence[bytes]) -> bytes:
        """What an object of these blocks (`MAX_BLOCKS` at most) begins with."""
        start = _START.pack(_MAGIC, len(names), self.record_bytes)
        table = start + b"".join(names).ljust(MAX_BLOCKS * _NAME_BYTES, b"\0")
        return table + _END.pack(checksum(memoryview(table)))

    def named(self, table: memoryview, first: bytes) -> list[bytes]:
        """The names in a table, of which `first` is the first. Empty if it is no table of ours.

        Nothing is served for what a table says: every record says itself which block it is.
        """
        if table.nbytes != TABLE_BYTES:
            return []
        magic, count, record_bytes = _START.unpack_from(table)
        body = table[: -_END.size]
        if magic != _MAGIC or record_bytes != self.record_bytes or not 1 <= count <= MAX_BLOCKS:
            return []
        if _END.unpack(table[-_END.size :]) != (checksum(body),):
            return []
        rest = bytes(body[_START.size :])
        names = [rest[start : start + _NAME_BYTES] for start in range(0, count * _NAME_BYTES, _NAME_BYTES)]
        return names if names[0] == first else []

    def span(self, position: int, count: int) -> tuple[int, int]:
        """First byte of an object's records from a position on, and the one behind `count` of them."""
        start = TABLE_BYTES + position * self.record_bytes
        return start, start + count * self.record_bytes

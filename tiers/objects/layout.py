"""Where blocks lie in a bucket: keys, an object's table of names, a record for each block (docs/format.md)."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from kvtier.tiers import ChainHash, checksum
from kvtier.tiers.shared import RecordForm, format_epoch

MAX_BLOCKS: Final = 256  # in one object
_EQUAL: Final = b"kvtobj\0\1"  # magic of a table of records of one length
_LENGTHS: Final = b"kvtobj\0\2"  # … of records that have a length each
_NAME_BYTES: Final = 32
_LENGTH_BYTES: Final = 4
_START: Final = Struct("<8sQQ")  # magic, number of blocks, bytes of a record at the most
_END: Final = Struct("<Q")  # xxh3 of all before it
TABLE_BYTES: Final = _START.size + MAX_BLOCKS * _NAME_BYTES + _END.size
_LONG_TABLE_BYTES: Final = TABLE_BYTES + MAX_BLOCKS * _LENGTH_BYTES

Edges = Sequence[int]
"""Where in an object each record begins, and where the last one ends: one more than there are blocks."""


class ObjectTable(NamedTuple):
    """An object's content by its table. The table is not verified: every record has its block's name."""

    names: list[bytes]
    edges: Edges


class ObjectSpace:
    """Keys and layout of one model's objects, below a key prefix. Immutable.

    An object is named by its first block. Its table has one length; records have one, too, or each its own if
    compressed.
    """

    def __init__(self, prefix: str, form: RecordForm, slot_bytes: int, block_size: int) -> None:
        self.form = form
        self.slot_bytes = slot_bytes
        self.block_size = block_size
        self.record_bytes = form.head_bytes + slot_bytes  # at the most
        self._has_lengths = form.stored_bytes is not None
        self.table_bytes = _LONG_TABLE_BYTES if self._has_lengths else TABLE_BYTES
        self._magic = _LENGTHS if self._has_lengths else _EQUAL
        self._stem = f"{prefix}/blocks/{form.name}/"
        self.epoch_key = f"{prefix}/epochs/{form.name}"
        self.probe_key = f"{self._stem}probe"
        self._kv_probes = f"{prefix}/kv-probes/{form.name}/"

    def kv_probe_key(self, epoch: int) -> str:
        """For the KV probe of the creator of these objects."""
        return f"{self._kv_probes}{format_epoch(epoch).decode()}"

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """The name of each block in tables: 32 bytes."""
        return [bytes.fromhex(name.decode()) for name in self.form.names(hashes)]

    def key(self, first: bytes, epoch: int) -> str:
        """Of the object whose first block has this name."""
        return f"{self._stem}{format_epoch(epoch).decode()}/{first.hex()}"

    def edges(self, lengths: Sequence[int]) -> Edges:
        """Of records as long as these."""
        if self._has_lengths:
            return array("Q", accumulate(lengths, initial=self.table_bytes))
        return range(self.table_bytes, self.table_bytes + len(lengths) * self.record_bytes + 1, self.record_bytes)

    def table(self, names: Sequence[bytes], edges: Edges) -> bytes:
        """The first bytes of an object of these blocks (`MAX_BLOCKS` at most)."""
        table = _START.pack(self._magic, len(names), self.record_bytes)
        table += b"".join(names).ljust(MAX_BLOCKS * _NAME_BYTES, b"\0")
        if self._has_lengths:
            table += np.diff(np.array(edges)).astype("<u4").tobytes().ljust(MAX_BLOCKS * _LENGTH_BYTES, b"\0")
        return table + _END.pack(checksum(memoryview(table)))

    def parse(self, table: memoryview, first: bytes) -> ObjectTable | None:
        """The table of an object that begins with `first`; None if not ours, or if a record is too long for ours."""
        if table.nbytes != self.table_bytes:
            return None
        magic, count, record_bytes = _START.unpack_from(table)
        body = table[: -_END.size]
        if magic != self._magic or record_bytes != self.record_bytes or not 1 <= count <= MAX_BLOCKS:
            return None
        if _END.unpack(table[-_END.size :]) != (checksum(body),):
            return None
        rest = bytes(body[_START.size :])
        names = [rest[start : start + _NAME_BYTES] for start in range(0, count * _NAME_BYTES, _NAME_BYTES)]
        lengths = [self.record_bytes] * count
        if self._has_lengths:
            lengths = np.frombuffer(rest, "<u4", count, MAX_BLOCKS * _NAME_BYTES).tolist()
        if names[0] != first or min(lengths) < self.form.head_bytes or max(lengths) > self.record_bytes:
            return None
        return ObjectTable(names, self.edges(lengths))


class ArrivingRecords:
    """The records of a read: heads are kept apart, and each payload goes into its slot when it comes."""

    def __init__(
        self,
        lengths: Sequence[int],
        head_bytes: int,
        into: Sequence[memoryview],
        on_record: Callable[[int, bytes], None],
    ) -> None:
        """`lengths` of whole records, in bytes: at least `head_bytes`, at most those and a slot of `into`.

        `on_record` is called for each record when it is whole, with its number and head.
        """
        self.num_whole = 0
        self._on_record = on_record
        self._lengths = lengths
        self._head_bytes = head_bytes
        self._into = into
        self._head = bytearray()
        self._rest = memoryview(b"")  # of the slot that is being filled

    def take(self, came: memoryview) -> None:
        """The next bytes. Those behind the last record are ignored."""
        while came and self.num_whole < len(self._lengths):
            if missing := self._head_bytes - len(self._head):
                self._head += came[:missing]
                came = came[missing:]
                if len(self._head) < self._head_bytes:
                    return
                self._rest = self._into[self.num_whole][: self._lengths[self.num_whole] - self._head_bytes]
            fits = min(len(came), len(self._rest))
            self._rest[:fits] = came[:fits]
            self._rest, came = self._rest[fits:], came[fits:]
            if not self._rest:
                head, number = bytes(self._head), self.num_whole
                self._head.clear()
                self.num_whole += 1
                self._on_record(number, head)

"""Parsers of bytes that a stranger's socket, Redis, disk or file holds, for fuzz_child.py: a value or a typed error."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import numpy as np
import xxhash
from redis_stories import together

from kvtier.connector.daemon.wire import (
    MAX_FRAME,
    REPLIES,
    REQUESTS,
    FrameReader,
    unpack_handshake,
    unpack_handshake_reply,
)
from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.service.archive.archive import HEADER_BYTES, Header, Parser, decode_header, encode_header
from kvtier.service.events.prefix_index import PrefixIndex
from kvtier.service.events.wire import decode_batch
from kvtier.service.traces.request_trace import parse_line
from kvtier.tiers.checksum import checksum
from kvtier.tiers.cipher import Encryption, key_id
from kvtier.tiers.compression import BlockCodec
from kvtier.tiers.errors import FormatError
from kvtier.tiers.file import slab
from kvtier.tiers.file.slab import codec_of
from kvtier.tiers.objects.layout import MAX_BLOCKS, ObjectSpace
from kvtier.tiers.redis.wire import Wire, WireError
from kvtier.tiers.shared.forms import ClearForm, EncryptedForm, RecordForm

NAME: Final = b"n" * 32
Target = Callable[[bytes], None]


def frames(data: bytes) -> None:
    """The daemon's socket, both ways, before and after the handshake."""
    frame = len(data).to_bytes(4, "little") + data
    for unpack in (unpack_handshake, unpack_handshake_reply):
        with suppress(FormatError):
            for body in FrameReader[memoryview](MAX_FRAME).feed(frame):
                unpack(body)
    for decoder in (REQUESTS, REPLIES):
        with suppress(FormatError):
            FrameReader[Any](MAX_FRAME, decoder).feed(frame)


FORMS: Final[tuple[RecordForm, ...]] = (
    ClearForm(b"f" * 32, 4096, 4),
    ClearForm(b"f" * 32, 4096, 4, "a secret of the fuzzer's"),
    EncryptedForm(b"f" * 32, 4096, 4, b"k" * 32),
    ClearForm(b"f" * 32, 4096, 4, codec=BlockCodec(4096)),
    ClearForm(b"f" * 32, 4096, 4, "a secret of the fuzzer's", codec=BlockCodec(4096)),
    EncryptedForm(b"f" * 32, 4096, 4, b"k" * 32, codec=BlockCodec(4096)),
)


def record(data: bytes) -> None:
    """A value in Redis, in each of its forms."""
    for form in FORMS:
        head = data[: form.head_bytes].ljust(form.head_bytes, b"\0")
        payload = data[form.head_bytes :][:4096].ljust(4096, b"\0")
        form.decode(head, memoryview(bytearray(payload)), NAME, 7)


def object_table(data: bytes) -> None:
    """What an object begins with, as it came and with a checksum that is right: both layouts."""
    for form in (FORMS[0], FORMS[3]):
        space = ObjectSpace("kvtier", form, 4096, 4)
        true = space.table([NAME], space.edges([space.record_bytes]))
        kept = (8, 56, 24 + 8192)[data[0] % 3 if data else 0]  # the magic, up to a name, or up to the lengths
        body = (true[:kept] + data)[: len(true) - 8].ljust(len(true) - 8, b"\0")
        for table in (data, body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")):
            found = space.parse(memoryview(table), NAME)
            if found is not None:
                assert found.names[0] == NAME
                assert len(found.names) <= MAX_BLOCKS
                assert len(found.edges) == len(found.names) + 1
                lengths = [end - start for start, end in pairwise(found.edges)]
                assert all(form.head_bytes <= length <= space.record_bytes for length in lengths)


def replies(data: bytes) -> None:
    """What a Redis server answers: values into buffers, which stay where they are, and short replies."""
    mine, other = socket.socketpair()
    with mine:
        with other:
            other.sendall(data[1:])
        wire = Wire(mine)
        wire.begin(time.monotonic() + 5)
        wire.num_expected = 9
        around = bytearray(64 + 8 * 40)
        buffers = [memoryview(around)[32 + 40 * i : 72 + 40 * i] for i in range(8)]
        with suppress(WireError):
            if data[:1] < b"\x40":
                wire.all_are(b":1\r\n", 3)
            elif data[:1] < b"\x80":
                list(together(wire, 8, buffers))
            else:
                wire.value(8, buffers[0])
                wire.value(8, buffers[0], lambda head: head[0])
            for _ in range(4):
                wire.reply()
        assert not any(around[:32]), "written before the buffers"
        assert not any(around[-32:]), "written behind the buffers"


def superblock(data: bytes) -> None:
    """A slab's first 8 KiB, as they came and with a checksum that is right."""
    body = (slab.MAGIC + slab.VERSION.to_bytes(4, "little") + data)[:2040].ljust(2040, b"\0")
    forged = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    for header in (data, forged.ljust(slab.HEADER_BYTES, b"\0")):
        try:
            found = slab.decode(header, "a slab")
        except FormatError:
            continue
        slab.num_damaged(header)
        assert slab.decode(slab.encode(found).ljust(slab.HEADER_BYTES, b"\0"), "again") == found
        assert 0 < found.num_slots <= found.file_bytes
        for slot in (0, found.num_slots - 1):
            assert 0 <= found.row_offset(slot) < found.payload_offset(slot) < found.file_bytes


def rows(data: bytes) -> None:
    """Rows of a slab's table, in the clear and encrypted, as they came and with checksums that are right."""
    for key in (None, b"k" * 32):
        made_with = None if key is None else Encryption(key_id(key), bytes(16))
        plan = slab.plan(b"f" * 32, 4096, 4, 1 << 20, made_with)
        codec, size = codec_of(plan, key, "a slab"), plan.entry_bytes
        dtype = slab.entry_dtype(4, is_encrypted=key is not None)
        made = np.frombuffer(bytearray(data[: 8 * size].ljust(8 * size, b"\0")), dtype).copy()
        slots = np.arange(8, dtype=np.int64)
        for _ in range(2):
            valid = slab.find_valid(made, slots, plan)
            for each in codec.to_records(made[valid]):
                assert len(each.chain_hash) == 32
            slab.seal_rows(made, plan)


def archive(data: bytes) -> None:
    """An archive's header, as it came and with a checksum that is right."""
    summed = data[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8, b"\0")
    for each in (data, summed + checksum(memoryview(summed)).to_bytes(8, "little")):
        with suppress(FormatError):
            assert len(decode_header(each).fingerprint) == 32


def records(data: bytes) -> None:
    """What follows an archive's header."""
    header = Header(b"f" * 32, 64, 4, 3)
    with suppress(FormatError):
        for _, payload in Parser(header, bytes(HEADER_BYTES)).blocks(memoryview(data)):
            assert len(payload) == header.slot_bytes


def events(data: bytes) -> None:
    """A batch of KV events, and what it does to an index."""
    try:
        batch = decode_batch(data)
    except FormatError:
        return
    index = PrefixIndex(1)
    for event in batch.events:
        index.apply("w", event)
    index.check()


def raising(parse: Callable[[bytes], object]) -> Target:
    """For parsers that return or raise."""

    def target(data: bytes) -> None:
        with suppress(FormatError):
            parse(data)

    return target


TARGETS: Final[dict[str, Target]] = {
    "frames": frames,
    "record": record,
    "replies": replies,
    "superblock": superblock,
    "rows": rows,
    "events": events,
    "plan": raising(StepPlan.decode),
    "archive": archive,
    "records": records,
    "object_table": object_table,
    "trace": raising(parse_line),
}

_OPS: Final = (CopyOp(1, "a", (2, 3), (4, 5), (6, 7)), CopyOp(2, "b", (8,), (9,), (1,), True))
# What random bytes do not come to: whole inputs, from which coverage goes on.
SEEDS: Final[dict[str, list[bytes]]] = {
    "plan": [StepPlan(1, 2).encode(), StepPlan(1, 2, _OPS, _OPS).encode()],
    "archive": [
        encode_header(Header(b"f" * 32, 64, 4, 3)),
        encode_header(Header(b"f" * 32, 64, 4, 3, Encryption(key_id(b"k" * 32), bytes(16)))),
    ],
}

"""A block as Redis holds it: its key, and a header that says whose bytes follow (byte by byte: docs/format.md)."""

from collections.abc import Iterable
from typing import Final

import msgpack

from kvtier.tiers.checksum import checksum
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

VERSION: Final = 1
_CODEC: Final = "raw"  # the payload is the slot's bytes as they are
_SEAL_BYTES: Final = 8
_PREFIX_BYTES: Final = 4  # u32: length of the header behind it
_EPOCH_END: Final = 1 << 62  # beyond it a reset could not raise it any more


def format_epoch(epoch: int) -> bytes:
    """Sixteen hexadecimal digits, as in keys and in the epoch's own."""
    return b"%016x" % epoch


def parse_epoch(value: object) -> int:
    """What `format_epoch` made such digits from; 0 for anything else, which no epoch is."""
    if not isinstance(value, bytes) or len(value) != 16 or not set(value) <= set(b"0123456789abcdef"):
        return 0
    epoch = int(value, 16)
    return epoch if epoch < _EPOCH_END else 0


class Namespace:
    """Keys and records of one model's blocks (`fingerprint`, 32 bytes) below a key prefix. Immutable.

    Every record of a namespace has the same length, `value_bytes`: a header of `head_bytes`, then `slot_bytes` of
    payload. So a reader knows what to expect before it reads, and refuses any other length.
    """

    def __init__(self, prefix: str, fingerprint: bytes, slot_bytes: int, block_size: int) -> None:
        self.fingerprint = fingerprint
        self.slot_bytes = slot_bytes
        self.block_size = block_size
        self._stem = f"{prefix}:{fingerprint.hex()[:16]}:".encode()
        self._blank, self._at = _layout(fingerprint, slot_bytes, block_size)
        self.head_bytes = len(self._blank)
        self.value_bytes = self.head_bytes + slot_bytes

    @property
    def epoch_key(self) -> bytes:
        """Where the namespace's epoch stands."""
        return self._stem + b"epoch"

    @property
    def probe_key(self) -> bytes:
        """What a probe writes."""
        return self._stem + b"probe"

    def key(self, chain_hash: ChainHash, epoch: int) -> bytes:
        """One of `keys`."""
        return self.keys([chain_hash], epoch)[0]

    def keys(self, hashes: Iterable[ChainHash], epoch: int) -> list[bytes]:
        """`{prefix}:{fingerprint, 16 digits}:{epoch}:{chain hash}` of each, the hash whole: all of one length."""
        stem = self._stem + format_epoch(epoch) + b":"
        return [stem + chain_hash.hex().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, epoch: int) -> bytes:
        """What stands before the payload: `head_bytes` bytes."""
        at, head = self._at, bytearray(self._blank)
        head[at["epoch"]] = epoch.to_bytes(8, "little")
        head[at["chain_hash"]] = record.chain_hash
        head[at["parent"]] = record.parent
        head[at["num_tokens"]] = (len(record.tokens) // 4).to_bytes(4, "little")
        head[at["tokens"]] = record.tokens.ljust(4 * self.block_size, b"\0")
        head[at["xxh3"]] = record.checksum.to_bytes(8, "little")
        head[at["seal"]] = _seal(head[:-_SEAL_BYTES])
        return bytes(head)

    def decode(self, head: bytes, chain_hash: ChainHash, epoch: int) -> BlockRecord | Outcome:
        """The record a header of `head_bytes` describes, if it is that of this very block.

        KEY_MISMATCH where it is another block's, model's or version's; CHECKSUM where it is no header of ours. A header
        counts only if writing its record anew gives the same bytes, so nothing in it goes unchecked.
        """
        at = self._at
        num_tokens = int.from_bytes(head[at["num_tokens"]], "little")
        tokens = head[at["tokens"]][: 4 * num_tokens]
        record = BlockRecord(chain_hash, head[at["parent"]], tokens, int.from_bytes(head[at["xxh3"]], "little"))
        if self.encode(record, epoch) == head:
            return record
        return Outcome.KEY_MISMATCH if head[-_SEAL_BYTES:] == _seal(head[:-_SEAL_BYTES]) else Outcome.CHECKSUM


def _layout(fingerprint: bytes, slot_bytes: int, block_size: int) -> tuple[bytes, dict[str, slice]]:
    """The header with zeros for what differs from block to block, and where in it each of its values lies.

    All are of fixed width, so that no block needs msgpack again.
    """
    fields: dict[str, int | str | bytes] = {
        "version": VERSION,
        "codec": _CODEC,
        "fingerprint": fingerprint,
        "epoch": bytes(8),
        "chain_hash": bytes(32),
        "parent": bytes(32),
        "num_tokens": bytes(4),
        "tokens": bytes(4 * block_size),
        "payload_len": slot_bytes,
        "xxh3": bytes(8),
        "seal": bytes(_SEAL_BYTES),
    }
    header = msgpack.packb(fields)
    places, so_far = {}, {}
    for name, value in fields.items():
        so_far[name] = value
        end = _PREFIX_BYTES + len(msgpack.packb(so_far))  # up to 15 fields, a map's own mark is one byte
        places[name] = slice(end - len(value) if isinstance(value, bytes) else end, end)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header, places


def _seal(head: bytes | bytearray) -> bytes:
    """xxh3-64 of everything in the head before it."""
    return checksum(memoryview(head)).to_bytes(_SEAL_BYTES, "little")

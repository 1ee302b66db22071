"""A block as Redis holds it: its key, and a header that says whose bytes follow (byte by byte: docs/format.md)."""

from typing import Any, Final

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
        blank = BlockRecord(bytes(32), bytes(32), b"", 0)
        self.head_bytes = len(self.encode(blank, 0))
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
        """`{prefix}:{fingerprint, 16 digits}:{epoch}:{chain hash}`, the hash whole."""
        return self._stem + format_epoch(epoch) + b":" + chain_hash.hex().encode()

    def encode(self, record: BlockRecord, epoch: int) -> bytes:
        """What stands before the payload: `head_bytes` bytes."""
        fields = {
            "version": VERSION,
            "codec": _CODEC,
            "fingerprint": self.fingerprint,
            "epoch": epoch.to_bytes(8, "little"),
            "chain_hash": record.chain_hash,
            "parent": record.parent,
            "num_tokens": (len(record.tokens) // 4).to_bytes(4, "little"),
            "tokens": record.tokens.ljust(4 * self.block_size, b"\0"),
            "payload_len": self.slot_bytes,
            "xxh3": record.checksum.to_bytes(8, "little"),
            "seal": bytes(_SEAL_BYTES),
        }
        header: bytes = msgpack.packb(fields)
        unsealed = len(header).to_bytes(_PREFIX_BYTES, "little") + header[:-_SEAL_BYTES]
        return unsealed + _seal(unsealed)

    def decode(self, head: bytes, chain_hash: ChainHash, epoch: int) -> BlockRecord | Outcome:
        """The record a header of `head_bytes` describes, if it is that of this very block.

        KEY_MISMATCH where it is another block's, model's or version's; CHECKSUM where it is no header of ours. A header
        counts only if writing its record anew gives the same bytes, so nothing in it goes unchecked.
        """
        fields = _unpack(head)
        try:
            num_tokens = int.from_bytes(fields["num_tokens"], "little")
            tokens = fields["tokens"][: 4 * num_tokens]
            record = BlockRecord(
                fields["chain_hash"], fields["parent"], tokens, int.from_bytes(fields["xxh3"], "little")
            )
            fits = len(record.parent) == 32 and len(tokens) <= 4 * self.block_size
            if fits and record.chain_hash == chain_hash and self.encode(record, epoch) == head:
                return record
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return Outcome.CHECKSUM
        return Outcome.KEY_MISMATCH if head[-_SEAL_BYTES:] == _seal(head[:-_SEAL_BYTES]) else Outcome.CHECKSUM


def _seal(head: bytes) -> bytes:
    """xxh3-64 of everything in the head before it."""
    return checksum(memoryview(head)).to_bytes(_SEAL_BYTES, "little")


def _unpack(head: bytes) -> dict[str, Any]:
    """The header's map; {} where it is none."""
    try:
        fields = msgpack.unpackb(head[_PREFIX_BYTES:])
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return {}
    return fields if isinstance(fields, dict) else {}

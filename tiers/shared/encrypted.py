"""EncryptedForm: a record that is hidden by a key, compressed before that if asked (docs/format.md)."""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from struct import Struct
from typing import Final

import numpy as np

from kvtier.tiers import STAMP_BYTES, BlockCodec, BlockRecord, ChainHash, Outcome, RecordCipher, checksum, derive
from kvtier.tiers.shared.heads import layout, purpose
from kvtier.tiers.shared.saved import SavedBytes

_HASH_BYTES: Final = 32
_NAME_BYTES: Final = 8  # of a namespace's name, in keys
_STORED: Final = Struct("<BI")  # of what is compressed: its split, and its length
_LENGTHS: Final = 16  # what is compressed is as long as one of so many parts of a slot: lengths are not hidden


class EncryptedForm:
    """Tokens, payload and the blocks' names hidden by a key of KEY_BYTES; see `RecordCipher`.

    Head and payload are sealed each by itself, for they lie apart: a payload is received into its slot and decrypted
    there. What the head hides is associated with the payload, so the two cannot be parted. With a `codec` of slots the
    payload is compressed first, and padded. Such records have names and keys of their own.
    """

    def __init__(
        self,
        fingerprint: bytes,
        slot_bytes: int,
        block_size: int,
        key: bytes,
        tier: str = "redis",
        codec: BlockCodec | None = None,
    ) -> None:
        self._codec = codec
        self.saved = None if codec is None else SavedBytes(slot_bytes)
        use = "" if codec is None else "compressed "
        self._cipher = RecordCipher(key, purpose(tier, f"{use}record") + fingerprint)
        self._name_key = derive(key, purpose(tier, f"{use}name") + fingerprint)
        self.name = blake2b(key=self._name_key, digest_size=_NAME_BYTES).hexdigest()
        self._slot_bytes = slot_bytes
        self._fields = Struct(f"<{_HASH_BYTES}sI{4 * block_size}sQ")  # parent, number of tokens, tokens, checksum
        self._hidden_bytes = self._fields.size + (0 if codec is None else _STORED.size)
        sealed = {"hidden": bytes(self._hidden_bytes + STAMP_BYTES), "stamp": bytes(STAMP_BYTES)}
        self._blank, self._at = layout(
            {"version": 1, "codec": "aes-256-gcm", "payload_len": slot_bytes, **sealed}
            if codec is None
            else {
                "version": 2,
                "codec": "zstd+aes-256-gcm",
                "payload_len": slot_bytes,
                "stored_len": bytes(4),
                **sealed,
            }
        )
        self.head_bytes = len(self._blank)

    @property
    def stored_bytes(self) -> Callable[[bytes], int] | None:
        return None if self._codec is None else self._told

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """Keyed digests: from a chain hash, who guesses the tokens could tell that he is right."""
        key = self._name_key
        return [blake2b(chain_hash, key=key, digest_size=32).hexdigest().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The payload is encrypted into memory of its own, for others may be reading it."""
        more, into = b"", memoryview(np.empty(self._slot_bytes, np.uint8))
        if self._codec is not None:
            split, stored = self._codec.shrink(payload)
            more, into = _STORED.pack(split, stored.nbytes), into[: self._padded(stored.nbytes)]
            into[: stored.nbytes] = stored
            into[stored.nbytes :] = bytes(into.nbytes - stored.nbytes)
            payload = into
        hidden = self._cipher.seal(self._hidden(record, more), _named(b"head", record.chain_hash, epoch))
        stamp = self._cipher.encrypt_into(payload, _named(b"payload", record.chain_hash, epoch, hidden), into)
        if self.saved is not None:
            self.saved.sent(into.nbytes)
        return self._head(hidden, stamp, into.nbytes), into

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        """Decrypts `payload` where it lies, and decompresses it there."""
        hidden, stamp = head[self._at["hidden"]], head[self._at["stamp"]]
        num_stored = self._slot_bytes if self._codec is None else self._told(head)
        fields = self._cipher.open(hidden, _named(b"head", chain_hash, epoch))
        if fields is None or num_stored > self._slot_bytes or self._head(hidden, stamp, num_stored) != head:
            return Outcome.CHECKSUM
        parent, num_tokens, tokens, xxh3 = self._fields.unpack_from(fields)
        record, more = BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], xxh3), fields[self._fields.size :]
        if self._hidden(record, more) != fields:
            return Outcome.KEY_MISMATCH
        stored = payload[:num_stored]
        if not self._cipher.decrypt_into(stored, stamp, _named(b"payload", chain_hash, epoch, hidden), stored):
            return Outcome.CHECKSUM
        if self._codec is not None:
            split, length = _STORED.unpack(more)
            if self._padded(length) != num_stored or not self._codec.restore(split, stored[:length], payload):
                return Outcome.CHECKSUM
        if checksum(payload) != xxh3:
            return Outcome.CHECKSUM
        if self.saved is not None:
            self.saved.received(num_stored)
        return record

    def _padded(self, num_bytes: int) -> int:
        part = -(-self._slot_bytes // _LENGTHS)
        return min(self._slot_bytes, -(-num_bytes // part) * part)

    def _told(self, head: bytes) -> int:
        """How many bytes a compressed record's head says to stand behind it."""
        return int.from_bytes(head[self._at["stored_len"]], "little")

    def _hidden(self, record: BlockRecord, more: bytes) -> bytes:
        return self._fields.pack(record.parent, len(record.tokens) // 4, record.tokens, record.checksum) + more

    def _head(self, hidden: bytes, stamp: bytes, num_stored: int) -> bytes:
        head = bytearray(self._blank)
        head[self._at["hidden"]] = hidden
        head[self._at["stamp"]] = stamp
        if self._codec is not None:
            head[self._at["stored_len"]] = num_stored.to_bytes(4, "little")
        return bytes(head)


def _named(part: bytes, chain_hash: ChainHash, epoch: int, hidden: bytes = b"") -> bytes:
    """What one part of a record is called, for its cipher."""
    return part.ljust(8, b"\0") + epoch.to_bytes(8, "little") + chain_hash + hidden

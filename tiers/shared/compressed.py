"""CompressedForm: a record whose payload is compressed, in the clear or sealed by a secret (docs/format.md)."""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from kvtier.tiers import BlockCodec, BlockRecord, ChainHash, Outcome, checksum
from kvtier.tiers.shared.heads import HeadSeal, derived, layout, packer, purpose
from kvtier.tiers.shared.saved import SavedBytes

VERSION: Final = 2
_HASH_BYTES: Final = 32
_NAME_BYTES: Final = 8  # of a namespace's name, in keys
_CHECKSUM_BYTES: Final = 8


class CompressedForm:
    """As `ClearForm`, but what stands behind the head is what `BlockCodec` made of the payload.

    The head says how long that is, and how it was made; its checksum is that of the payload itself. With a secret the
    HMAC covers the stored bytes, so nothing is decompressed that nobody sealed. The name in keys is this form's own:
    who does not compress never finds such a record, and so never deletes it as damaged.
    """

    def __init__(
        self, fingerprint: bytes, slot_bytes: int, block_size: int, secret: str | None = None, tier: str = "redis"
    ) -> None:
        self._codec = BlockCodec(slot_bytes)
        self.saved = SavedBytes(slot_bytes)
        self._slot_bytes = slot_bytes
        self._seal = HeadSeal(secret, purpose(tier, "compressed record"))
        namespace = purpose(tier, "compressed namespace") + fingerprint
        self.name = sha256(namespace).hexdigest()[: 2 * _NAME_BYTES]
        if secret is not None:
            self.name = derived(secret, namespace).hex()[: 2 * _NAME_BYTES]
        blank, at = layout(
            {
                "version": VERSION,
                "codec": "zstd" if secret is None else "zstd+hmac-sha256",
                "fingerprint": fingerprint,
                "epoch": bytes(8),
                "chain_hash": bytes(_HASH_BYTES),
                "parent": bytes(_HASH_BYTES),
                "num_tokens": bytes(4),
                "tokens": bytes(4 * block_size),
                "payload_len": slot_bytes,
                "split": bytes(1),
                "stored_len": bytes(4),
                "xxh3": bytes(_CHECKSUM_BYTES),
                "seal": bytes(self._seal.num_bytes),
            }
        )
        self.head_bytes = len(blank)
        self._stored_at = at["stored_len"]
        codes = {"epoch": "Q", "chain_hash": "32s", "parent": "32s", "num_tokens": "I"}
        codes |= {"tokens": f"{4 * block_size}s", "split": "B", "stored_len": "I", "xxh3": "Q"}
        self._fields, self._between = packer(blank[: -self._seal.num_bytes], at, codes)

    def stored_bytes(self, head: bytes) -> int:
        """How many bytes the head says to stand behind it: whatever is there, if it is no head of ours."""
        return int.from_bytes(head[self._stored_at], "little")

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        return [chain_hash.hex().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """What is shorter has memory of its own; what does not shrink is sent from where it lies."""
        split, stored = self._codec.shrink(payload)
        self.saved.sent(stored.nbytes)
        unsealed = self._unsealed(record, epoch, split, stored.nbytes)
        return unsealed + self._seal.of(unsealed, stored), stored

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        """Decompresses where the bytes came: `payload` is a slot that begins with them. `seen` counts for nothing."""
        unsealed = head[: -self._seal.num_bytes]
        num_stored = self.stored_bytes(head)
        if num_stored > self._slot_bytes:
            return Outcome.CHECKSUM
        stored = payload[:num_stored]
        if not hmac.compare_digest(head[-self._seal.num_bytes :], self._seal.of(unsealed, stored)):
            return Outcome.CHECKSUM
        fields = self._fields.unpack(unsealed)
        parent, num_tokens, tokens, split, xxh3 = fields[5], fields[7], fields[9], fields[11], fields[15]
        record = BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], xxh3)
        if self._unsealed(record, epoch, split, num_stored) != unsealed:
            return Outcome.KEY_MISMATCH
        if not self._codec.restore(split, stored, payload):
            return Outcome.CHECKSUM
        if checksum(payload) != xxh3:
            return Outcome.CHECKSUM
        self.saved.received(num_stored)
        return record

    def _unsealed(self, record: BlockRecord, epoch: int, split: int, num_stored: int) -> bytes:
        """The head but for its seal."""
        c = self._between
        return self._fields.pack(
            c[0], epoch, c[1], record.chain_hash, c[2], record.parent, c[3], len(record.tokens) // 4, c[4],
            record.tokens, c[5], split, c[6], num_stored, c[7], record.checksum, c[8],
        )  # fmt: skip

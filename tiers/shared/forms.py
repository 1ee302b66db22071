"""Records of blocks where nodes share them: in the clear, sealed by a secret, or encrypted (docs/format.md)."""

import hmac
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from pydantic import SecretStr

from kvtier.tiers import STAMP_BYTES, BlockRecord, ChainHash, Outcome, RecordCipher, checksum, derive, load_key
from kvtier.tiers.shared.heads import MAC, derived, layout, packer

VERSION: Final = 1
_HASH_BYTES: Final = 32
_NAME_BYTES: Final = 8  # of a namespace's name, in keys
_CHECKSUM_BYTES: Final = 8
_MAC_BYTES: Final = 32
_EPOCH_END: Final = 1 << 62  # beyond it a reset could not raise it any more


class RecordForm(Protocol):
    """How the blocks of one model are named and written. Immutable.

    A record is `head_bytes` longer than a slot, or shorter where `stored_bytes` tells how long one is.
    """

    name: str
    """Sixteen hexadecimal digits that stand for the model, and for secret or key, in every key."""
    head_bytes: int

    @property
    def stored_bytes(self) -> Callable[[bytes], int] | None:
        """How many bytes a head says to stand behind it; None if it is a slot's length, always."""

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """What stands for each block in its key: 64 hexadecimal digits."""

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The head, and what is stored behind it: the payload's own memory, or bytes that stand for it, no more."""

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        """The record, if head and payload are whole and this very block's; `payload` then holds the block's bytes.

        `payload` is a slot that begins with what stood behind the head.

        KEY_MISMATCH if they are another block's, model's or version's; CHECKSUM if they are no record of ours,
        and `payload` may then hold anything. A head counts only if writing its record anew gives the same bytes, so
        nothing in it goes unchecked. `seen` is xxh3-64 of `payload` as it is, if that was computed already.
        """


def format_epoch(epoch: int) -> bytes:
    """Sixteen hexadecimal digits, as in keys and in the epoch's own."""
    return b"%016x" % epoch


def parse_epoch(value: object) -> int:
    """What `format_epoch` made such digits from; 0 for anything else, which no epoch is."""
    if not isinstance(value, bytes) or len(value) != 16 or not set(value) <= set(b"0123456789abcdef"):
        return 0
    epoch = int(value, 16)
    return epoch if epoch < _EPOCH_END else 0


class SealOptions(Protocol):
    """What a tier's section says of how its records are sealed."""

    @property
    def secret(self) -> SecretStr | None: ...

    @property
    def key_file(self) -> Path | None: ...


def form_of(tier: str, config: SealOptions, fingerprint: bytes, slot_bytes: int, block_size: int) -> RecordForm:
    """As [`tier`] secret or key_file ask. ConfigError if the key file cannot be used."""
    if config.key_file is not None:
        key = load_key(config.key_file, f"[{tier}] key_file")
        return EncryptedForm(fingerprint, slot_bytes, block_size, key, tier)
    secret = config.secret.get_secret_value() if config.secret is not None else None
    return ClearForm(fingerprint, slot_bytes, block_size, secret, tier)


class ClearForm:
    """Tokens and payload as they are. xxh3 seals the head, which tells accidents; a secret seals all, which tells
    forgeries too: HMAC-SHA256 over head and payload, by a key made from the secret. Each tier has its own key of a
    secret: a record of one is none in another.
    """

    stored_bytes = None

    def __init__(
        self, fingerprint: bytes, slot_bytes: int, block_size: int, secret: str | None = None, tier: str = "redis"
    ) -> None:
        self._mac: hmac.HMAC | None = None
        self._seal_bytes = _CHECKSUM_BYTES
        self.name = fingerprint.hex()[: 2 * _NAME_BYTES]
        if secret is not None:
            self._mac = hmac.new(derived(secret, _purpose(tier, "record")), digestmod=MAC)
            self._seal_bytes = _MAC_BYTES
            self.name = derived(secret, _purpose(tier, "namespace") + fingerprint).hex()[: 2 * _NAME_BYTES]
        blank, at = layout(
            {
                "version": VERSION,
                "codec": "raw" if secret is None else "raw+hmac-sha256",
                "fingerprint": fingerprint,
                "epoch": bytes(8),
                "chain_hash": bytes(_HASH_BYTES),
                "parent": bytes(_HASH_BYTES),
                "num_tokens": bytes(4),
                "tokens": bytes(4 * block_size),
                "payload_len": slot_bytes,
                "xxh3": bytes(_CHECKSUM_BYTES),
                "seal": bytes(self._seal_bytes),
            }
        )
        self.head_bytes = len(blank)
        codes = {"epoch": "Q", "chain_hash": "32s", "parent": "32s", "num_tokens": "I"}
        codes |= {"tokens": f"{4 * block_size}s", "xxh3": "Q"}
        self._fields, self._between = packer(blank[: -self._seal_bytes], at, codes)

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        return [chain_hash.hex().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The payload is sent from where it lies."""
        unsealed = self._unsealed(record, epoch)
        return unsealed + self._seal(unsealed, payload), payload

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        unsealed = head[: -self._seal_bytes]
        if not hmac.compare_digest(head[-self._seal_bytes :], self._seal(unsealed, payload)):
            return Outcome.CHECKSUM
        _, _, _, _, _, parent, _, num_tokens, _, tokens, _, xxh3, _ = self._fields.unpack(unsealed)
        record = BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], xxh3)
        if self._unsealed(record, epoch) != unsealed:
            return Outcome.KEY_MISMATCH
        return record if (checksum(payload) if seen is None else seen) == xxh3 else Outcome.CHECKSUM

    def _unsealed(self, record: BlockRecord, epoch: int) -> bytes:
        """The head but for its seal."""
        c = self._between
        return self._fields.pack(
            c[0], epoch, c[1], record.chain_hash, c[2], record.parent, c[3], len(record.tokens) // 4, c[4],
            record.tokens, c[5], record.checksum, c[6],
        )  # fmt: skip

    def _seal(self, unsealed: bytes, payload: memoryview) -> bytes:
        if self._mac is None:
            return checksum(memoryview(unsealed)).to_bytes(_CHECKSUM_BYTES, "little")
        mac = self._mac.copy()
        mac.update(unsealed)
        mac.update(payload)  # lets go of the GIL
        return mac.digest()


class EncryptedForm:
    """Tokens, payload and the blocks' names hidden by a key of KEY_BYTES; see `RecordCipher`.

    Head and payload are sealed each by itself, for they lie apart: a payload is received into its slot and decrypted
    there. What the head hides is associated with the payload, so the two cannot be parted.
    """

    stored_bytes = None

    def __init__(self, fingerprint: bytes, slot_bytes: int, block_size: int, key: bytes, tier: str = "redis") -> None:
        self._cipher = RecordCipher(key, _purpose(tier, "record") + fingerprint)
        self._name_key = derive(key, _purpose(tier, "name") + fingerprint)
        self.name = blake2b(key=self._name_key, digest_size=_NAME_BYTES).hexdigest()
        self._slot_bytes = slot_bytes
        self._block_size = block_size
        hidden_bytes = _HASH_BYTES + 4 + 4 * block_size + _CHECKSUM_BYTES
        self._blank, self._at = layout(
            {
                "version": VERSION,
                "codec": "aes-256-gcm",
                "payload_len": slot_bytes,
                "hidden": bytes(hidden_bytes + STAMP_BYTES),
                "stamp": bytes(STAMP_BYTES),
            }
        )
        self.head_bytes = len(self._blank)

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """Keyed digests: from a chain hash, who guesses the tokens could tell that he is right."""
        key = self._name_key
        return [blake2b(chain_hash, key=key, digest_size=32).hexdigest().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The payload is encrypted into memory of its own, for others may be reading it."""
        hidden = self._cipher.seal(self._hidden(record), _named(b"head", record.chain_hash, epoch))
        into = memoryview(np.empty(self._slot_bytes, np.uint8))
        stamp = self._cipher.encrypt_into(payload, _named(b"payload", record.chain_hash, epoch, hidden), into)
        return self._head(hidden, stamp), into

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        """Decrypts `payload` where it lies."""
        hidden, stamp = head[self._at["hidden"]], head[self._at["stamp"]]
        fields = self._cipher.open(hidden, _named(b"head", chain_hash, epoch))
        if fields is None or self._head(hidden, stamp) != head:
            return Outcome.CHECKSUM
        tokens = fields[_HASH_BYTES + 4 : -_CHECKSUM_BYTES]
        num_tokens = int.from_bytes(fields[_HASH_BYTES : _HASH_BYTES + 4], "little")
        xxh3 = int.from_bytes(fields[-_CHECKSUM_BYTES:], "little")
        record = BlockRecord(chain_hash, fields[:_HASH_BYTES], tokens[: 4 * num_tokens], xxh3)
        if self._hidden(record) != fields:
            return Outcome.KEY_MISMATCH
        if not self._cipher.decrypt_into(payload, stamp, _named(b"payload", chain_hash, epoch, hidden), payload):
            return Outcome.CHECKSUM
        return record if checksum(payload) == record.checksum else Outcome.CHECKSUM

    def _hidden(self, record: BlockRecord) -> bytes:
        num_tokens = (len(record.tokens) // 4).to_bytes(4, "little")
        tokens = record.tokens.ljust(4 * self._block_size, b"\0")
        return record.parent + num_tokens + tokens + record.checksum.to_bytes(_CHECKSUM_BYTES, "little")

    def _head(self, hidden: bytes, stamp: bytes) -> bytes:
        head = bytearray(self._blank)
        head[self._at["hidden"]] = hidden
        head[self._at["stamp"]] = stamp
        return bytes(head)


def _named(part: bytes, chain_hash: ChainHash, epoch: int, hidden: bytes = b"") -> bytes:
    """What one part of a record is called, for its cipher."""
    return part.ljust(8, b"\0") + epoch.to_bytes(8, "little") + chain_hash + hidden


def _purpose(tier: str, use: str) -> bytes:
    return f"kvtier {tier} {use}".encode()

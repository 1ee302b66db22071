"""Records of blocks where nodes share them: in the clear, sealed by a secret, or encrypted (docs/format.md)."""

import hmac
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, Protocol

from pydantic import SecretStr

from kvtier.tiers import BlockCodec, BlockRecord, ChainHash, Outcome, checksum, load_key, require_compression
from kvtier.tiers.shared.compressed import CompressedForm
from kvtier.tiers.shared.encrypted import EncryptedForm
from kvtier.tiers.shared.heads import HeadSeal, derived, layout, packer, purpose
from kvtier.tiers.shared.saved import SavedBytes

VERSION: Final = 1
_HASH_BYTES: Final = 32
_NAME_BYTES: Final = 8  # of a namespace's name, in keys
_CHECKSUM_BYTES: Final = 8
_EPOCH_END: Final = 1 << 62  # beyond it a reset could not raise it any more


class RecordForm(Protocol):
    """How the blocks of one model are named and written. Immutable.

    A record is `head_bytes` longer than a slot, or shorter where `stored_bytes` tells how long one is.
    """

    name: str
    """Sixteen hexadecimal digits that stand for the model, and for secret or key, in every key."""
    head_bytes: int

    @property
    def saved(self) -> SavedBytes | None:
        """What compression saved; None of a form without."""

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


class FormOptions(Protocol):
    """What a tier's section says of how its records are written."""

    @property
    def secret(self) -> SecretStr | None: ...

    @property
    def key_file(self) -> Path | None: ...

    @property
    def compression(self) -> Literal["none", "zstd"]: ...


def form_of(tier: str, config: FormOptions, fingerprint: bytes, slot_bytes: int, block_size: int) -> RecordForm:
    """As [`tier`] secret, key_file and compression ask. ConfigError if the key file or a package cannot be used."""
    compresses = config.compression == "zstd"
    if compresses:
        require_compression(f"[{tier}] compression")
    if config.key_file is not None:
        key = load_key(config.key_file, f"[{tier}] key_file")
        codec = BlockCodec(slot_bytes) if compresses else None
        return EncryptedForm(fingerprint, slot_bytes, block_size, key, tier, codec)
    secret = config.secret.get_secret_value() if config.secret is not None else None
    form = CompressedForm if compresses else ClearForm
    return form(fingerprint, slot_bytes, block_size, secret, tier)


class ClearForm:
    """Tokens and payload as they are, with a `HeadSeal`. Each tier has its own key of a secret: a record of one is none
    in another.
    """

    stored_bytes = None
    saved = None

    def __init__(
        self, fingerprint: bytes, slot_bytes: int, block_size: int, secret: str | None = None, tier: str = "redis"
    ) -> None:
        self._seal = HeadSeal(secret, purpose(tier, "record"))
        self.name = fingerprint.hex()[: 2 * _NAME_BYTES]
        if secret is not None:
            self.name = derived(secret, purpose(tier, "namespace") + fingerprint).hex()[: 2 * _NAME_BYTES]
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
                "seal": bytes(self._seal.num_bytes),
            }
        )
        self.head_bytes = len(blank)
        codes = {"epoch": "Q", "chain_hash": "32s", "parent": "32s", "num_tokens": "I"}
        codes |= {"tokens": f"{4 * block_size}s", "xxh3": "Q"}
        self._fields, self._between = packer(blank[: -self._seal.num_bytes], at, codes)

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        return [chain_hash.hex().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The payload is sent from where it lies."""
        unsealed = self._unsealed(record, epoch)
        return unsealed + self._seal.of(unsealed, payload), payload

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        unsealed = head[: -self._seal.num_bytes]
        if not hmac.compare_digest(head[-self._seal.num_bytes :], self._seal.of(unsealed, payload)):
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

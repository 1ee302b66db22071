"""Records of blocks in tiers that nodes share: in the clear, sealed by a secret, or encrypted (docs/format.md)."""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b, sha256
from struct import Struct
from threading import Lock
from typing import Final

import msgpack
import numpy as np

from kvtier.tiers import (
    STAMP_BYTES,
    BlockCodec,
    BlockRecord,
    ChainHash,
    Outcome,
    RecordCipher,
    checksum,
    derive,
    load_key,
    require_compression,
)
from kvtier.tiers.config import ObjectsConfig, RedisConfig

_MAC: Final = "sha256"
_HASH_BYTES: Final = 32
_NAME_BYTES: Final = 8  # of a namespace's name, in keys
_CHECKSUM_BYTES: Final = 8
_MAC_BYTES: Final = 32
_PREFIX_BYTES: Final = 4  # u32: length of the header behind it


def layout(fields: Mapping[str, int | str | bytes]) -> tuple[bytes, dict[str, slice]]:
    """The head with zeros in fields that differ between blocks, and where in it each field lies."""
    header = msgpack.packb(fields)
    places, so_far = {}, {}
    for name, value in fields.items():
        so_far[name] = value
        end = _PREFIX_BYTES + len(msgpack.packb(so_far))  # up to 15 fields a map's own mark is one byte
        places[name] = slice(end - len(value) if isinstance(value, bytes) else end, end)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header, places


def packer(blank: bytes, at: Mapping[str, slice], codes: Mapping[str, str]) -> tuple[Struct, list[bytes]]:
    """A packer of the fields of `codes`, each at its place, and the constant bytes around and between them."""
    shape, between, end = "<", [], 0
    for name, code in codes.items():
        between.append(blank[end : at[name].start])
        shape += f"{at[name].start - end}s{code}"
        end = at[name].stop
    return Struct(f"{shape}{len(blank) - end}s"), [*between, blank[end:]]


class HeadSeal:
    """The end of a head in the clear: xxh3 of all before it, which detects accidents. A secret's seal also detects
    forgeries: HMAC-SHA256 over head and payload, by a key made from the secret for one `purpose`.
    """

    def __init__(self, secret: str | None, purpose: bytes) -> None:
        self.num_bytes = _CHECKSUM_BYTES if secret is None else _MAC_BYTES
        self._mac = None if secret is None else hmac.new(derived(secret, purpose), digestmod=_MAC)

    def of(self, unsealed: bytes, payload: memoryview) -> bytes:
        if self._mac is None:
            return checksum(memoryview(unsealed)).to_bytes(_CHECKSUM_BYTES, "little")
        mac = self._mac.copy()
        mac.update(unsealed)
        mac.update(payload)  # releases the GIL
        return mac.digest()


def derived(secret: str, purpose: bytes) -> bytes:
    """The key made from a secret for one purpose."""
    return hmac.digest(secret.encode("utf-8", "surrogatepass"), purpose, _MAC)


def purpose(tier: str, use: str) -> bytes:
    """One use of a tier's secret or key: each tier has its own."""
    return f"kvtier {tier} {use}".encode()


class SavedBytes:
    """Counts, in bytes of blocks, by way. Thread-safe."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = Lock()  # guards what follows
        self._sent = self._received = 0

    def sent(self, num_stored: int) -> None:
        """A block is about to be stored in so many bytes, whatever the outcome."""
        with self._lock:
            self._sent += self._slot_bytes - num_stored

    def received(self, num_stored: int) -> None:
        """A block was received whole in so many bytes."""
        with self._lock:
            self._received += self._slot_bytes - num_stored

    def counts(self) -> Mapping[str, int]:
        """Since the start: `saved_{sent, received}`."""
        with self._lock:
            return {"saved_sent": self._sent, "saved_received": self._received}


class RecordForm(ABC):
    """How the blocks of one model are named and written. Immutable.

    A record is `head_bytes` longer than a slot. With a `codec` the compressed payload stands behind the head, which
    has its length. Such records have other names: a process that does not compress never finds one, and so never
    deletes it as damaged.
    """

    reads_payload = True
    """Whether encoding reads the payload, which takes time."""
    name: str
    """Sixteen hexadecimal digits for the model, and for secret or key, in every key."""
    head_bytes: int
    _at: Mapping[str, slice]  # where in the head each field lies

    def __init__(self, slot_bytes: int, codec: BlockCodec | None) -> None:
        self._slot_bytes = slot_bytes
        self._codec = codec
        self.saved = None if codec is None else SavedBytes(slot_bytes)
        # The bytes behind a head, by that head; None if it is a slot's length, always.
        self.stored_bytes: Callable[[bytes], int] | None = None if codec is None else self._stored_bytes

    @abstractmethod
    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """The name of each block in its key: 64 hexadecimal digits."""

    @abstractmethod
    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The head, and the bytes stored behind it: the payload's own memory, or at most as many encoded bytes."""

    @abstractmethod
    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        """The record, if head and payload are whole and this very block's; `payload` then holds the block's bytes.

        `payload` is a slot that begins with the bytes behind the head, and is decrypted and decompressed there.

        KEY_MISMATCH if they are another block's, model's or version's; CHECKSUM if they are no record of ours,
        and `payload` may then hold anything. A head counts only if encoding its record again gives the same bytes, so
        every field is checked. `seen` is xxh3-64 of a payload in the clear, if that was computed already.
        """

    def _stored_bytes(self, head: bytes) -> int:
        """Any number, if it is no head of ours."""
        return int.from_bytes(head[self._at["stored_len"]], "little")


class ClearForm(RecordForm):
    """Tokens and payload in the clear, with a `HeadSeal`. Each tier derives its own key from a secret: a record of one
    is invalid in another.

    With a `codec` the head's checksum is that of the payload itself. A secret's HMAC covers the stored bytes: only
    sealed bytes are decompressed.
    """

    def __init__(
        self,
        fingerprint: bytes,
        slot_bytes: int,
        block_size: int,
        secret: str | None = None,
        tier: str = "redis",
        codec: BlockCodec | None = None,
    ) -> None:
        super().__init__(slot_bytes, codec)
        use, kind = ("", "raw") if codec is None else ("compressed ", "zstd")
        self.reads_payload = secret is not None or codec is not None
        self._seal = HeadSeal(secret, purpose(tier, f"{use}record"))
        namespace = purpose(tier, f"{use}namespace") + fingerprint
        if secret is not None:
            name = derived(secret, namespace)
        else:
            name = fingerprint if codec is None else sha256(namespace).digest()
        self.name = name.hex()[: 2 * _NAME_BYTES]
        how = {} if codec is None else {"split": bytes(1), "stored_len": bytes(4)}
        blank, self._at = layout(
            {
                "version": 1 if codec is None else 2,
                "codec": kind if secret is None else f"{kind}+hmac-sha256",
                "fingerprint": fingerprint,
                "epoch": bytes(8),
                "chain_hash": bytes(_HASH_BYTES),
                "parent": bytes(_HASH_BYTES),
                "num_tokens": bytes(4),
                "tokens": bytes(4 * block_size),
                "payload_len": slot_bytes,
                **how,
                "xxh3": bytes(_CHECKSUM_BYTES),
                "seal": bytes(self._seal.num_bytes),
            }
        )
        self.head_bytes = len(blank)
        codes = {"epoch": "Q", "chain_hash": "32s", "parent": "32s", "num_tokens": "I", "tokens": f"{4 * block_size}s"}
        codes |= {name: code for name, code in (("split", "B"), ("stored_len", "I")) if name in how} | {"xxh3": "Q"}
        self._fields, self._between = packer(blank[: -self._seal.num_bytes], self._at, codes)

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        return [chain_hash.hex().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """A shorter form has memory of its own; any other payload is sent from where it lies."""
        split = 0
        if self._codec is not None and self.saved is not None:
            split, payload = self._codec.shrink(payload)
            self.saved.sent(payload.nbytes)
        unsealed = self._unsealed(record, epoch, split, payload.nbytes)
        return unsealed + self._seal.of(unsealed, payload), payload

    def decode(
        self, head: bytes, payload: memoryview, chain_hash: ChainHash, epoch: int, seen: int | None = None
    ) -> BlockRecord | Outcome:
        unsealed, stored = head[: -self._seal.num_bytes], payload
        if self._codec is not None:
            if (num_stored := self._stored_bytes(head)) > self._slot_bytes:
                return Outcome.CHECKSUM
            stored = payload[:num_stored]
        if not hmac.compare_digest(head[-self._seal.num_bytes :], self._seal.of(unsealed, stored)):
            return Outcome.CHECKSUM
        fields = self._fields.unpack(unsealed)  # as `_unsealed` has them
        parent, num_tokens, tokens, split, xxh3 = fields[5], fields[7], fields[9], fields[11], fields[-2]
        record = BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], xxh3)
        if self._unsealed(record, epoch, split, stored.nbytes) != unsealed:
            return Outcome.KEY_MISMATCH
        if self._codec is not None and self.saved is not None:
            if not self._codec.restore(split, stored, payload) or checksum(payload) != xxh3:
                return Outcome.CHECKSUM
            self.saved.received(stored.nbytes)
            return record
        return record if (checksum(payload) if seen is None else seen) == xxh3 else Outcome.CHECKSUM

    def _unsealed(self, record: BlockRecord, epoch: int, split: int, num_stored: int) -> bytes:
        """The head without its seal."""
        c, count = self._between, len(record.tokens) // 4
        first = (c[0], epoch, c[1], record.chain_hash, c[2], record.parent, c[3], count, c[4], record.tokens, c[5])
        if self._codec is None:
            return self._fields.pack(*first, record.checksum, c[6])
        return self._fields.pack(*first, split, c[6], num_stored, c[7], record.checksum, c[8])


_STORED: Final = Struct("<BI")  # of a compressed payload: its split, and its length
_LENGTHS: Final = 16  # a compressed payload is padded to one of so many parts of a slot: lengths are not hidden


class EncryptedForm(RecordForm):
    """Tokens, payload and the blocks' names encrypted by a key of KEY_BYTES; see `RecordCipher`.

    Head and payload are sealed separately, for they lie apart: a payload is received into its slot and decrypted
    there. The head's hidden part is associated with the payload, so the two cannot be parted. With a `codec` the
    payload is compressed first, and padded; keys are others then, too.
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
        super().__init__(slot_bytes, codec)
        use = "" if codec is None else "compressed "
        self._cipher = RecordCipher(key, purpose(tier, f"{use}record") + fingerprint)
        self._name_key = derive(key, purpose(tier, f"{use}name") + fingerprint)
        self.name = blake2b(key=self._name_key, digest_size=_NAME_BYTES).hexdigest()
        self._fields = Struct(f"<{_HASH_BYTES}sI{4 * block_size}sQ")  # parent, number of tokens, tokens, checksum
        hidden_bytes = self._fields.size + (0 if codec is None else _STORED.size)
        self._blank, self._at = layout(
            {
                "version": 1 if codec is None else 2,
                "codec": "aes-256-gcm" if codec is None else "zstd+aes-256-gcm",
                "payload_len": slot_bytes,
                **({} if codec is None else {"stored_len": bytes(4)}),
                "hidden": bytes(hidden_bytes + STAMP_BYTES),
                "stamp": bytes(STAMP_BYTES),
            }
        )
        self.head_bytes = len(self._blank)

    def names(self, hashes: Iterable[ChainHash]) -> list[bytes]:
        """Keyed digests: an attacker who guesses the tokens could confirm it by a chain hash."""
        key = self._name_key
        return [blake2b(chain_hash, key=key, digest_size=32).hexdigest().encode() for chain_hash in hashes]

    def encode(self, record: BlockRecord, payload: memoryview, epoch: int) -> tuple[bytes, memoryview]:
        """The payload is encrypted into memory of its own, as others may be reading it."""
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
        hidden, stamp = head[self._at["hidden"]], head[self._at["stamp"]]
        num_stored = self._slot_bytes if self._codec is None else self._stored_bytes(head)
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
    """The name of one part of a record, for its cipher."""
    return part.ljust(8, b"\0") + epoch.to_bytes(8, "little") + chain_hash + hidden


_EPOCH_END: Final = 1 << 62  # beyond it a reset could not raise it any more


def format_epoch(epoch: int) -> bytes:
    """Sixteen hexadecimal digits, as in keys and in the epoch's own key."""
    return b"%016x" % epoch


def parse_epoch(value: object) -> int:
    """Inverse of `format_epoch`; 0, which is no epoch, for any other value."""
    if not isinstance(value, bytes) or len(value) != 16 or not set(value) <= set(b"0123456789abcdef"):
        return 0
    epoch = int(value, 16)
    return epoch if epoch < _EPOCH_END else 0


def form_of(
    tier: str, config: RedisConfig | ObjectsConfig, fingerprint: bytes, slot_bytes: int, block_size: int
) -> RecordForm:
    """The form that [`tier`] secret, key_file and compression configure. ConfigError if key or package is missing."""
    codec = None
    if config.compression == "zstd":
        require_compression(f"[{tier}] compression")
        codec = BlockCodec(slot_bytes)
    if config.key_file is not None:
        key = load_key(config.key_file, f"[{tier}] key_file")
        return EncryptedForm(fingerprint, slot_bytes, block_size, key, tier, codec)
    secret = config.secret.get_secret_value() if config.secret is not None else None
    return ClearForm(fingerprint, slot_bytes, block_size, secret, tier, codec)

"""Seals records with AES-256-GCM under a key from a file; decides nothing about where they lie.

Every record has a key of its own, derived by keyed BLAKE2b from the file's key, from what the record belongs to (its
context) and from its associated data, which names it. A random 96-bit nonce may be drawn 2^32 times for one key (NIST
SP 800-38D, 8.3): that bound then holds for the stores of one block, not for all of a store. `docs/format.md` has the
derivation. The library `cryptography` is the extra `encryption`; it holds the GIL while it works, so payloads go
through it in slices, between which other threads get their turn.
"""

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.tiers.errors import ConfigError
from kvtier.tiers.extras import install_command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADCipherContext

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
SALT_BYTES: Final = 16
STAMP_BYTES: Final = NONCE_BYTES + TAG_BYTES  # what sealing adds to a record

_LONGEST_FILE: Final = 4096  # bytes: more is no key
_SLICE: Final = 256 * 1024  # bytes between two looks at whether another thread wants the GIL, some 0.1 ms
_CONTEXT: Final = b"kvtier-context"
_RECORD: Final = b"kvtier-record"
_KEY_ID: Final = b"kvtier-key-id"

Buffer = bytes | bytearray | memoryview


def load_key(path: Path, field: str) -> bytes:
    """A key file's 32 bytes: as they are, as 64 hexadecimal digits or as base64 in one line.

    ConfigError, which names `field` (as "[file] key_file"), if there is none, others may read it, or no package
    ciphers.
    """
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        raise ConfigError(
            f'{field} "{path}": needs cryptography; {install_command("encryption")}, or leave {field} out'
        ) from None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f'{field} "{path}": not a regular file; name a file that holds the key')
        if status.st_mode & stat.S_IRWXO:
            raise ConfigError(f'{field} "{path}": others may open it; run: chmod o= {path}')
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE)
    except OSError as error:
        raise ConfigError(
            f'{field} "{path}": {error.strerror or error}; write a key there with: '
            f"(umask 077; openssl rand -hex 32 > {path})"
        ) from error
    if (key := _parse(content)) is None:
        raise ConfigError(
            f'{field} "{path}": holds no key of {KEY_BYTES} bytes, 64 hexadecimal digits or base64; write one with: '
            f"(umask 077; openssl rand -hex 32 > {path})"
        )
    return key


def _parse(content: bytes) -> bytes | None:
    is_short_hex = re.fullmatch(rb"[0-9a-fA-F]{32}", content)  # 16 bytes, not the 32 they look like
    if len(content) == KEY_BYTES and not is_short_hex:
        return content
    text = content.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return key if len(key) == KEY_BYTES else None


def key_id(key: bytes) -> bytes:
    """16 bytes that differ from key to key and reveal nothing of it."""
    return blake2b(key=key, person=_KEY_ID, digest_size=16).digest()


def derive(key: bytes, context: bytes) -> bytes:
    """The key of 32 bytes that `context` has under `key`: other contexts' keys reveal nothing of it."""
    return blake2b(context, key=key, person=_CONTEXT, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Encryption:
    """What a file says of how it is encrypted: which key opens it, and what makes its context its own."""

    key_id: bytes  # 16 bytes
    salt: bytes  # 16 bytes

    @classmethod
    def fresh(cls, key: bytes) -> "Encryption":
        """That of a new file under `key`."""
        return cls(key_id(key), os.urandom(SALT_BYTES))


class RecordCipher:
    """Seals and opens the records of one store. Thread-safe: nothing changes after `__init__`.

    `context` parts stores that share a key file: what was sealed in one context opens in no other. `associated` names
    the record and is verified with it: it must tell the records of a context apart.
    """

    def __init__(self, key: bytes, context: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import ciphers
        from cryptography.hazmat.primitives.ciphers import aead, algorithms, modes

        self._key = derive(key, context)
        self._InvalidTag = InvalidTag
        self._Cipher = ciphers.Cipher
        self._AES = algorithms.AES
        self._GCM = modes.GCM
        self._AESGCM = aead.AESGCM

    def seal(self, plaintext: Buffer, associated: bytes) -> bytes:
        """Nonce, ciphertext and tag: STAMP_BYTES more than the plaintext. For small records: the GIL is held."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._AESGCM(self._record_key(associated)).encrypt(nonce, plaintext, associated)

    def open(self, sealed: Buffer, associated: bytes) -> bytes | None:
        """The plaintext of what `seal` made; None if it is not authentic."""
        if len(sealed) < STAMP_BYTES:
            return None
        try:
            return self._AESGCM(self._record_key(associated)).decrypt(
                sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], associated
            )
        except self._InvalidTag:
            return None

    def encrypt_into(self, plaintext: Buffer, associated: bytes, into: memoryview) -> bytes:
        """Encrypt into memory of the same length (the plaintext's own, too); returns the stamp: nonce and tag."""
        nonce = os.urandom(NONCE_BYTES)
        context = self._Cipher(self._AES(self._record_key(associated)), self._GCM(nonce)).encryptor()
        _pass_through(context, plaintext, associated, into)
        context.finalize()
        return nonce + context.tag

    def decrypt_into(self, ciphertext: Buffer, stamp: bytes, associated: bytes, into: memoryview) -> bool:
        """Undo `encrypt_into`, maybe in place. False: not authentic, and `into` is rubbish that must not be served."""
        nonce, tag = stamp[:NONCE_BYTES], stamp[NONCE_BYTES:]
        context = self._Cipher(self._AES(self._record_key(associated)), self._GCM(nonce, tag)).decryptor()
        _pass_through(context, ciphertext, associated, into)
        try:
            context.finalize()
        except self._InvalidTag:
            return False
        return True

    def _record_key(self, associated: bytes) -> bytes:
        return blake2b(associated, key=self._key, person=_RECORD, digest_size=KEY_BYTES).digest()


def _pass_through(context: "AEADCipherContext", source: Buffer, associated: bytes, into: memoryview) -> None:
    """Encrypt or decrypt slice by slice."""
    context.authenticate_additional_data(associated)
    source = memoryview(source)
    for start in range(0, len(source), _SLICE):
        context.update_into(source[start : start + _SLICE], into[start : start + _SLICE])


class NameCipher:
    """Hides names: 16 bytes become 16 others, always the same ones under a key and context. Thread-safe.

    AES-256 by itself (ECB): fit for digests, no two of which have a half in common, and for nothing else. It tells
    which names are equal, and detects no change: what a name names is sealed with it.
    """

    def __init__(self, key: bytes, context: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._cipher = Cipher(algorithms.AES(derive(key, context)), modes.ECB())

    def hide(self, names: bytes) -> bytes:
        """Names in a row, a multiple of 16 bytes, unreadable without the key."""
        return self._cipher.encryptor().update(names)

    def show(self, hidden: bytes) -> bytes:
        return self._cipher.decryptor().update(hidden)

"""The cipher: what was sealed opens under the same key, context and name alone, and a key file is read or refused."""

import base64
import hashlib
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from at_once import at_once
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier.tiers import cipher
from kvtier.tiers.cipher import NONCE_BYTES, STAMP_BYTES, TAG_BYTES, RecordCipher, load_key
from kvtier.tiers.errors import ConfigError

KEY = bytes(range(32))
NAME = b"\x07" * 32
LENGTHS = (0, 1, 15, 16, 10_000, 256 * 1024, 256 * 1024 + 1, 600_000)


def payload(length: int) -> bytes:
    return (hashlib.sha256(str(length).encode()).digest() * (length // 32 + 1))[:length]


def key_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def _apart(sealed: bytes | bytearray) -> tuple[bytes, bytes]:
    """A sealed record's ciphertext, and its stamp: nonce and tag."""
    return bytes(sealed[NONCE_BYTES:-TAG_BYTES]), bytes(sealed[:NONCE_BYTES] + sealed[-TAG_BYTES:])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sealed_record_opens_to_what_it_was(length: int) -> None:
    records, plain = RecordCipher(KEY, b"slab"), payload(length)
    sealed = records.seal(plain, NAME)
    assert len(sealed) == length + STAMP_BYTES
    assert records.open(sealed, NAME) == plain
    # Into memory of the caller's, nonce and tag kept elsewhere: the same form, so that one side may use either.
    into = bytearray(length)
    stamp = records.encrypt_into(plain, NAME, memoryview(into))
    assert records.open(stamp[:NONCE_BYTES] + into + stamp[NONCE_BYTES:], NAME) == plain
    back = bytearray(length)
    assert records.decrypt_into(*_apart(sealed), NAME, memoryview(back))
    assert back == plain
    # And over the plaintext itself.
    place = bytearray(plain)
    stamp = records.encrypt_into(memoryview(place), NAME, memoryview(place))
    assert len(stamp) == STAMP_BYTES
    assert place != plain or length < 16
    assert records.decrypt_into(memoryview(place), stamp, NAME, memoryview(place))
    assert place == plain


def test_the_form_is_the_documented_one() -> None:
    # docs/format.md, "A sealed record", by another hand: two derivations, then plain AES-256-GCM.
    context_key = hashlib.blake2b(b"slab", key=KEY, person=b"kvtier-context", digest_size=32).digest()
    record_key = hashlib.blake2b(NAME, key=context_key, person=b"kvtier-record", digest_size=32).digest()
    assert record_key.hex() == "b339abfd7760dab44696c4491ab86f062d9a4dbbe1c58744cde05c5d33ffcce5"
    sealed = RecordCipher(KEY, b"slab").seal(b"what users said", NAME)
    nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
    assert AESGCM(record_key).decrypt(nonce, rest, NAME) == b"what users said"
    assert cipher.key_id(KEY).hex() == "b1374fb2158d42bdfef93a42759662fc"


def test_what_differs_in_one_bit_does_not_open() -> None:
    records = RecordCipher(KEY, b"slab")
    sealed = records.seal(b"what users said", NAME)
    for position in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[position // 8] ^= 1 << position % 8
        assert records.open(flipped, NAME) is None
        assert not records.decrypt_into(*_apart(flipped), NAME, memoryview(bytearray(15)))
    # Neither does a piece of it, nor a longer one, nor under another name, context or key.
    for length in range(len(sealed)):
        assert records.open(sealed[:length], NAME) is None
    ciphertext, stamp = _apart(sealed)
    for length in range(len(ciphertext)):
        assert not records.decrypt_into(ciphertext[:length], stamp, NAME, memoryview(bytearray(15)))
    assert records.open(sealed + b"\0", NAME) is None
    assert records.open(sealed, b"\x08" * 32) is None
    assert RecordCipher(KEY, b"redis").open(sealed, NAME) is None
    assert RecordCipher(bytes(32), b"slab").open(sealed, NAME) is None


def test_no_two_sealings_are_alike() -> None:
    # The same block stored again gets a nonce of its own: equal blocks cannot be told from others.
    records = RecordCipher(KEY, b"slab")
    sealed = [records.seal(bytes(64), NAME) for _ in range(1000)]
    assert len({record[:NONCE_BYTES] for record in sealed}) == 1000
    assert len({record[NONCE_BYTES:] for record in sealed}) == 1000


def test_threads_share_a_cipher() -> None:
    records, wrong = RecordCipher(KEY, b"slab"), []

    def work(number: int) -> None:
        name, plain = bytes([number]) * 32, payload(300_000 + number)
        for _ in range(20):
            place = bytearray(plain)
            stamp = records.encrypt_into(memoryview(place), name, memoryview(place))
            if not records.decrypt_into(memoryview(place), stamp, name, memoryview(place)) or place != plain:
                wrong.append(number)

    at_once(*(partial(work, number) for number in range(4)))
    assert not wrong


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY) + b"\r\n"],
    ids=["raw", "hex", "HEX", "base64"],
)
def test_a_key_file_is_read(tmp_path: Path, content: bytes) -> None:
    path = key_file(tmp_path / "key", content)
    assert load_key(path, "[file] key_file") == KEY
    path.chmod(0o440)  # a container's secret is its group's to read
    assert load_key(path, "[file] key_file") == KEY


def test_a_raw_key_may_hold_any_byte(tmp_path: Path) -> None:
    key = b" " + os.urandom(30) + b"\n"
    assert load_key(key_file(tmp_path / "key", key), "[file] key_file") == key


@pytest.mark.parametrize(
    "content",
    [b"", KEY[:31], KEY + b"\0", KEY.hex().encode()[:-1], KEY.hex()[:32].encode(), b"x" * 100_000, b"\xff" * 44],
    ids=["empty", "short", "long", "short hex", "half of the hex", "a file", "no text"],
)
def test_a_file_without_a_key_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = key_file(tmp_path / "key", content)
    with pytest.raises(ConfigError, match=r"\[file\] key_file .*/key\": holds no key of 32 bytes.*openssl") as raised:
        load_key(path, "[file] key_file")
    assert "\n" not in str(raised.value)


def test_a_key_that_cannot_or_should_not_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[redis\] key_file .*No such file.*umask 077"):
        load_key(tmp_path / "none", "[redis] key_file")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_key(tmp_path, "[file] key_file")
    with pytest.raises(ConfigError, match="others may open it; run: chmod o= "):
        load_key(key_file(tmp_path / "key", KEY, 0o644), "[file] key_file")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path / "key", KEY)
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"needs cryptography; pip install 'cryptography>=43'"):
        load_key(path, "[file] key_file")

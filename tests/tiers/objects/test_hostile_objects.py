"""A store that lies, and settings that fit no request: a miss or one line, never an exception, never a promise."""

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, record_of
from extent import brief
from object_rig import BUCKET, FINGERPRINT, options, read, write
from redis_rig import Certificate
from scripted_s3 import S3Script, ScriptedS3, refusal, reply, scripted_s3

from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, TierUnavailable
from kvtier.tiers.objects.bucket import BROKE_OFF, Bucket, ObjectRange
from kvtier.tiers.objects.opening import answers, checked
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.shared.life import StorageFailed
from kvtier.tiers.tier import Outcome

pytest.importorskip("obstore")

CHAIN = chain_of(4)
QUICK = {"deadline": "1s", "connect_timeout": "1s"}


def store_at(server: ScriptedS3) -> ObjectStore:
    """A tier over this server; there is no epoch yet."""
    return ObjectStore.open(
        options(server.endpoint, **QUICK), FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE
    )


def without_epoch(answer: S3Script) -> S3Script:
    """Says at the start that nobody ever reset, then follows the script."""

    def said(connection: socket.socket, verb: str, path: str) -> None:
        if "/epochs/" in path:
            reply(connection, "404 Not Found", refusal("NoSuchKey"))
        else:
            answer(connection, verb, path)

    return said


def test_a_refusal_to_overwrite_is_not_taken_for_a_stored_block() -> None:
    def conflict(connection: socket.socket, verb: str, path: str) -> None:
        if verb == "PUT":
            reply(connection, "409 Conflict", refusal("ConditionalRequestConflict"))
        else:
            reply(connection, "404 Not Found", refusal("NoSuchKey"))

    with scripted_s3(without_epoch(conflict)) as server:
        store = store_at(server)
        assert write(store, CHAIN) == [Outcome.IO_ERROR, *[Outcome.PARENT_FAILED] * 3]
        assert store.lookup(CHAIN.hashes) == 0
        store.close()


@pytest.mark.parametrize(
    "status", ["409 Conflict", "304 Not Modified", "412 Precondition Failed", "418 Teapot", "404 Not Found"]
)
def test_an_answer_that_makes_no_sense_is_a_failure_and_never_a_success(status: str) -> None:
    with scripted_s3(without_epoch(lambda connection, *_: reply(connection, status))) as server:
        store = store_at(server)
        edges = store.space.edges([store.space.record_bytes] * 4)
        store._index.learn(store.space.names(CHAIN.hashes)[0], CHAIN.hashes, edges)
        assert read(store, CHAIN) == [Outcome.IO_ERROR] * 4
        assert store.locate(chain_of(4, first_token=500).hashes) is Outcome.IO_ERROR
        store.close()


def test_a_web_server_that_knows_nothing_of_s3_is_named() -> None:
    with scripted_s3(lambda connection, *_: reply(connection, "404 Not Found", b"<html>not found</html>")) as server:
        (found,) = answers(Config(objects=options(server.endpoint, **QUICK)))
        assert (found.status.value, found.fix) == ("error", "set endpoint to the address of one")
        assert found.found == f"[objects] {server.endpoint}: no S3 (404 without an S3 error code)"
        with pytest.raises(TierUnavailable, match="no S3"):
            store_at(server)


def goes_on(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def drips(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"H")
        time.sleep(0.1)


def says_nothing(connection: socket.socket) -> None:
    time.sleep(3.0)


@pytest.mark.parametrize("how", [says_nothing, drips, *brief([], [goes_on])])
def test_a_store_that_never_comes_to_an_end_is_a_miss_in_time(how: Callable[[socket.socket], None]) -> None:
    with scripted_s3(without_epoch(lambda connection, *_: how(connection))) as server:
        store = store_at(server)
        began = time.monotonic()
        assert store.locate(CHAIN.hashes) is Outcome.TIMEOUT
        assert set(write(store, CHAIN)) == {Outcome.TIMEOUT, Outcome.PARENT_FAILED}
        assert time.monotonic() - began < 20.0
        store.close()


def test_more_bytes_than_were_asked_for_are_cut_off() -> None:
    def longer(connection: socket.socket, verb: str, path: str) -> None:
        reply(connection, "206 Partial Content", b"x" * 5000, content_range="bytes 0-99/5000")

    with scripted_s3(longer) as server:
        bucket = Bucket.connect(options(server.endpoint, **QUICK), 0)
        assert bytes(bucket.get(ObjectRange("a", 0, 100), time.monotonic() + 20)) == b"x" * 100
        bucket.close()


def test_blocks_that_came_whole_before_a_store_hung_up_are_served() -> None:
    large = 512 << 10  # bytes of a block: several pieces of an answer
    payloads = [memoryview(bytearray(payload_of(name, large))) for name in CHAIN.hashes]
    records = [replace(record_of(CHAIN, i), checksum=checksum(payload)) for i, payload in enumerate(payloads)]
    sent = bytearray()

    def breaks_off(connection: socket.socket, verb: str, path: str) -> None:
        told = f"Content-Range: bytes {edges[0]}-{edges[-1] - 1}/{edges[-1]}\r\nContent-Length: {edges[-1] - edges[0]}"
        dated = "ETag: x\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT"
        connection.sendall(f"HTTP/1.1 206 Partial Content\r\n{dated}\r\n{told}\r\n\r\n".encode() + sent)
        raise ConnectionResetError

    with scripted_s3(without_epoch(breaks_off)) as server:
        store = ObjectStore.open(
            options(server.endpoint, **QUICK), FINGERPRINT, slot_bytes=large, block_size=BLOCK_SIZE
        )
        edges = store.space.edges([store.space.record_bytes] * 4)
        store._index.learn(store.space.names(CHAIN.hashes)[0], CHAIN.hashes, edges)
        for record, payload in zip(records, payloads, strict=True):
            sent += b"".join(store.space.form.encode(record, payload, store._epoch.value or 0))
        del sent[int(2.9 * store.space.record_bytes) :]
        slots = [memoryview(bytearray(large)) for _ in records]
        results = store.read(CHAIN.hashes, slots)
        assert results[:2] == records[:2]
        assert slots[:2] == payloads[:2]
        assert set(results[2:]) <= {Outcome.IO_ERROR, Outcome.TIMEOUT}
        store.check()
        store.close()


@pytest.mark.parametrize(
    ("endpoint", "virtual_hosted", "asked"),
    [
        ("http://s3.example:9000", False, f"http://s3.example:9000/{BUCKET}/a"),
        ("http://s3.example:9000", True, f"http://{BUCKET}.s3.example:9000/a"),
        (f"http://{BUCKET}.s3.example", True, f"http://{BUCKET}.s3.example/a"),
    ],
)
def test_the_bucket_is_named_in_the_path_or_in_the_host(
    endpoint: str, virtual_hosted: bool, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy is told whole addresses.
    with scripted_s3(lambda connection, *_: reply(connection, "404 Not Found", refusal("NoSuchKey"))) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        bucket = Bucket.connect(options(endpoint, virtual_hosted=virtual_hosted, **QUICK), 0)
        with pytest.raises(StorageFailed):
            bucket.get(ObjectRange("a", 0, 1), time.monotonic() + 20)
        bucket.close()
        assert proxy.asked == [("GET", asked)]


def test_what_a_store_says_cannot_steer_a_terminal() -> None:
    body = refusal("Odd", "\x1b[2J\r\nall is well")
    with scripted_s3(lambda connection, *_: reply(connection, "400 Bad Request", body)) as server:
        bucket = Bucket.connect(options(server.endpoint, **QUICK), 0)
        with pytest.raises(StorageFailed) as told:
            bucket.put("a", [b"x"])
        assert str(told.value).isprintable()
        bucket.close()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (refusal("QuotaExceeded"), "it answers QuotaExceeded; see what that means there"),
        (refusal("ExpiredToken"), "its credentials have expired; renew them"),
        (refusal("RequestTimeTooSkewed"), "clock and this machine"),
        (b"<html>proxy</html>", "see whether it runs"),  # not the store's own: said on the way
    ],
)
def test_what_passes_is_no_reason_to_stay_away(body: bytes, told: str) -> None:
    with (
        scripted_s3(lambda connection, *_: reply(connection, "403 Forbidden", body)) as server,
        pytest.raises(TierUnavailable, match=told),
    ):
        store_at(server)


def test_a_bucket_that_takes_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def read_only(connection: socket.socket, verb: str, path: str) -> None:
        if verb == "PUT":
            reply(connection, "403 Forbidden", refusal("AccessDenied"))
        else:
            reply(connection, "404 Not Found", refusal("NoSuchKey"))

    with scripted_s3(read_only) as server, caplog.at_level(logging.WARNING):
        store = store_at(server)
        for _ in range(3):
            assert write(store, CHAIN)[0] is Outcome.IO_ERROR
        store.close()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        f'blocks are not stored: [objects] bucket "{BUCKET}": {server.endpoint} denies access; grant'
    )


def test_a_purge_that_the_bucket_did_not_hear_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def stays(connection: socket.socket, verb: str, path: str) -> None:
        if verb in ("POST", "DELETE"):
            reply(connection, "403 Forbidden", refusal("AccessDenied"))
        else:
            reply(connection, "200 OK")

    with scripted_s3(without_epoch(stays)) as server, caplog.at_level(logging.WARNING):
        store = store_at(server)
        assert write(store, CHAIN) == [Outcome.OK] * 4
        store.discard(CHAIN.hashes)
        assert store.stats()["delete_io_error"] == 1
        store.close()
    assert "[objects] 1 may be there still" in caplog.text


def test_credentials_that_no_request_can_carry_turn_the_tier_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # A secret of Kubernetes that ends with a line's end. The client panics, which is no Exception.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the secret of a role")
    config = options("http://127.0.0.1:1", **QUICK, access_key_id=None, secret_access_key=None)
    with pytest.raises(TierUnavailable, match="see whether AWS's variables") as told:
        ObjectStore.open(config, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE)
    assert "the secret of a role" not in str(told.value)
    assert "\n" not in str(told.value)
    bucket = Bucket.connect(config, 0)
    asked: list[Callable[[], None]] = [lambda: bucket.put("a", [b"x"]), lambda: bucket.delete(["a"])]
    for ask in asked:
        with pytest.raises(StorageFailed) as failed:
            ask()
        assert (failed.value.code, failed.value.outcome) == (BROKE_OFF, Outcome.IO_ERROR)
    assert bucket.counts() == {"requests_put": 1, "requests_delete": 1}
    bucket.close()


@pytest.mark.parametrize("content", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_without_certificates_is_named(content: bytes, tmp_path: Path) -> None:
    (place := tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=rf'^\[objects\] ca "{place}": no certificates; name a PEM file'):
        checked(Config(objects=options("https://127.0.0.1:1", ca=str(place))))


def test_a_certificate_that_nobody_vouches_for_is_told(tmp_path: Path) -> None:
    made = Certificate.make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with scripted_s3(lambda *_: None, context) as server, pytest.raises(TierUnavailable) as told:
        store_at(server)
    assert "its certificate is not accepted (" in str(told.value)
    assert str(told.value).endswith("; name the file of who signed it as ca")


def test_own_keys_go_alone_whatever_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    with scripted_s3(
        without_epoch(lambda connection, *_: reply(connection, "404 Not Found", refusal("NoSuchKey")))
    ) as server:
        store_at(server).close()
        assert server.tokens == []
        keys = {"access_key_id": "a node", "secret_access_key": "a secret", "session_token": "of-these-keys"}
        config = Config.load(objects={"bucket": BUCKET, "endpoint": server.endpoint, **QUICK, **keys})
        store = ObjectStore.open(config.objects, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE)
        store.close()
        assert set(server.tokens) == {b"of-these-keys"}
    for wrong in ({"session_token": "x"}, {**keys, "session_token": "x y\n"}):
        with pytest.raises(ConfigError, match=r"session_token \(not shown\): "):
            Config.load(objects={"bucket": BUCKET, **wrong})


def test_a_bucket_in_another_region_is_named_so() -> None:
    moved = "301 Moved Permanently"
    with scripted_s3(lambda connection, *_: reply(connection, moved)) as server, pytest.raises(ConfigError) as told:
        store_at(server)
    assert str(told.value) == '[objects] region "us-east-1": the bucket is in another; set its own'


def test_why_nobody_answers_is_told() -> None:
    for endpoint, why in (("http://127.0.0.1:1", "Connection refused"), ("http://none.invalid", "lookup")):
        bucket = Bucket.connect(options(endpoint, **QUICK), 0)
        with pytest.raises(StorageFailed, match=why):
            bucket.put("a", [b"x"])
        bucket.close()


@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
def test_certificates_are_not_read_from_what_has_no_end(what: str, tmp_path: Path) -> None:
    place = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "directory": tmp_path}[what]
    if what == "pipe":
        os.mkfifo(place)
    with pytest.raises(ConfigError, match=rf'\[objects\] ca "{place}": not a regular file; name a PEM file'):
        checked(Config(objects=options("https://127.0.0.1:1", ca=str(place))))


@pytest.mark.parametrize(
    "endpoint", ["http://s3", "https://s3.example:9000", "http://10.0.0.1", "http://[::1]:80", "http://s3.v2"]
)
def test_addresses_that_are_some_are_taken(endpoint: str) -> None:
    assert Config.load(objects={"bucket": "mine", "endpoint": endpoint}).objects.endpoint == endpoint

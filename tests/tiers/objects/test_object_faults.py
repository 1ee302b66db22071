"""Faults of an object store: away, mute, cut short, foreign, flipped, refused. Each costs hits, and is told."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import SLOT_BYTES, chain_of, store, wait_until
from fault_rig import Settled, drops, fetch, forget_l2, misses, rest
from object_rig import (
    BUCKET,
    FINGERPRINT,
    ObjectServer,
    object_of,
    object_server,
    open_store,
    opened,
    options,
    over_objects,
    read,
    requests,
    written,
)
from peers_rig import Sizes
from redis_stories import until

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, TierUnavailable
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.objects.layout import TABLE_BYTES
from kvtier.tiers.objects.opening import checked, configured, examine
from kvtier.tiers.tier import Outcome

CHAIN = chain_of(8)
FAILED = {Outcome.IO_ERROR, Outcome.TIMEOUT}
Open = Callable[..., Hierarchy]


@pytest.fixture
def over(settled: Settled) -> Open:
    """`over(endpoint, …)`: a hierarchy over the bucket there."""
    return lambda *arguments, **more: settled(over_objects(*arguments, **more))


def is_open(hierarchy: Hierarchy, direction: str) -> bool:
    return hierarchy.stats()[f'kvtier_breaker_open{{tier="objects",direction="{direction}"}}'] == 1


# Every node is gone.


def test_requests_and_bytes_are_counted_for_prometheus(over: Open, server: ObjectServer) -> None:
    hierarchy = over(server.endpoint)
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    stats = hierarchy.stats()
    assert stats['kvtier_storage_requests_total{tier="objects",kind="put"}'] == 1
    assert stats['kvtier_storage_requests_total{tier="objects",kind="get"}'] >= 2  # the epoch, and the blocks
    for way in ("sent", "received"):
        assert stats[f'kvtier_storage_traffic_bytes_total{{tier="objects",way="{way}"}}'] > 8 * SLOT_BYTES


# Away, and mute.


def test_a_server_away_at_start_costs_one_warning_and_attaches_when_it_comes(
    over: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with object_server(tmp_path, starts=False) as server:
        hierarchy = over(server.endpoint)
        assert store(hierarchy, CHAIN) == 8  # the engine runs on with L2 …
        rest(hierarchy)
        assert fetch(hierarchy, CHAIN) == 8
        assert drops(hierarchy, "objects", Outcome.BREAKER_OPEN) == 8
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        server.start()  # … and with the bucket as soon as it is there
        until(hierarchy, lambda: not is_open(hierarchy, "read") and not is_open(hierarchy, "write"))
        fresh = chain_of(4, 50_000)
        store(hierarchy, fresh)
        assert hierarchy.drain(60)
        forget_l2(hierarchy)
        assert fetch(hierarchy, fresh) == 4
        # It dies, and all it had with it: misses, and no harm.
        server.kill()
        while not is_open(hierarchy, "read"):
            forget_l2(hierarchy)
            assert fetch(hierarchy, fresh) < 4
        assert sum(misses(hierarchy, outcome) for outcome in FAILED) > 0
        server.start()
        until(hierarchy, lambda: not is_open(hierarchy, "read"))
        assert fetch(hierarchy, fresh) == 0


def test_a_server_that_hangs_is_a_miss_at_the_deadline_and_is_used_again(server: ObjectServer) -> None:
    with opened(server.endpoint) as writer:
        written(writer, CHAIN)
    with opened(server.endpoint, deadline="300ms", connect_timeout="300ms") as store:
        wait_until(lambda: store.locate(CHAIN.hashes) == 8)
        other = chain_of(4, 9_000)
        with server.frozen():
            assert set(read(store, CHAIN)) == {Outcome.TIMEOUT}
            assert store.locate(other.hashes) is Outcome.TIMEOUT
            assert not store.probe("read")
            assert not store.probe("write")
        wait_until(lambda: set(read(store, CHAIN)) == {Outcome.OK})
        wait_until(lambda: store.probe("write"))


def test_a_server_that_hangs_at_start_is_as_one_that_is_away(server: ObjectServer) -> None:
    with server.frozen(), pytest.raises(TierUnavailable, match="see whether it runs, and is reached from here"):
        open_store(server.endpoint, deadline="300ms", connect_timeout="300ms")


# Objects that are not as they should be.


def test_an_expired_object_is_a_miss_and_the_next_store_is_found(server: ObjectServer) -> None:
    with opened(server.endpoint) as store:
        written(store, CHAIN)
        server.empty()  # as the lifecycle rule does
        assert set(read(store, CHAIN)) == {Outcome.EVICTED}
        assert store.lookup(CHAIN.hashes) == 0
        assert store.locate(CHAIN.hashes) == 0
        written(store, CHAIN)
        assert set(read(store, CHAIN)) == {Outcome.OK}
        # Stored anew by another process, in other pieces: what this one believes is wrong, and nothing is damaged.
        server.empty()
        with opened(server.endpoint) as other:
            written(other, CHAIN, 0, 3)
        assert set(read(store, CHAIN)) <= {Outcome.EVICTED, Outcome.OK}
        assert len(server.keys()) == 1
        assert store.locate(CHAIN.hashes) == 3


def test_a_foreign_object_in_a_blocks_place_is_a_miss_and_makes_room(server: ObjectServer) -> None:
    with opened(server.endpoint) as store:
        key = object_of(store, CHAIN.hashes[0])
        for foreign in (b"hello", bytes(TABLE_BYTES + 8 * store.space.record_bytes), b"\xff" * 20_000):
            server.put(key, foreign)
            assert store.locate(CHAIN.hashes) is Outcome.CHECKSUM
            assert store.lookup(CHAIN.hashes) == 0
            written(store, CHAIN)
            assert set(read(store, CHAIN)) == {Outcome.OK}
            store.discard(CHAIN.hashes)
        # An object of ours in another one's place.
        other = chain_of(8, 7_000)
        written(store, other)
        server.put(key, server.content(object_of(store, other.hashes[0])))
        assert store.locate(CHAIN.hashes) is Outcome.CHECKSUM
        assert set(read(store, other)) == {Outcome.OK}


def test_a_hostile_epoch_costs_hits_at_most(server: ObjectServer) -> None:
    for content in (b"", b"hello", b"f" * 16, b"0" * 16, b"1" * 4000):
        with opened(server.endpoint) as store:
            server.put(store.space.epoch_key, content)
            store._epoch._fresh_until = 1e-9
            written(store, CHAIN)
            assert set(read(store, CHAIN)) == {Outcome.OK}
        with opened(server.endpoint) as store:
            assert store.locate(CHAIN.hashes) == 8
        server.empty()


# What the user has to fix.


def test_what_is_to_be_fixed_is_one_line_without_secrets(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(ConfigError) as told:
            open_store(server.endpoint, **more)
        assert "\n" not in str(told.value)
        assert "a secret of the node" not in str(told.value)
        return str(told.value)

    assert refused(bucket="nobodys-bucket") == (
        f'[objects] bucket "nobodys-bucket": {server.endpoint} has none of that name; create it, or fix it'
    )
    # No credentials anywhere: this machine has no role, and an address where nobody answers stands for that.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    quick = {"deadline": "300ms", "connect_timeout": "300ms"}
    line = refused(access_key_id=None, secret_access_key=None, **quick)
    assert line.startswith("[objects] access_key_id: none is given")
    assert line.endswith("set it and secret_access_key")


def test_a_login_or_a_right_that_is_refused_is_one_line(tmp_path: Path) -> None:
    with object_server(tmp_path) as server:
        boto3 = pytest.importorskip("boto3")
        login = {"aws_access_key_id": "rig", "aws_secret_access_key": "rig", "region_name": "us-east-1"}
        iam = boto3.client("iam", endpoint_url=server.endpoint, **login)
        iam.create_user(UserName="node")
        key = iam.create_access_key(UserName="node")["AccessKey"]
        mine: dict[str, Any] = {"access_key_id": key["AccessKeyId"], "secret_access_key": key["SecretAccessKey"]}
        server.ask("POST", "/moto-api/reset-auth", b"0")  # from now on it looks who asks
        for wrong, told in (
            (mine | {"access_key_id": "nobody"}, "[objects] access_key_id: "),
            (mine | {"secret_access_key": "another"}, "[objects] secret_access_key (not shown): "),
            (mine, f'[objects] bucket "{BUCKET}": {server.endpoint} denies access; grant s3:GetObject'),
        ):
            with pytest.raises(ConfigError) as refused:
                open_store(server.endpoint, **wrong)
            assert str(refused.value).startswith(told)
            assert key["SecretAccessKey"] not in str(refused.value)
            (finding,) = examine(Config(objects=options(server.endpoint, **wrong)))
            assert (finding.check, finding.status.value) == ("objects", "error")
            assert finding.found.startswith(told.partition(";")[0])
            assert finding.fix


def test_settings_are_checked_before_anybody_waits(tmp_path: Path) -> None:
    # Off: nothing is said, opened or imported.
    assert checked(Config()) is None
    assert configured(Config(), FINGERPRINT, Sizes()) is None
    seen = "import sys, kvtier.tiers.objects.opening; print(sorted({'obstore', 'boto3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
    # On: one line says what it is going to use, and asks nobody.
    nowhere = "http://127.0.0.1:1"
    assert checked(Config(objects=options(nowhere))) == f"[objects] bucket {BUCKET} at {nowhere}"
    key_file = tmp_path / "no key"
    with pytest.raises(ConfigError, match=r"\[objects\] key_file"):
        checked(Config(objects=options(nowhere, key_file=str(key_file))))
    empty = tmp_path / "ca.pem"
    empty.touch()
    for file, why in ((empty, "no certificates"), (tmp_path / "none.pem", "No such file")):
        with pytest.raises(ConfigError, match=rf'\[objects\] ca "{file}": {why}.*name a PEM file'):
            checked(Config(objects=options("https://127.0.0.1:1", ca=str(file))))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bucket": "s3://mine"}, 'bucket "s3://mine": not 3 to 63 small letters'),
        ({"endpoint": "s3.example"}, 'endpoint "s3.example": not an address of HTTP'),
        ({"prefix": "/a"}, 'prefix "/a": not 1 to 64 letters'),
        ({"access_key_id": "me"}, 'access_key_id "me": secret_access_key is missing'),
        ({"secret": "short"}, "secret (not shown): shorter than 16"),
        ({"connections": 0}, "connections 0: too small"),
        (
            {"endpoint": "http://a", "ca": "/x"},
            'ca "/x": endpoint is not https://, so nothing would be verified; write https://',
        ),
        ({"access_key_id": "", "secret_access_key": "y"}, 'access_key_id "": not 1 to 256 printable'),
        ({"access_key_id": "x\ny", "secret_access_key": "y"}, 'access_key_id "x\\ny": not 1 to 256 printable'),
        ({"access_key_id": "x", "secret_access_key": ""}, "secret_access_key (not shown): empty, or with white"),
        ({"access_key_id": "x", "secret_access_key": "y\n"}, "secret_access_key (not shown): empty, or with white"),
        ({"region": "eu-west-1\n"}, 'region "eu-west-1\\n": not 1 to 64 letters'),
        ({"prefix": ".."}, 'prefix "..": not 1 to 64 letters'),
        ({"prefix": "a/../b"}, 'prefix "a/../b": not 1 to 64 letters'),
        ({"prefix": "a/."}, 'prefix "a/.": not 1 to 64 letters'),
        ({"endpoint": "http://s3:65536"}, 'endpoint "http://s3:65536": not an address of HTTP'),
        (
            {"endpoint": "http://10.0.0.1:9", "virtual_hosted": True},
            'virtual_hosted true: "http://10.0.0.1:9" has no name',
        ),
        ({"endpoint": "http://[::1]", "virtual_hosted": True}, 'virtual_hosted true: "http://[::1]" has no name'),
        ({"endpoint": "http://999.1.1.1"}, 'endpoint "http://999.1.1.1": not an address of HTTP'),
        ({"endpoint": "http://[:::]"}, 'endpoint "http://[:::]": not an address of HTTP'),
        ({"endpoint": "http://me:word@s3"}, 'endpoint "http://(not shown)@s3": not an address of HTTP'),
        ({"endpoint": "https://s3/b?X-Amz-Signature=1"}, 'endpoint "https://s3/b?(not shown)": not an address of HTTP'),
    ],
)
def test_bad_options_are_one_line(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.load(objects={"bucket": "mine"} | given)
    assert str(refused.value).startswith(f"[objects] {told}")
    assert "\n" not in str(refused.value)


def test_the_doctor_says_whether_the_bucket_answers(server: ObjectServer) -> None:
    (off,) = examine(Config())
    assert (off.check, off.status.value, off.found) == ("objects", "ok", "off: no [objects] bucket")
    reached, worth = examine(Config(objects=options(server.endpoint)))
    assert f"bucket {BUCKET} at {server.endpoint} answers in " in reached.found
    assert (worth.check, worth.status.value) == ("objects compression", "ok")
    assert worth.found.endswith("; [objects] compression is none")
    assert server.keys() == []  # it left nothing
    (away,) = examine(Config(objects=options("http://127.0.0.1:1", deadline="1s", connect_timeout="1s")))
    assert away.status.value == "error"
    assert "127.0.0.1:1" in away.found


def test_locating_what_is_known_costs_no_request(server: ObjectServer) -> None:
    with opened(server.endpoint) as store:
        written(store, CHAIN)
        assert requests(store, lambda: store.locate(CHAIN.hashes)) == {}

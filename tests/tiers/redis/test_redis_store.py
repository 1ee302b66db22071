"""RedisStore over real servers: what one process stores another finds; expiry, resets, refusals, and how it opens.

What goes wrong under it is told in tests/faults/test_fault_redis_*.py.
"""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, record_of, wait_until
from redis_rig import NO_REDIS, RedisServer, cluster, standalone
from redis_stories import CHAIN, FINGERPRINT, OTHER, open_store, opened, options, read, whole, within, write, written

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, KVTierError, TierUnavailable
from kvtier.tiers.hierarchy.lower_tier import Rates
from kvtier.tiers.hierarchy.opening import open_ports
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.pool.changes import NAME_MIX, to_words
from kvtier.tiers.redis.lanes import Lane
from kvtier.tiers.redis.opening import check_redis
from kvtier.tiers.redis.options import _untrusted
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.reuse import MOST_AHEAD, ClassifiedEnd, ReusePredictor
from kvtier.tiers.tier import Outcome, Tier

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

OK, EVICTED, ABSENT, EPOCH = Outcome.OK, Outcome.EVICTED, Outcome.ABSENT, Outcome.EPOCH
SECRET = "s3cret-Wort"


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with opened(server.url) as one:
        yield one


class NeverReturn(ReusePredictor):
    """An order in which nothing is needed."""

    def ahead(self, kind: int) -> float:
        return -MOST_AHEAD


def block_keys(server: RedisServer) -> list[str]:
    return [key for key in server.all_keys() if len(key.rpartition(":")[2]) == 64]


# stored here, found there


def test_what_one_process_stores_another_finds_once_it_asked(server: RedisServer, store: RedisStore) -> None:
    tier: Tier = store
    assert tier.is_shared
    written(store, CHAIN)
    assert store.lookup(CHAIN.hashes) == 8  # what it wrote it knows
    with opened(server.url) as other:
        assert other.lookup(CHAIN.hashes) == 0  # nobody told it
        assert other.locate(CHAIN.hashes) == 8
        assert other.lookup([*CHAIN.hashes, *OTHER.hashes]) == 8
        assert other.holds(OTHER.hashes[:1] + CHAIN.hashes[:1]) == [False, True]
        assert whole(read(other, CHAIN))
        assert other.stats()["read_ok"] == 8


def test_locate_stops_at_the_first_hole(server: RedisServer) -> None:
    long = chain_of(1300)  # three windows
    with opened(server.url) as store, opened(server.url) as other:
        assert store.locate(long.hashes) == 0
        written(store, long)
        assert other.locate(long.hashes) == 1300
        store.discard(long.hashes[700:701])
        assert other.locate(long.hashes) == 700
        assert other.holds(long.hashes[699:702]) == [True, False, True]  # what it heard before it still believes …
        assert read(other, long)[699:702] == [OK, ABSENT, OK]  # … and rightly
        assert store.locate([]) == 0


def test_models_and_prefixes_do_not_meet(server: RedisServer, store: RedisStore) -> None:
    written(store, CHAIN)
    # as far as a key's sixteen digits go, this is the same model
    with opened(server.url, FINGERPRINT[:8] + b"another model".ljust(24)) as cousin:
        assert set(read(cousin, CHAIN)) == {Outcome.KEY_MISMATCH}  # and it deletes what is not its own
    written(store, CHAIN)
    with opened(server.url, b"quite another model".ljust(32)) as stranger:
        assert stranger.locate(CHAIN.hashes) == 0
        assert set(read(stranger, CHAIN)) == {ABSENT}
    with opened(server.url, prefix="elsewhere") as elsewhere:
        assert elsewhere.locate(CHAIN.hashes) == 0
    assert whole(read(store, CHAIN))


def test_every_key_has_the_prefix_and_every_block_an_expiry_that_a_hit_puts_off(server: RedisServer) -> None:
    with opened(server.url, ttl="1h", prefix="my.app") as store:
        written(store, CHAIN)
        assert all(key.startswith(f"my.app:{FINGERPRINT.hex()[:16]}:") for key in server.all_keys())
        keys = block_keys(server)
        assert len(keys) == 8
        for key in keys:
            assert 3_500_000 < int(server.cli("PTTL", key)) <= 3_600_000
            server.cli("PEXPIRE", key, "100000")
        read(store, chain_of(4))
        assert sum(int(server.cli("PTTL", key)) > 3_500_000 for key in keys) == 4


# resets


def test_a_reset_forgets_for_all_and_everybody_goes_on(server: RedisServer, store: RedisStore) -> None:
    with opened(server.url) as other:
        written(store, CHAIN)
        assert other.locate(CHAIN.hashes) == 8
        store.reset()
        assert store.lookup(CHAIN.hashes) == 0  # at once
        assert set(read(store, CHAIN)) == {ABSENT}
        assert set(read(other, CHAIN)) == {EPOCH}  # the batch that learns of it
        assert other.lookup(CHAIN.hashes) == 0
        assert other.locate(CHAIN.hashes) == 0
        assert len(block_keys(server)) == 8  # they go when their time is up
        written(other, CHAIN)
        assert store.locate(CHAIN.hashes) == 8
        assert whole(read(store, CHAIN))
        store.reset()  # two at once: whichever is the later counts, for both
        other.reset()
        wait_until(lambda: whole(write(store, CHAIN)) and other.locate(CHAIN.hashes) == 8)
        assert whole(read(other, CHAIN))


def test_a_reset_the_server_does_not_hear_of_serves_nothing_until_it_does(
    server: RedisServer, store: RedisStore
) -> None:
    written(store, CHAIN)
    with within(store, 0.5), server.frozen():
        store.reset()
        assert set(read(store, CHAIN)) == {Outcome.TIMEOUT}
        assert set(write(store, OTHER)) == {Outcome.TIMEOUT, Outcome.PARENT_FAILED}
        assert store.locate(CHAIN.hashes) is Outcome.TIMEOUT
    assert set(read(store, CHAIN)) == {ABSENT}
    with opened(server.url) as later:
        assert later.locate(CHAIN.hashes) == 0


def test_a_reset_just_before_the_end_is_told(server: RedisServer) -> None:
    store = open_store(server.url)
    written(store, CHAIN)
    store.reset()
    store.close()
    with opened(server.url) as later:
        assert later.locate(CHAIN.hashes) == 0


def test_a_lost_epoch_brings_nothing_back(server: RedisServer, store: RedisStore) -> None:
    (epoch_key,) = server.all_keys()
    written(store, CHAIN)
    before = server.value_of(epoch_key)
    server.cli("DEL", epoch_key)
    assert whole(read(store, CHAIN))  # it knows
    assert whole(read(store, CHAIN))  # and has written it again by now
    assert server.value_of(epoch_key) == before
    store.reset()
    assert set(read(store, CHAIN)) == {ABSENT}
    after = server.value_of(epoch_key)
    assert after > before
    for bad in (before.decode(), "rubbish", "f" * 16):  # an old one, or none: neither counts
        server.cli("SET", epoch_key, bad)
        assert set(read(store, CHAIN)) == {ABSENT}
        read(store, CHAIN)
        assert server.value_of(epoch_key) == after
    server.cli("DEL", epoch_key)
    with opened(server.url) as newcomer:  # it knows of none, and begins a new one
        assert newcomer.locate(CHAIN.hashes) == 0
        assert server.value_of(epoch_key) > after


def test_a_write_that_a_reset_overtakes_does_not_land(server: RedisServer, store: RedisStore) -> None:
    went, goes_on = threading.Event(), threading.Event()
    original = Lane.set

    def held(*arguments: object) -> None:
        went.set()
        assert goes_on.wait(60)
        original(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Lane, "set", held)
        writing = pool.submit(write, store, CHAIN)
        assert went.wait(60)
        store.reset()
        goes_on.set()
        assert set(writing.result()) == {EPOCH}
    assert store.lookup(CHAIN.hashes) == 0
    assert store.locate(CHAIN.hashes) == 0


# refusals


def test_a_full_server_drops_the_rest_of_a_chain(caplog: pytest.LogCaptureFixture) -> None:
    with standalone(maxmemory="4mb") as server, opened(server.url) as store:
        assert "noeviction" in caplog.text
        long = chain_of(2000)
        outcomes = write(store, long)
        num_kept = outcomes.index(Outcome.FULL)
        assert 0 < num_kept < 2000
        assert outcomes == [OK] * num_kept + [Outcome.FULL] * (2000 - num_kept)
        assert store.lookup(long.hashes) == num_kept
        assert store.probe("write")  # full is not broken
        server.cli("FLUSHALL")
        read(store, CHAIN)
        written(store, CHAIN)


def test_a_value_too_long_for_the_server_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with standalone("--proto-max-bulk-len", "1mb") as server:
        store = RedisStore.open(options(server.url), FINGERPRINT, slot_bytes=1 << 20, block_size=BLOCK_SIZE)
        assert "proto-max-bulk-len" in caplog.text
        payload = memoryview(bytearray(1 << 20))
        assert store.write([record_of(CHAIN, 0)], [payload]) == [Outcome.UNSUPPORTED]
        assert block_keys(server) == []
        assert store.stats()["write_unsupported"] == 1
        store.close()


def test_buffers_and_records_that_cannot_be_blocks_are_refused(store: RedisStore) -> None:
    with pytest.raises(ValueError, match=f"{SLOT_BYTES} bytes per block"):
        store.read(CHAIN.hashes, [memoryview(bytearray(SLOT_BYTES))])
    with pytest.raises(ValueError, match="per block"):
        store.write([record_of(CHAIN, 0)], [memoryview(bytearray(SLOT_BYTES - 1))])


# threads, windows, ends


@pytest.mark.parametrize("in_flight", ["5KiB", "64MiB"])
def test_threads_read_and_write_side_by_side(server: RedisServer, in_flight: str) -> None:
    chains = [chain_of(40, first_token=100_000 * n) for n in range(6)]
    with opened(server.url, in_flight=in_flight) as store, ThreadPoolExecutor(6) as pool:
        for outcomes in pool.map(lambda chain: write(store, chain), chains):
            assert whole(outcomes)
        for outcomes in pool.map(lambda chain: read(store, chain), chains * 3):
            assert whole(outcomes)
        store.check()
        clients = server.cli("CLIENT", "LIST").splitlines()
        assert len([line for line in clients if b"cmd=client" not in line]) <= 2  # two connections carry them all


def test_a_closed_store_answers(server: RedisServer) -> None:
    store = open_store(server.url)
    written(store, CHAIN)
    store.close()
    store.close()
    assert set(read(store, CHAIN)) == {Outcome.CLOSED}
    assert set(write(store, CHAIN)) == {Outcome.CLOSED}
    assert store.locate(CHAIN.hashes) is Outcome.CLOSED
    assert not store.probe("read")
    assert not store.probe("write")
    store.discard(CHAIN.hashes)
    store.reset()
    store.check()


def test_an_idle_connection_the_server_closed_costs_nothing(server: RedisServer, store: RedisStore) -> None:
    written(store, CHAIN)
    server.cli("CLIENT", "KILL", "TYPE", "normal")
    assert whole(read(store, CHAIN))


def test_over_a_unix_socket(tmp_path: Path) -> None:
    with standalone("--unixsocket", str(tmp_path / "redis.sock")), opened(f"unix://{tmp_path}/redis.sock") as store:
        written(store, CHAIN)
        assert whole(read(store, CHAIN))


def test_a_cluster_spreads_the_blocks_and_one_batch_finds_them_all() -> None:
    with cluster() as nodes, opened(nodes.url, mode="cluster") as store:
        long = chain_of(300)
        written(store, long)
        counts = [len(block_keys(master)) for master in nodes.masters]
        assert sum(counts) == 300
        assert min(counts) > 30
        with opened(nodes.masters[0].url, mode="cluster") as other:  # one node is enough to find the others
            assert other.locate(long.hashes) == 300
            assert whole(read(other, long))
            other.reset()
            assert other.locate(long.hashes) == 0
        assert set(read(store, long)) == {EPOCH}
        written(store, long)
        # Each server is told of its own blocks' expiries.
        with opened(nodes.url, mode="cluster", expiry="learned") as learning:
            assert learning.locate(CHAIN.hashes) == 8
            learning.ended(
                ClassifiedEnd(CHAIN.hashes, to_words(CHAIN.hashes) @ NAME_MIX, 8, 0, 0.0, NeverReturn(), time.monotonic)
            )
            written(learning, OTHER)
            assert learning.stats()["expire_ok"] == 8
        times = [int(master.cli("PTTL", key)) for master in nodes.masters for key in block_keys(master)]
        assert sum(left < 86_400_000 - 1900 * MOST_AHEAD for left in times) == 8


# opening


def refused(url: str, **more: Any) -> str:
    """The one line a user sees."""
    with pytest.raises(ConfigError) as caught:
        open_store(url, **more)
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    return line


def test_a_wrong_password_is_one_line_that_does_not_show_it() -> None:
    with standalone(password=SECRET) as server:
        host = f"127.0.0.1:{server.port}"
        lacks = f"[redis] password (not shown): {host} requires one; set it, and username if the server has users"
        refuses = lacks.replace("requires one; set it,", "refuses it; set the right one,")
        assert refused(server.url) == lacks
        assert refused(server.url, password="wrong") == refuses
        assert refused(f"redis://:wrong{SECRET[:0]}@{host}") == refuses
        assert refused(server.url, password=SECRET, username="nobody") == refuses
        with opened(server.url, password=SECRET) as store:
            written(store, CHAIN)
        with opened(f"redis://:{SECRET}@{host}/0") as store:
            assert store.locate(CHAIN.hashes) == 8


def test_a_mode_that_is_not_the_servers_is_one_line(server: RedisServer) -> None:
    assert refused(server.url, mode="cluster") == (
        f'[redis] mode "cluster": 127.0.0.1:{server.port} is no cluster; set mode to "standalone"'
    )
    with cluster() as nodes:
        url = nodes.masters[0].url
        assert refused(url) == f'[redis] mode "standalone": {url[8:]} is a cluster; set mode to "cluster"'


PORT = (
    '[redis] url "{}": its port is no number from 1 to 65535; '
    "write it as in redis://HOST:6379/0, and / and # of a password as %2F and %23"
)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"url": f"http://user:{SECRET}@host"},
            '[redis] url "http://…@host": scheme "http" is none of redis, rediss and unix; '
            "write it as in redis://HOST:6379/0",
        ),
        (
            {"url": f"redis://user:{SECRET}@host:port"},
            '[redis] url "redis://…@host:…": its port is no number from 1 to 65535; '
            "write it as in redis://HOST:6379/0, and / and # of a password as %2F and %23",
        ),
        (
            {"url": f"redis://user:{SECRET}"},
            "[redis] url (not shown, it may hold a password): its port is no number from 1 to 65535; "
            "write it as in redis://HOST:6379/0, and / and # of a password as %2F and %23",
        ),
        ({"url": "redis://a:0"}, PORT.format("redis://a:0")),
        ({"url": "redis://a:66000"}, PORT.format("redis://a:66000")),
        ({"url": "redis://:6379"}, '[redis] url "redis://:6379": no host; write it as in redis://HOST:6379/0'),
        (
            {"url": f"redis://:{SECRET}@host/zero"},
            '[redis] url "redis://…@host/zero": the database behind the address is no number; '
            "write it as in redis://HOST:6379/0",
        ),
        ({"url": "localhost:6379"}, '[redis] url "localhost:6379": no scheme; write redis://localhost:6379'),
        ({"url": ""}, '[redis] url "": not an address; write it as in redis://HOST:6379/0'),
        ({"url": "unix://"}, '[redis] url "unix://": no path; write it as in unix:///run/redis.sock'),
        (
            {"url": "redis://a,redis://b"},
            '[redis] url "a:6379, b:6379": several servers, but mode is "standalone"; '
            "name one, or set mode to what they are",
        ),
        (
            {"url": "unix:///run/redis.sock", "mode": "cluster"},
            '[redis] url "/run/redis.sock": mode "cluster" needs addresses; write redis://HOST:PORT',
        ),
        (
            {"url": "redis://a/3", "mode": "cluster"},
            '[redis] url "a:6379": a cluster has one database; leave out the number behind the address',
        ),
        (
            {"url": "redis://a,rediss://b", "mode": "sentinel"},
            '[redis] url "a:26379, b:26379": redis:// and rediss:// mixed; use one of them for all servers',
        ),
        (
            {"url": "redis://a?socket_timeout=9"},
            "[redis] url: socket_timeout behind the ?: not read there; use the options of [redis]",
        ),
        (
            {"url": "redis://a", "ca": "/etc/ca.pem"},
            '[redis] ca "/etc/ca.pem": url is not rediss://, so nothing would be verified; write rediss://',
        ),
        (
            {"url": "rediss://a", "ca": "/no/such/file"},
            '[redis] ca "/no/such/file": No such file or directory; name a PEM file of certificates',
        ),
        (
            {"url": "redis://a", "in_flight": "4KiB"},
            '[redis] in_flight "4096": a block takes 4355 bytes; raise it to that',
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_cannot_be_used_are_one_line(given: dict[str, str], line: str) -> None:
    assert refused(**given) == line


def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    assert refused("rediss://a", ca=str(tmp_path / "empty.pem")).endswith(
        "no certificates; name a PEM file of certificates"
    )
    with standalone(tls=True) as secure, standalone(tls=True) as other:
        assert secure.tls is not None
        assert other.tls is not None
        line = refused(secure.url, ca=str(other.tls.authority))
        assert line == f"[redis] ca: the certificate of {secure.url[9:]} is not signed by it; name the right file"
        with opened(secure.url, ca=str(secure.tls.authority)) as store:
            written(store, CHAIN)
            assert whole(read(store, CHAIN))


def test_a_server_of_http_is_no_redis() -> None:
    class Refuses(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Refuses) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{web.server_address[1]}"
        with pytest.raises(TierUnavailable, match=f"no Redis answers at {address}; name a Redis server's port"):
            open_store(f"redis://{address}")
        (found,) = check_redis(Config(redis={"url": f"redis://{address}"}).redis)
        assert found.found.startswith("no Redis answers there")
        web.shutdown()


def test_who_speaks_tls_and_who_does_not(server: RedisServer) -> None:
    # A server without TLS waits for the end of a line, which a greeting may have or not.
    with pytest.raises(TierUnavailable, match=r"does not speak TLS there[;,] write redis://"):
        open_store(server.url.replace("redis://", "rediss://"))
    with (
        standalone(tls=True) as secure,
        pytest.raises(TierUnavailable, match="if it speaks TLS there, write rediss://"),
    ):
        open_store(secure.url.replace("rediss://", "redis://"))


@pytest.mark.parametrize(
    ("said", "kind", "line"),
    [
        ("certificate has expired", TierUnavailable, "[redis] h:1: its certificate has expired; renew it"),
        ("certificate is not yet valid", TierUnavailable, "is not valid yet; set this machine's clock"),
        ("Hostname mismatch, certificate is not valid for 'h'", ConfigError, "is for another name; write one"),
        ("self-signed certificate", ConfigError, "is not signed by it; name the right file"),
    ],
)
def test_why_a_certificate_does_not_do(said: str, kind: type[KVTierError], line: str) -> None:
    error = _untrusted("h:1", f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {said} (_ssl.c:1006)")
    assert type(error) is kind
    assert line in str(error)


def test_too_little_memory_that_nothing_leaves_is_refused_and_other_settings_are_warned_of_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.redis.store._warned", set())  # of this server, in another story
    server.cli("CONFIG", "SET", "maxmemory", "20000")
    assert "maxmemory 20000, a block takes 4355 bytes" in refused(server.url)
    server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with caplog.at_level(logging.WARNING):
        with pytest.raises(TierUnavailable):  # there is not even room for the epoch
            open_store(server.url)
        server.cli("CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-random")
        caplog.clear()
        for _ in range(3):  # as a port does that attaches again and again
            with opened(server.url):
                pass
        server.cli("CONFIG", "SET", "maxmemory", "0")
        with opened(server.url):
            pass
        assert [record.message.partition(": ")[2] for record in caplog.records] == [
            'maxmemory-policy "allkeys-random" takes no heed of what is used; set allkeys-lru',
            "no maxmemory: blocks take all of the server's memory until they expire; "
            "set it, and maxmemory-policy allkeys-lru",
        ]


def test_a_server_that_shows_no_settings_is_asked_for_none(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed servers forbid CONFIG and INFO."""
    try:
        server.cli("ACL", "SETUSER", "engine", "on", f">{SECRET}", "~*", "+@all", "-config", "-info")
        with opened(server.url, username="engine", password=SECRET) as store:
            written(store, CHAIN)
            assert whole(read(store, CHAIN))
        assert caplog.records == []
        server.cli("ACL", "SETUSER", "engine", "-getrange", "-set")
        assert "denies it a command" in refused(server.url, username="engine", password=SECRET)
    finally:
        server.cli("ACL", "DELUSER", "engine")


def test_nobody_there_is_unavailable_within_the_connect_timeout() -> None:
    with pytest.raises(TierUnavailable, match=r"^\[redis\] 127.0.0.1:1: .*; the Redis tier is off$"):
        open_store("redis://127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(TierUnavailable):
        open_store("redis://10.255.255.1", connect_timeout="50ms")  # nobody answers, not even no
    assert time.monotonic() - began < 10  # a batch would have had twenty


def test_a_configuration_opens_the_port(server: RedisServer, tmp_path: Path) -> None:
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    patience = {"connect_timeout": "20s", "deadline": "20s"}
    config = Config.load(redis={"url": server.url, **patience}, file={"path": tmp_path / "slabs", "size": "1MiB"})
    ports = open_ports(config, FINGERPRINT, shape, Metrics(), Rates("load"))
    assert [port.name for port in ports] == ["file", "redis"]
    assert ports[1].breakers["read"].closed
    assert ports[1].settings.deadline > config.redis.deadline + config.redis.connect_timeout
    for port in ports:
        port.close(1.0)

"""The rig's servers are what they say, and the proxy's toxics do what they say: the fault stories stand on both."""

import socket
import time
from collections.abc import Iterator

import pytest
from redis_rig import NO_REDIS, RedisServer, cluster, standalone, wait_for, watched
from toxic_proxy import ToxicProxy

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

VALUE = bytes(range(256)) * 16
REPLY = b"$%d\r\n%s\r\n" % (len(VALUE), VALUE)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with standalone() as server:
        server.cli("SET", "key", stdin=VALUE)
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[ToxicProxy]:
    with ToxicProxy(server.port) as proxy:
        yield proxy


def ask(proxy: ToxicProxy, expected: int = len(REPLY), wait: float = 5.0) -> tuple[bytes, bool]:
    """What a GET is answered with, up to so many bytes, and whether the connection was reset."""
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as client:
        client.settimeout(wait)
        client.sendall(b"GET key\r\n")
        received = bytearray()
        try:
            while len(received) < expected and (data := client.recv(65536)):
                received += data
        except TimeoutError:
            pass
        except ConnectionResetError:
            return bytes(received), True
        return bytes(received), False


def test_a_server_is_killed_and_comes_back_on_its_port_empty() -> None:
    with standalone(password="secret", maxmemory="10mb", policy="allkeys-lru") as server:
        server.cli("SET", "key", "value")
        assert server.cli("CONFIG", "GET", "maxmemory-policy").split() == [b"maxmemory-policy", b"allkeys-lru"]
        port = server.port
        server.kill()
        with pytest.raises(RuntimeError, match="refused"):
            server.cli("PING")
        server.start()
        assert (server.port, server.all_keys()) == (port, [])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET key\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")


def test_a_server_speaks_tls() -> None:
    with standalone(tls=True) as server:
        assert server.url.startswith("rediss://")
        assert server.cli("PING") == b"PONG"


def test_a_cluster_of_three_serves_what_it_can_when_one_is_down() -> None:
    with cluster() as nodes:
        keys = {nodes.owner_of(key): key for key in map(str, range(100))}
        for owner, key in keys.items():
            nodes.masters[owner].cli("SET", key, "value")
        nodes.masters[1].kill()
        wait_for(lambda: b"fail" in nodes.masters[0].cli("CLUSTER", "NODES"))
        assert nodes.masters[0].cli("GET", keys[0]) == b"value"
        assert nodes.masters[2].cli("GET", keys[2]) == b"value"


def test_a_clusters_replica_takes_over_and_clients_are_told_the_proxies() -> None:
    with cluster(replicas=1, proxied=True) as nodes:
        told = nodes.masters[0].cli("CLUSTER", "SLOTS").decode().split()
        assert all(str(port) in told for port in nodes.ports)
        nodes.masters[1].kill()
        wait_for(lambda: b"role:master" in nodes.replicas[1].cli("INFO", "replication"))


def test_sentinels_fail_over() -> None:
    with watched(3) as group:
        group.master.cli("SET", "key", "value")
        wait_for(lambda: group.replica.cli("GET", "key") == b"value")
        group.master.kill()
        master = str(group.replica.port).encode()
        wait_for(lambda: master in group.sentinels[2].cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", group.name))
        assert group.replica.cli("SET", "key", "other") == b"OK"


def test_without_toxics_it_forwards_and_counts(proxy: ToxicProxy) -> None:
    assert ask(proxy) == (REPLY, False)
    assert (proxy.num_connections, proxy.num_asked, proxy.num_answered) == (1, len(b"GET key\r\n"), len(REPLY))
    wait_for(lambda: proxy.num_open == 0)


def test_late_slow_and_sliced(proxy: ToxicProxy) -> None:
    proxy.latency = 0.1
    began = time.monotonic()
    assert ask(proxy) == (REPLY, False)
    assert time.monotonic() - began >= 0.2  # the request and the answer
    proxy.heal()
    proxy.rate = 16 * 1024
    began = time.monotonic()
    assert ask(proxy) == (REPLY, False)
    assert time.monotonic() - began >= 0.2  # 4 KiB at 16 KiB/s
    proxy.heal()
    proxy.piece = 1
    assert ask(proxy) == (REPLY, False)


def test_mute_until_healed(proxy: ToxicProxy) -> None:
    proxy.mute()
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as client:
        client.sendall(b"PING\r\n")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(10)
        proxy.heal()
        client.settimeout(5)
        assert client.recv(10) == b"+PONG\r\n"  # late, but whole


def test_cut_off_in_the_middle_once(proxy: ToxicProxy) -> None:
    for num_bytes in (0, 1, 1000):
        proxy.cut_after(num_bytes, "close")
        assert ask(proxy) == (REPLY[:num_bytes], False)
        proxy.cut_after(num_bytes, "reset")
        received, was_reset = ask(proxy)  # a reset may throw away what had arrived
        assert was_reset
        assert REPLY[:num_bytes].startswith(received)
        assert ask(proxy) == (REPLY, False)


def test_forged_refused_and_cut_by_hand(proxy: ToxicProxy, server: RedisServer) -> None:
    proxy.forge(b"$1073741824\r\n")
    assert ask(proxy, 13) == (b"$1073741824\r\n", False)
    proxy.forge(b"+late\r\n", before=True)
    assert ask(proxy, 7 + len(REPLY)) == (b"+late\r\n" + REPLY, False)
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(10) == b"+PONG\r\n"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(10)
    proxy.refusing = True
    assert ask(proxy)[0] == b""
    proxy.heal()
    proxy.target = 1  # nobody there
    assert ask(proxy)[0] == b""

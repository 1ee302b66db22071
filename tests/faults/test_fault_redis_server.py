"""Faults 26 to 29 with a real Redis behind a proxy: down, dead, mute, slow, in pieces, cut off, answering late."""

import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest
from doubles import chain_of, store, wait_until
from extent import brief
from fault_rig import Settled, drops, fetch, forget_l2, misses, num_descriptors, num_threads, rest
from redis_rig import NO_REDIS, RedisServer
from redis_stories import (
    CHAIN,
    OTHER,
    is_open,
    located,
    opened,
    over_redis,
    read,
    reads_again,
    until,
    whole,
    within,
    write,
    written,
)
from toxic_proxy import Cut, ToxicProxy

from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import PortSettings
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.tier import Outcome

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

NEVER_AGAIN = PortSettings(deadline=60.0, failures=2, retry_after=1000.0)
FAILED = {Outcome.IO_ERROR, Outcome.TIMEOUT}
Open = Callable[..., Hierarchy]


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[ToxicProxy]:
    with ToxicProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def over(settled: Settled) -> Open:
    """`over(port, …)`: a hierarchy over the server there."""
    return lambda port, *patience, **more: settled(over_redis(f"redis://127.0.0.1:{port}", *patience, **more))


def stored(hierarchy: Hierarchy) -> Hierarchy:
    """CHAIN lies in Redis, and only there."""
    assert store(hierarchy, CHAIN) == 8
    rest(hierarchy)
    forget_l2(hierarchy)
    assert hierarchy.lookup(CHAIN.hashes)["redis"] == 8
    return hierarchy


def stores_and_loads(hierarchy: Hierarchy, first_token: int) -> None:
    """A new chain goes down and comes up again."""
    chain = chain_of(4, first_token)

    def stored_and_found() -> bool:  # a server that lost all it had costs the first batch too: its epoch is a new one
        store(hierarchy, chain)
        rest(hierarchy)
        forget_l2(hierarchy)
        return located(hierarchy, chain) == 4

    until(hierarchy, stored_and_found)
    assert fetch(hierarchy, chain) == 4


def miss_until_open(hierarchy: Hierarchy) -> None:
    """Requests for CHAIN get less than all of it, until the breaker opens."""
    while not is_open(hierarchy, "read"):
        assert fetch(hierarchy, CHAIN) < 8
        forget_l2(hierarchy)
    assert sum(misses(hierarchy, outcome) for outcome in FAILED) > 0


# 26: down at start, dies, comes back.


def test_a_server_down_at_start_is_one_warning(
    over: Open, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    hierarchy = over(server.port)
    assert store(hierarchy, CHAIN) == 8  # the engine runs on with L2 …
    rest(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    assert drops(hierarchy, "redis", Outcome.BREAKER_OPEN) == 8
    for _ in range(20):
        hierarchy.tick()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    server.start()  # … and with Redis as soon as it is there
    until(hierarchy, lambda: not is_open(hierarchy, "read") and not is_open(hierarchy, "write"))
    stores_and_loads(hierarchy, 50_000)


def test_a_server_that_dies_is_misses_and_is_used_again_when_it_is_back(over: Open, server: RedisServer) -> None:
    hierarchy = stored(over(server.port))
    server.kill()
    miss_until_open(hierarchy)
    assert hierarchy.lookup(CHAIN.hashes)["redis"] == 0
    server.start()  # empty
    until(hierarchy, lambda: not is_open(hierarchy, "read"))
    assert fetch(hierarchy, CHAIN) == 0
    until(hierarchy, lambda: not is_open(hierarchy, "write"))
    stores_and_loads(hierarchy, 50_000)


def test_a_server_killed_amid_a_load_costs_only_hits(over: Open, server: RedisServer, proxy: ToxicProxy) -> None:
    hierarchy = stored(over(proxy.port))
    answered = proxy.num_answered
    proxy.rate = 8 * 1024

    def kill_in_the_middle() -> None:
        wait_until(lambda: proxy.num_answered > answered + 6000)
        server.kill()
        proxy.cut()  # what it has said and the proxy has not told dies with it

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    assert fetch(hierarchy, CHAIN) < 8  # every byte of what did come is checked
    killer.join()
    proxy.heal()
    server.start()
    until(hierarchy, lambda: not is_open(hierarchy, "read") and not is_open(hierarchy, "write"))
    stores_and_loads(hierarchy, 50_000)


def test_an_open_breaker_leaves_the_server_alone(over: Open, proxy: ToxicProxy) -> None:
    hierarchy = stored(over(proxy.port, NEVER_AGAIN))
    proxy.mute()
    with within(hierarchy.ports[0].tier, 0.5):
        miss_until_open(hierarchy)
        rest(hierarchy)
    before = (proxy.num_asked, proxy.num_connections)
    port = hierarchy.ports[0]
    for _ in range(1000):
        assert port.lookup(CHAIN.hashes) == 0
        assert hierarchy.lookup(CHAIN.hashes).miss == 8
        assert located(hierarchy, CHAIN) == 0
    assert fetch(hierarchy, CHAIN) == 0
    assert (proxy.num_asked, proxy.num_connections) == before
    proxy.heal()


# 27: it accepts and never answers.


@contextmanager
def muted(server: RedisServer, proxy: ToxicProxy) -> Iterator[None]:
    proxy.mute()
    yield
    proxy.heal()


@contextmanager
def frozen(server: RedisServer, proxy: ToxicProxy) -> Iterator[None]:
    with server.frozen():
        yield


@contextmanager
def paused(server: RedisServer, proxy: ToxicProxy) -> Iterator[None]:
    server.cli("CLIENT", "PAUSE", "2000", "ALL")  # it would not hear an UNPAUSE either
    yield


@contextmanager
def asleep(server: RedisServer, proxy: ToxicProxy) -> Iterator[None]:
    with subprocess.Popen(["redis-cli", "-p", str(server.port), "DEBUG", "SLEEP", "3"], stdout=subprocess.DEVNULL):
        wait_until(lambda: not answers(server))
        yield


def answers(server: RedisServer) -> bool:
    command = ["timeout", "0.2", "redis-cli", "-p", str(server.port), "PING"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


Silence = Callable[[RedisServer, ToxicProxy], AbstractContextManager[None]]


@pytest.mark.parametrize("silence", [muted, frozen, *brief([], [paused, asleep])])
def test_a_silent_server_is_a_timely_miss(over: Open, server: RedisServer, proxy: ToxicProxy, silence: Silence) -> None:
    hierarchy = stored(over(proxy.port))
    with within(hierarchy.ports[0].tier, 0.5), silence(server, proxy):
        miss_until_open(hierarchy)
        assert misses(hierarchy, Outcome.TIMEOUT) > 0
        store(hierarchy, OTHER)  # L2 goes on, and nobody waits for Redis
        assert fetch(hierarchy, OTHER) == 6
        rest(hierarchy)
    until(hierarchy, lambda: not is_open(hierarchy, "read"))
    forget_l2(hierarchy)
    assert located(hierarchy, CHAIN) == 8  # its memory is as it was
    assert fetch(hierarchy, CHAIN) == 8
    until(hierarchy, lambda: not is_open(hierarchy, "write"))
    stores_and_loads(hierarchy, 50_000)


def test_a_server_that_never_answers_at_start_is_as_one_that_is_down(over: Open, proxy: ToxicProxy) -> None:
    proxy.mute()
    hierarchy = over(proxy.port, connect_timeout="500ms", deadline="1s")
    assert is_open(hierarchy, "read")
    assert store(hierarchy, CHAIN) == 8
    proxy.heal()
    until(hierarchy, lambda: not is_open(hierarchy, "read") and not is_open(hierarchy, "write"))
    stores_and_loads(hierarchy, 50_000)


# 28: slow, in pieces, cut off.


def test_a_slow_line_gives_whole_blocks_until_the_deadline_and_no_half_one(proxy: ToxicProxy) -> None:
    with opened(f"redis://127.0.0.1:{proxy.port}") as tier:
        written(tier, CHAIN)
        proxy.rate = 64 * 1024
        with within(tier, 0.25):  # for 32 KiB
            outcomes = read(tier, CHAIN)
            arrived = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), 8)
            assert arrived < 8
            assert set(outcomes[arrived:]) == {Outcome.TIMEOUT}
            assert Outcome.TIMEOUT in write(tier, OTHER)
        proxy.heal()
        reads_again(tier, CHAIN)
        written(tier, OTHER)
        assert whole(read(tier, OTHER))


@pytest.mark.parametrize("how", ["reset", "close"])
def test_cut_off_anywhere_no_part_of_a_value_is_used(proxy: ToxicProxy, how: Cut) -> None:
    with opened(f"redis://127.0.0.1:{proxy.port}") as tier:
        written(tier, CHAIN)
        before = proxy.num_answered
        assert whole(read(tier, CHAIN))
        length = proxy.num_answered - before
        for num_bytes in (*range(12), *range(12, length, 1499), length - 1):
            proxy.cut_after(num_bytes, how)
            outcomes = read(tier, CHAIN)
            assert not whole(outcomes), num_bytes
            assert set(outcomes) <= {Outcome.OK, *FAILED}
            reads_again(tier, CHAIN)


def written_at_last(tier: RedisStore, chain: TokenChain) -> bool:
    return whole(write(tier, chain))


def test_a_store_cut_off_anywhere_leaves_whole_blocks_or_none(proxy: ToxicProxy, server: RedisServer) -> None:
    with opened(f"redis://127.0.0.1:{proxy.port}") as tier, opened(server.url) as witness:
        for number, num_bytes in enumerate(range(1, 24_000, 2801)):
            chain = chain_of(6, first_token=10_000 * (number + 1))
            proxy.cut_after(num_bytes, asked=True)
            outcomes = write(tier, chain)
            assert not whole(outcomes)
            found = witness.locate(chain.hashes)
            assert isinstance(found, int)
            assert outcomes.count(Outcome.OK) <= found < 6  # what was acknowledged is there
            assert read(witness, chain)[:found] == [Outcome.OK] * found
            proxy.heal()
            wait_until(partial(written_at_last, tier, chain))
            assert whole(read(witness, chain))


# 29: an answer that nobody waits for any more.


def test_a_late_answer_is_never_taken_for_the_next_ones(proxy: ToxicProxy) -> None:
    with opened(f"redis://127.0.0.1:{proxy.port}") as tier:
        written(tier, CHAIN)
        written(tier, OTHER)
        for _ in range(5):
            proxy.mute()
            with within(tier, 0.5):
                assert set(read(tier, CHAIN)) <= FAILED
            proxy.heal()  # what CHAIN was answered comes now …
            reads_again(tier, OTHER)  # … and is nobody's: `read` compares every byte


def test_an_answer_too_many_shifts_nothing(proxy: ToxicProxy, server: RedisServer) -> None:
    with opened(f"redis://127.0.0.1:{proxy.port}") as tier:
        written(tier, CHAIN)
        written(tier, OTHER)
        stranger = OTHER.hashes[0].hex()
        value = server.value_of(next(key for key in server.all_keys() if key.endswith(stranger)))
        for answer in (b"$%d\r\n%s\r\n" % (len(value), value), b"$-1\r\n", b"+OK\r\n", b":1\r\n"):
            proxy.forge(answer, before=True)
            assert not whole(read(tier, CHAIN))
            written(tier, CHAIN)  # stored anew, should one have been taken for damaged
            reads_again(tier, CHAIN)
            reads_again(tier, OTHER)


def test_faults_of_the_network_leak_no_thread_no_connection_and_no_descriptor(over: Open, proxy: ToxicProxy) -> None:
    hierarchy = stored(over(proxy.port))

    def round_of_faults() -> None:
        for fault in (proxy.mute, proxy.cut, lambda: proxy.cut_after(5000), lambda: proxy.forge(b"$1073741824\r\n")):
            with within(hierarchy.ports[0].tier, 0.5):
                fault()
                forget_l2(hierarchy)
                fetch(hierarchy, CHAIN)
            proxy.heal()
            until(hierarchy, lambda: not is_open(hierarchy, "read") and not is_open(hierarchy, "write"))
            forget_l2(hierarchy)
            store(hierarchy, CHAIN)
            rest(hierarchy)

    for _ in range(3):
        round_of_faults()
    threads, descriptors = num_threads(), num_descriptors()
    for _ in range(brief(4, 10)):
        round_of_faults()
    wait_until(lambda: num_threads() <= threads + 2)  # one connection's pumps more or less
    wait_until(lambda: num_descriptors() <= descriptors + 3)

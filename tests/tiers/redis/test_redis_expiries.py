"""Learned expiries on a real server: what is needed less expires earlier, and with volatile-ttl it goes first."""

import logging

import pytest
from doubles import chain_of
from redis_rig import NO_REDIS, RedisServer
from redis_stories import CHAIN, OTHER, key_of, opened, read, whole, written

from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.changes import NAME_MIX, to_words
from kvtier.tiers.redis.names import LearnedExpiries
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.reuse import MOST_AHEAD, ClassifiedEnd, ReusePredictor

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

NEEDED, FINISHED = 1, 2  # classes
DAY = 86_400_000  # milliseconds
LATEST = DAY - int(2000 * MOST_AHEAD)  # of what is needed least


class Learned(ReusePredictor):
    """An order that a story decides."""

    def ahead(self, kind: int) -> float:
        return {NEEDED: MOST_AHEAD, FINISHED: -MOST_AHEAD}[kind]


def told(chain: TokenChain, kind: int) -> ClassifiedEnd:
    """A request of these blocks ends, of this class."""
    return ClassifiedEnd(
        chain.hashes, to_words(chain.hashes) @ NAME_MIX, len(chain.hashes), kind, 0.0, Learned(), lambda: 0.0
    )


def expiries(server: RedisServer, store: RedisStore, chain: TokenChain) -> list[int]:
    """Milliseconds until each block of a chain expires."""
    return [int(server.cli("PTTL", key_of(store, name))) for name in chain.hashes]


def info(server: RedisServer, field: str) -> int:
    lines = server.cli("INFO").decode().split("\r\n")
    return next(int(line.partition(":")[2]) for line in lines if line.startswith(f"{field}:"))


def test_what_is_needed_less_expires_earlier(server: RedisServer) -> None:
    with opened(server.url, expiry="learned") as store:
        written(store, CHAIN)
        store.ended(told(CHAIN, FINISHED))
        store.ended(told(OTHER, NEEDED))  # of which nothing is written yet
        assert min(expiries(server, store, CHAIN)) > LATEST + 60_000  # the servers hear of it with the next write
        written(store, OTHER)
        assert max(expiries(server, store, CHAIN)) <= LATEST
        assert min(expiries(server, store, CHAIN)) > LATEST - 60_000
        assert min(expiries(server, store, OTHER)) > DAY - 60_000
        assert store.stats()["expire_ok"] == len(CHAIN.hashes) + len(OTHER.hashes)
        assert whole(read(store, CHAIN))  # a use puts it off, until its request ends
        assert min(expiries(server, store, CHAIN)) > DAY - 60_000
        store.ended(told(CHAIN, FINISHED))
        server.cli("DEL", key_of(store, CHAIN.hashes[0]))  # somebody else deleted it
        written(store, chain_of(1, first_token=7000))
        assert store.stats()["expire_absent"] == 1
        assert store.lookup(CHAIN.hashes) == 0


def test_a_beginning_that_requests_share_expires_by_its_own_class() -> None:
    names, expiries = CHAIN.hashes, LearnedExpiries(DAY / 1000)
    expiries.ended(told(CHAIN, FINISHED)._replace(num_head=3, head_kind=NEEDED), [True] * len(names))
    due = expiries.take(len(names))
    assert min(due[name] for name in names[:3]) > DAY - 1000
    assert max(due[name] for name in names[3:]) <= LATEST


def test_with_volatile_ttl_what_is_finished_makes_room(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    server.cli("CONFIG", "SET", "maxmemory-samples", "64")
    with opened(server.url, expiry="learned") as store:
        for number in range(10):
            written(store, chain_of(8, first_token=10_000 + 1000 * number))
            store.ended(told(chain_of(8, first_token=10_000 + 1000 * number), FINISHED))
        written(store, CHAIN)
        store.ended(told(CHAIN, NEEDED))
        written(store, chain_of(1, first_token=7000))
        used = info(server, "used_memory")
        try:
            server.cli("CONFIG", "SET", "maxmemory-policy", "volatile-ttl", "maxmemory", str(used + 4096))
            for number in range(4):
                written(store, chain_of(8, first_token=50_000 + 1000 * number))  # 32 of 80 finished blocks go
            assert info(server, "evicted_keys") >= 24
            assert whole(read(store, CHAIN))
            caplog.clear()
            with caplog.at_level(logging.WARNING), opened(server.url, expiry="learned"):
                assert caplog.records == []
            server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            with opened(server.url, expiry="learned"):
                (record,) = caplog.records
                assert record.message.endswith(
                    'maxmemory-policy "allkeys-lru" takes no heed of expiries, which are learned; set volatile-ttl'
                )
        finally:
            server.cli("CONFIG", "SET", "maxmemory-samples", "5")


def test_a_full_or_closed_store_keeps_what_expiries_there_are(server: RedisServer) -> None:
    with opened(server.url, expiry="learned") as store, opened(server.url) as fixed:
        written(store, OTHER)
        fixed.ended(told(OTHER, FINISHED))  # not asked for: nothing is noted
        written(fixed, chain_of(1, first_token=7000))
        assert min(expiries(server, fixed, OTHER)) > DAY - 60_000
        store.ended(told(OTHER, FINISHED))
        store.reset()
        written(store, OTHER)  # the end was told before the reset
        assert min(expiries(server, store, OTHER)) > DAY - 60_000


def test_a_chain_goes_from_its_end_and_what_waits_is_bounded() -> None:
    expiries = LearnedExpiries(ttl=600.0)
    expiries.ended(told(CHAIN, FINISHED), [True] * 8)
    due = list(expiries.take(8).values())
    assert due == [300_000 - depth for depth in range(8)]  # never earlier than half of ttl
    for number in range(10):
        expiries.ended(told(chain_of(8000, first_token=8000 * number), NEEDED), [True] * 8000)
    assert len(expiries.take(100_000)) == 65_536
    assert expiries.take(1) == {}

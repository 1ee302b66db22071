"""What a process tells of a Redis it shares: what it wrote or read, until it expires, is missed, or is reset."""

import random

from doubles import FakeClock, chain_of, record_of
from event_rig import Shelf
from redis_rig import RedisServer
from redis_stories import CHAIN, OTHER, opened, read, reads_again, written

from kvtier.tiers.hierarchy.hierarchy import TierEvents
from kvtier.tiers.shared.changes import KnownNames, SharedChanges

RECORDS = [record_of(chain, i) for chain in (chain_of(8), chain_of(8, first_token=1000)) for i in range(8)]
NAMES = [record.chain_hash for record in RECORDS]


def test_nothing_is_kept_while_nobody_listens() -> None:
    changes = SharedChanges(10.0)
    changes.seen(RECORDS)
    changes.listen()
    assert not changes.waiting
    assert changes.take(10).stored == []


def test_what_nobody_confirms_expires() -> None:
    clock = FakeClock()
    changes = SharedChanges(10.0, clock=clock)
    changes.listen()
    changes.seen(RECORDS[:2])
    assert changes.take(10).stored == RECORDS[:2]
    clock.advance(6)
    changes.seen(RECORDS[1:2])  # read again
    assert not changes.waiting
    clock.advance(6)
    assert changes.take(10).gone == NAMES[:1]
    clock.advance(6)
    assert changes.take(10).gone == NAMES[1:2]
    assert not changes.waiting


def test_a_bound_costs_the_oldest() -> None:
    changes = SharedChanges(10.0, limit=3)
    changes.listen()
    changes.seen(RECORDS[:3])
    assert len(changes.take(10).stored) == 3
    changes.seen(RECORDS[:1])
    changes.seen(RECORDS[3:5])
    told = changes.take(10)
    assert (told.gone, told.stored) == (NAMES[1:3], RECORDS[3:5])
    changes.seen(RECORDS[5:12])  # more at once than there is room for
    assert len(changes.take(10).stored) == 3


def test_a_strict_reader_meets_no_contradiction() -> None:
    rng, clock = random.Random(7), FakeClock()
    changes = SharedChanges(10.0, limit=10, clock=clock)
    source, shelf = TierEvents("redis", lambda: changes), Shelf()
    for _ in range(2000):
        some = rng.sample(range(len(RECORDS)), rng.randint(1, 4))
        match rng.randint(0, 9):
            case 0 | 1 | 2 | 3:
                changes.seen([RECORDS[i] for i in some])
            case 4 | 5:
                changes.missed([NAMES[i] for i in some])
            case 6:
                clock.advance(rng.random() * 8)
            case 7 if rng.random() < 0.2:
                changes.clear()
            case _:
                shelf.read(source, rng.randint(1, 5))
                assert len(shelf.names("redis")) <= 10
    changes.clear()
    shelf.read(source)
    assert not shelf.names("redis")
    changes.seen(RECORDS[:3])
    shelf.read(source)
    assert changes.stop_listening() == NAMES[:3]
    assert not changes.waiting


def test_two_nodes_tell_what_each_wrote_or_read(redis_server: RedisServer) -> None:
    with opened(redis_server.url) as one, opened(redis_server.url) as two:
        ours, theirs = TierEvents("redis", lambda: one.change_feed), TierEvents("redis", lambda: two.change_feed)
        here, there = Shelf(), Shelf()
        written(one, CHAIN)
        here.read(ours)
        there.read(theirs)
        assert here.names("redis") == set(CHAIN.hashes)
        assert there.names("redis") == set()
        assert two.locate(CHAIN.hashes) == len(CHAIN.hashes)  # it knows the names, not what is behind them
        assert not theirs.waiting
        read(two, CHAIN)
        there.read(theirs)
        assert there.blocks == here.blocks
        # what was deleted is gone for whoever misses it
        two.discard(CHAIN.hashes[4:])
        there.read(theirs)
        assert there.names("redis") == set(CHAIN.hashes[:4])
        read(one, CHAIN)
        here.read(ours)
        assert here.names("redis") == set(CHAIN.hashes[:4])
        # a reset is everybody's, as soon as they ask anything
        one.reset()
        here.read(ours)
        assert here.names("redis") == set()
        written(one, OTHER)
        reads_again(two, OTHER)  # the first time it learns of it
        there.read(theirs)
        assert there.names("redis") == set(OTHER.hashes)


# What this process knows to be in shared storage: bounded, and believed for a while only.


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def test_leading_and_each() -> None:
    known = KnownNames[str](10.0)
    known.add(names(1, 2, 4), "there")
    assert known.leading(names(1, 2, 3, 4)) == 2
    assert known.of(names(1, 2, 3, 4)) == ["there", "there", None, "there"]
    assert known.forget(names(2, 3)) == [True, False]
    assert known.leading(names(1, 2)) == 1
    known.clear()
    assert known.leading(names(1)) == 0
    known.check()


def test_a_name_is_believed_for_its_lifetime_since_it_was_last_confirmed() -> None:
    clock = FakeClock()
    known = KnownNames[str](10.0, clock=clock)
    known.add(names(1, 2), "there")
    clock.advance(6)
    known.add(names(2), "there")
    clock.advance(6)
    assert known.of(names(1, 2)) == [None, "there"]
    clock.advance(6)
    assert known.of(names(1, 2)) == [None, None]
    known.check()


def test_the_least_recently_confirmed_goes_first() -> None:
    known = KnownNames[str](10.0, limit=3)
    known.add(names(1, 2, 3), "there")
    known.add(names(1), "there")
    known.add(names(4), "there")
    assert known.of(names(1, 2, 3, 4)) == ["there", None, "there", "there"]
    assert len(known) == 3
    known.check()


def test_all_that_is_at_one_place_is_forgotten() -> None:
    known = KnownNames[str](10.0)
    known.add(names(1, 2, 3), "here")
    known.add(names(2), "there")
    known.forget_all("here")
    assert known.of(names(1, 2, 3)) == [None, "there", None]
    known.check()

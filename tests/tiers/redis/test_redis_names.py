"""What this process knows to be in Redis: bounded, and believed for a while only."""

from doubles import FakeClock

from kvtier.tiers.redis.names import Names


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def test_leading_and_each() -> None:
    known = Names(10.0)
    known.add(names(1, 2, 4))
    assert known.leading(names(1, 2, 3, 4)) == 2
    assert known.known(names(1, 2, 3, 4)) == [True, True, False, True]
    assert known.forget(names(2, 3)) == [True, False]
    assert known.leading(names(1, 2)) == 1
    known.clear()
    assert known.leading(names(1)) == 0
    known.check()


def test_a_name_is_believed_for_its_lifetime_since_it_was_last_confirmed() -> None:
    clock = FakeClock()
    known = Names(10.0, clock=clock)
    known.add(names(1, 2))
    clock.advance(6)
    known.add(names(2))
    clock.advance(6)
    assert known.known(names(1, 2)) == [False, True]
    clock.advance(6)
    assert known.known(names(1, 2)) == [False, False]
    known.check()


def test_the_least_recently_confirmed_goes_first() -> None:
    known = Names(10.0, limit=3)
    known.add(names(1, 2, 3))
    known.add(names(1))
    known.add(names(4))
    assert known.known(names(1, 2, 3, 4)) == [True, False, True, True]
    assert len(known) == 3
    known.check()

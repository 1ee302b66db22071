"""What this process knows to be in shared storage: bounded, and believed for a while only."""

from doubles import FakeClock

from kvtier.tiers.shared.changes import KnownNames


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

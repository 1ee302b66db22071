"""Stories of a breaker: what opens it, who may probe and when, what closes it again."""

from threading import Barrier

from at_once import at_once
from doubles import FakeClock

from kvtier.tiers.breaker import Breaker


def state(breaker: Breaker) -> str:
    return breaker.state.value


def opened(clock: FakeClock, retry_after: float = 1.0) -> Breaker:
    breaker = Breaker(failures=1, retry_after=retry_after, clock=clock)
    breaker.failure()
    assert state(breaker) == "open"
    return breaker


def test_a_late_answer_does_not_close_it_a_probe_does() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    breaker.success()  # of an operation that began before it opened
    assert state(breaker) == "open"
    clock.advance(1)
    assert breaker.take_probe()
    assert state(breaker) == "half_open"
    assert not breaker.closed  # one probe is under way, nothing else goes through
    breaker.probed(True)
    assert breaker.closed


def test_one_probe_at_a_time_and_none_before_its_time() -> None:
    clock = FakeClock()
    closed = Breaker(failures=1, retry_after=1.0, clock=clock)
    clock.advance(100)
    assert not closed.take_probe()  # nothing to probe
    breaker = opened(clock)
    clock.advance(0.9)
    assert not breaker.take_probe()
    clock.advance(0.1)
    assert breaker.take_probe()
    clock.advance(100)
    assert not breaker.take_probe()  # the first is still under way


def test_every_failed_probe_doubles_the_wait_up_to_32_times() -> None:
    clock = FakeClock()
    breaker = opened(clock, retry_after=1.0)
    for wait in (1, 2, 4, 8, 16, 32, 32, 32):
        clock.advance(wait - 0.25)
        assert not breaker.take_probe()
        clock.advance(0.25)
        assert breaker.take_probe()
        breaker.probed(False)
        assert state(breaker) == "open"
    # One success and the patience is as short as at first.
    clock.advance(32)
    assert breaker.take_probe()
    breaker.probed(True)
    breaker.failure()
    clock.advance(1)
    assert breaker.take_probe()


def test_a_probes_result_counts_once_and_only_while_it_is_asked_for() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(1)
    assert breaker.take_probe()
    breaker.probed(False)  # it was overdue …
    breaker.probed(True)  # … and answers at last: too late, the next one decides
    assert state(breaker) == "open"
    clock.advance(2)
    assert breaker.take_probe()
    breaker.probed(True)
    breaker.probed(False)  # nobody asked
    assert breaker.closed


def test_trip_opens_at_once_and_failures_while_open_change_nothing() -> None:
    clock = FakeClock()
    breaker = Breaker(failures=5, retry_after=1.0, clock=clock)
    breaker.trip()
    assert state(breaker) == "open"
    clock.advance(0.5)
    for _ in range(9):  # stragglers do not push the probe back
        breaker.failure()
    clock.advance(0.5)
    assert breaker.take_probe()
    breaker.failure()  # nor do they end the probe
    assert state(breaker) == "half_open"
    breaker.probed(True)
    # The count starts at nought: five in a row again.
    for _ in range(4):
        breaker.failure()
    assert breaker.closed


def test_of_many_threads_one_gets_the_probe() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(1)
    barrier = Barrier(8)
    taken: list[bool] = []

    def ask() -> None:
        barrier.wait(60)
        taken.append(breaker.take_probe())

    at_once(*[ask] * 8)
    assert sorted(taken) == [False] * 7 + [True]

"""Stories of load or recompute: what is measured, what it decides, how a bad figure recovers."""

from kvtier.tiers.hierarchy.lower_tier import BusyTime
from kvtier.tiers.hierarchy.rates import Rates


def test_unknown_rates_load_and_learn() -> None:
    rates = Rates("auto")
    assert rates.worth_loading(16, {"file": 1 << 30})  # nothing is known
    rates.computed(1_000, 1.0)
    assert rates.worth_loading(16, {"file": 1 << 30})  # the tier's rate is still unknown
    rates.loaded("file", 1_000, 1.0)
    assert not rates.worth_loading(16, {"file": 1 << 30})
    assert rates.worth_loading(16, {"redis": 1 << 30})  # never used: load, and learn


def test_the_faster_way_wins() -> None:
    rates = Rates("auto")
    rates.loaded("file", 1_000_000, 1.0)  # 1 MB/s
    rates.computed(100, 1.0)  # 100 tokens/s
    assert rates.worth_loading(100, {"file": 1_000_000})  # one second either way: load
    assert rates.worth_loading(100, {"file": 900_000})
    assert not rates.worth_loading(100, {"file": 1_100_000})
    assert rates.worth_loading(100, {"file": 0})  # all of it in L2
    assert rates.worth_loading(100, {})


def test_several_tiers_add_up() -> None:
    rates = Rates("auto")
    rates.loaded("file", 1_000_000, 1.0)
    rates.loaded("redis", 500_000, 1.0)
    rates.computed(100, 1.0)
    assert rates.worth_loading(100, {"file": 500_000, "redis": 250_000})
    assert not rates.worth_loading(100, {"file": 500_000, "redis": 300_000})


def test_pinned_policies_ask_nobody() -> None:
    for policy, expected in (("load", True), ("recompute", False)):
        rates = Rates(policy)  # type: ignore[arg-type] # a literal each
        rates.loaded("file", 1, 1.0)
        rates.computed(1_000_000, 1.0)
        assert all(rates.worth_loading(1, {"file": 1 << 40}) is expected for _ in range(100))


def test_every_32nd_refusal_loads_all_the_same_so_that_a_stale_rate_recovers() -> None:
    rates = Rates("auto")
    rates.loaded("file", 10, 1.0)  # a bad day: 10 B/s
    rates.computed(100, 1.0)
    answers = [rates.worth_loading(100, {"file": 1_000}) for _ in range(64)]
    assert [i for i, worth in enumerate(answers, 1) if worth] == [32, 64]
    for _ in range(3):  # those loads found the tier well again
        rates.loaded("file", 1_000_000, 1.0)
    assert rates.worth_loading(100, {"file": 1_000})


def test_an_average_moves_slowly() -> None:
    rates = Rates("auto")
    rates.loaded("file", 1_000, 1.0)
    rates.computed(1, 1.0)
    rates.loaded("file", 1, 1.0)  # one hiccup: 1,000 → 800.2 B/s, not 1
    assert rates.worth_loading(1, {"file": 800})
    assert not rates.worth_loading(1, {"file": 801})
    rates.computed(11, 1.0)  # 1 → 3 tokens/s
    assert rates.worth_loading(3, {"file": 800})
    assert not rates.worth_loading(3, {"file": 801})


def test_a_read_that_delivered_nothing_and_a_time_of_nought_are_no_samples() -> None:
    rates = Rates("auto")
    rates.computed(100, 1.0)
    rates.loaded("file", 0, 1.0)  # all its blocks failed: no rate, and above all no rate of zero
    assert rates.worth_loading(1, {"file": 1 << 40})
    rates.loaded("file", 1_000, 0.0)  # a clock too coarse
    rates.computed(5, 0.0)
    rates.computed(0, 5.0)
    assert rates.worth_loading(1, {"file": 1 << 40})
    rates.loaded("file", 1_000, 1.0)
    rates.loaded("file", 0, 1.0)
    assert rates.worth_loading(100, {"file": 1_000})  # as it was


def test_reads_side_by_side_share_one_stretch_of_time() -> None:
    busy = BusyTime()
    # One read alone: its bytes, its time.
    busy.begin()
    assert busy.end(100, 1.0, 2.0) == (100, 1.0)
    # Two at once, one a little later: both their bytes, over the time in which at least one ran.
    busy.begin()
    busy.begin()
    assert busy.end(100, 10.0, 12.0) is None
    assert busy.end(100, 11.0, 13.0) == (200, 3.0)
    # A short one within a long one adds no time.
    busy.begin()
    busy.begin()
    assert busy.end(10, 21.0, 22.0) is None
    assert busy.end(90, 20.0, 24.0) == (100, 4.0)


def test_reads_that_never_pause_are_counted_eight_at_a_time_and_no_second_twice() -> None:
    busy, samples = BusyTime(), []
    busy.begin()
    for second in range(32):  # two threads: each read takes two seconds, one ends every second
        busy.begin()
        if (sample := busy.end(10, second - 1.0, second + 1.0)) is not None:
            samples.append(sample)
    assert samples == [(80, 9.0), (80, 8.0), (80, 8.0), (80, 8.0)]  # 10 bytes a second; 5 by each read's own time


def test_a_read_that_brought_nothing_adds_no_time() -> None:
    busy = BusyTime()
    busy.begin()
    assert busy.end(0, 0.0, 9.0) is None
    # Nor does one that fails late beside one that was well.
    busy.begin()
    busy.begin()
    assert busy.end(100, 10.0, 11.0) is None
    assert busy.end(0, 10.0, 70.0) == (100, 1.0)

"""Stories of load or recompute: what is measured, what it decides, how a bad figure recovers."""

import math

import pytest

from kvtier.tiers.hierarchy.lower_tier import BusyTime, LoadPolicy, Rates, Span


def test_a_token_far_behind_takes_as_long_as_those_before_it_let_expect() -> None:
    rates = Rates("auto")
    for position in range(0, 4000, 400):
        rates.computed(400, 0.4 + position / 1000, position)
    rates.loaded("file", 1000, 1.0)
    near, far = Span(0, 400, {"file": 2000}), Span(40_000, 400, {"file": 2000})
    assert rates.is_quicker_computed(near)
    assert not rates.is_quicker_computed(far)
    assert rates.spared(far) > rates.spared(near) == 0


def test_one_step_that_seems_far_too_quick_changes_little() -> None:
    rates = Rates("auto")
    rates.computed(4096, 0.4)
    rates.computed(4096, 1e-6)  # its results came with those of the step before
    assert rates.tokens_per_second == pytest.approx(4096 / 0.32)


def test_unknown_rates_load_and_learn() -> None:
    rates = Rates("auto")
    assert rates.worth_loading(Span(0, 16, {"file": 1 << 30}))  # nothing is known
    rates.computed(1_000, 1.0)
    assert rates.worth_loading(Span(0, 16, {"file": 1 << 30}))  # the tier's rate is still unknown
    rates.loaded("file", 1_000, 1.0)
    assert not rates.worth_loading(Span(0, 16, {"file": 1 << 30}))
    assert rates.worth_loading(Span(0, 16, {"redis": 1 << 30}))  # never used: load, and learn


def test_the_faster_way_wins() -> None:
    rates = Rates("auto")
    rates.loaded("file", 1_000_000, 1.0)  # 1 MB/s
    rates.computed(100, 1.0)  # 100 tokens/s
    assert rates.worth_loading(Span(0, 100, {"file": 1_000_000}))  # one second either way: load
    assert rates.worth_loading(Span(0, 100, {"file": 900_000}))
    assert not rates.worth_loading(Span(0, 100, {"file": 1_100_000}))
    assert rates.worth_loading(Span(0, 100, {"file": 0}))  # all of it in L2
    assert rates.worth_loading(Span(0, 100, {}))


def test_several_tiers_add_up() -> None:
    rates = Rates("auto")
    rates.loaded("file", 1_000_000, 1.0)
    rates.loaded("redis", 500_000, 1.0)
    rates.computed(100, 1.0)
    assert rates.worth_loading(Span(0, 100, {"file": 500_000, "redis": 250_000}))
    assert not rates.worth_loading(Span(0, 100, {"file": 500_000, "redis": 300_000}))


def test_pinned_policies_ignore_rates() -> None:
    for policy, expected in (("load", True), ("recompute", False)):
        rates = Rates(policy)
        rates.loaded("file", 1, 1.0)
        rates.computed(1_000_000, 1.0)
        assert all(rates.worth_loading(Span(0, 1, {"file": 1 << 40})) is expected for _ in range(100))


def test_every_32nd_refusal_loads_all_the_same_so_that_a_stale_rate_recovers() -> None:
    rates = Rates("auto")
    rates.loaded("file", 10, 1.0)  # a bad day: 10 B/s
    rates.computed(100, 1.0)
    answers = [rates.worth_loading(Span(0, 100, {"file": 1_000})) for _ in range(64)]
    assert [i for i, worth in enumerate(answers, 1) if worth] == [32, 64]
    for _ in range(3):  # those loads found the tier well again
        rates.loaded("file", 1_000_000, 1.0)
    assert rates.worth_loading(Span(0, 100, {"file": 1_000}))


def test_a_read_that_delivered_nothing_and_a_time_of_nought_are_no_samples() -> None:
    rates = Rates("auto")
    rates.computed(100, 1.0)
    rates.loaded("file", 0, 1.0)  # all its blocks failed: no rate, and above all no rate of zero
    assert rates.worth_loading(Span(0, 1, {"file": 1 << 40}))
    rates.loaded("file", 1_000, 0.0)  # a clock too coarse
    rates.computed(5, 0.0)
    rates.computed(0, 5.0)
    assert rates.worth_loading(Span(0, 1, {"file": 1 << 40}))
    rates.loaded("file", 1_000, 1.0)
    rates.loaded("file", 0, 1.0)
    assert rates.worth_loading(Span(0, 100, {"file": 1_000}))  # as it was


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


def known(bytes_per_second: int = 1000, tokens_per_second: int = 1000, policy: LoadPolicy = "auto") -> Rates:
    rates = Rates(policy)
    rates.loaded("file", bytes_per_second, 1.0)
    rates.computed(tokens_per_second, 1.0)
    return rates


def test_both_ends_meet_where_they_take_the_same_time() -> None:
    rates = known()
    assert rates.split_point(Span(0, 1600, {"file": 1600}), 16) == pytest.approx((50, 0.8))  # half and half
    assert rates.split_point(Span(320, 1600, {"file": 1600}), 16) == pytest.approx((70, 0.8))  # behind 20 blocks
    assert rates.split_point(Span(0, 1600, {"file": 4800}), 16) == pytest.approx((75, 1.2))  # a third of the rate
    assert rates.split_point(Span(0, 1600, {"file": 800, "redis": 0}), 16) == pytest.approx((33, 0.536))


def test_both_ends_are_not_worth_it_where_one_way_is_nearly_as_fast() -> None:
    rates = known()
    assert rates.split_point(Span(0, 1600, {"file": 100}), 16) is None  # loads in a tenth of the time
    assert rates.split_point(Span(0, 1600, {"file": 40_000}), 16) is None
    assert rates.split_point(Span(0, 48, {"file": 48}), 16) is None  # a front of a block is no step
    fast = known(10**9, 10**6)
    assert fast.split_point(Span(0, 1600, {"file": 1_600_000}), 16) is None  # saves less than a millisecond


def test_both_ends_need_known_rates_and_the_policy() -> None:
    span = Span(0, 1600, {"file": 1600})
    assert Rates("auto").split_point(span, 16) is None
    assert known().split_point(Span(0, 1600, {"file": 800, "redis": 800}), 16) is None
    assert known().split_point(Span(0, 1600, {}), 16) is None  # nothing to wait for
    policies: tuple[LoadPolicy, ...] = ("load", "recompute")
    for policy in policies:
        rates = known(policy=policy)
        assert rates.split_point(span, 16) is None


def test_the_front_is_longer_if_later_tokens_cost_more() -> None:
    """A token costs 0.5 ms at the start and 2.5 ms at position 4,096; on average all rates are those of an even one."""

    def cost(position: float) -> float:
        return 0.0005 + position * 0.002 / 4096

    growing, even = Rates("auto"), Rates("auto")
    for _ in range(8):
        for start in range(0, 4096, 512):
            growing.computed(512, 512 * cost(start + 256), start + 256)
            even.computed(512, 512 * cost(2048), 2048)
    for rates in (growing, even):
        rates.loaded("file", 1000, 1.0)
    span = Span(0, 4096, {"file": 6144})
    further, half = growing.split_point(span, 16), even.split_point(span, 16)
    assert further is not None
    assert half is not None
    assert half.block == pytest.approx(128, abs=2)
    # x tokens cost x (0.5 + x / 4096) ms, and as long takes loading the others at 1.5 ms each.
    exact = 4096 * (math.sqrt(2.5) - 1)
    assert further.block == pytest.approx(exact / 16, rel=0.08)
    assert further.seconds < half.seconds

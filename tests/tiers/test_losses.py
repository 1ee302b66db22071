"""What was lost of late: a reason while it goes on, with the option that helps, and none of it minutes later."""

import pytest
from doubles import FakeClock

from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.metrics import LOOKED_UP, STORED, Losses, Metrics
from kvtier.tiers.tier import Outcome


def test_a_tenth_is_none_of_it_is_said_what_helps_and_it_ends() -> None:
    clock = FakeClock()
    losses = Losses(clock)
    losses.count("file", STORED, 90)
    losses.count("file", Outcome.EVICTED, 10)
    losses.count("", LOOKED_UP, 90)
    losses.count("", Outcome.NO_SLOT, 9)
    assert losses.wanting == {}
    clock.advance(60)
    losses.count("file", Outcome.EVICTED, 80)
    losses.count("file", Outcome.TIMEOUT, 20)
    losses.count("", Outcome.NO_SLOT, 9)
    assert losses.wanting == {
        "file stores": "55% of 200 blocks in the last 5 minutes were not stored (evicted 90, timeout 20); "
        'raise [host] size, or set [cache] admit_after = "auto"',
        "l2 slots": "20% of 90 blocks in the last 5 minutes had no slot to be loaded to (no_slot); raise [host] size",
    }
    clock.advance(4 * 60)
    losses.count("file", STORED, 1000)  # it has ended: most are stored
    assert [*losses.wanting] == ["l2 slots"]
    clock.advance(2 * 60)
    assert losses.wanting == {}


@pytest.mark.parametrize(
    ("tier", "reason", "fix"),
    [
        ("l2", Outcome.NO_SLOT, "raise [host] size"),
        ("l2", Outcome.TIMEOUT, "raise [service] deadline"),
        ("redis", Outcome.TIMEOUT, "raise [redis] deadline"),
        ("file", Outcome.FULL, "raise [file] size, or free some of its disk"),
        ("redis", Outcome.FULL, "give redis more room"),
    ],
)
def test_what_helps_is_named(tier: str, reason: Outcome, fix: str) -> None:
    metrics = Metrics()
    metrics.dropped(tier, reason, 3)
    assert metrics.wanting[f"{tier} stores"].endswith(f"({reason} 3); {fix}")


@pytest.mark.parametrize(
    "reason",
    [Outcome.QUOTA, Outcome.NOT_ADMITTED, Outcome.ABORTED, Outcome.EPOCH, Outcome.BREAKER_OPEN, Outcome.CLOSED],
)
def test_what_no_size_and_no_deadline_would_change_is_none(reason: Outcome) -> None:
    metrics = Metrics()
    metrics.dropped("l2", reason, 100)
    metrics.missed(reason, 100)
    assert metrics.wanting == {}


def test_what_nobody_read_for_long_is_counted_and_not_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, clock = Metrics(), FakeClock()
    monkeypatch.setattr(metrics.losses, "_clock", clock)
    monkeypatch.setattr(metrics.losses, "_counted_up_at", clock())
    metrics.looked_up(Attribution(10, miss=10), Outcome.NO_SLOT)
    metrics.stored("l2", 5)
    clock.advance(3600)
    assert metrics.wanting == {}
    assert metrics.snapshot()['kvtier_miss_total{reason="no_slot"}'] == 10
    assert metrics.snapshot()['kvtier_store_blocks_total{tier="l2"}'] == 5
    metrics.looked_up(Attribution(10, miss=10), Outcome.NO_SLOT)
    assert [*metrics.wanting] == ["l2 slots"]

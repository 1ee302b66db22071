"""The counters: names Prometheus sees, labels, and that two hierarchies in one process don't share them."""

import pytest
from at_once import at_once
from prometheus_client.parser import text_string_to_metric_families

from kvtier.tiers.hierarchy import Attribution
from kvtier.tiers.kinds import lookup_results
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import Outcome


def test_counts_land_under_their_names() -> None:
    metrics = Metrics()
    metrics.looked_up(Attribution(5, l1=3, miss=2), None)
    metrics.missed(Outcome.CHECKSUM, 1)
    metrics.stored("l2", 4)
    metrics.stored("l2", 5)
    metrics.dropped("file", Outcome.QUEUE_FULL, 6)
    metrics.evicted("l2", 7)
    metrics.corrupted("file", 1)

    seen = metrics.snapshot()

    assert seen['kvtier_lookup_blocks_total{tier="l1"}'] == 3
    assert seen['kvtier_lookup_blocks_total{tier="miss"}'] == 2
    assert seen['kvtier_miss_total{reason="checksum"}'] == 1
    assert seen['kvtier_store_blocks_total{tier="l2"}'] == 9
    assert seen['kvtier_store_dropped_total{tier="file",reason="queue_full"}'] == 6
    assert seen['kvtier_evicted_total{tier="l2"}'] == 7
    assert seen['kvtier_corruption_total{tier="file"}'] == 1


def test_moves_towards_the_engine_are_timed() -> None:
    metrics = Metrics()
    metrics.moved("file", "read", 4096, 0.003)
    metrics.moved("file", "write", 8192, 0.5)  # nobody waits for a write

    seen = metrics.snapshot()

    assert seen['kvtier_bytes_total{tier="file",direction="read"}'] == 4096
    assert seen['kvtier_bytes_total{tier="file",direction="write"}'] == 8192
    assert seen['kvtier_load_seconds_count{tier="file"}'] == 1
    assert seen['kvtier_load_seconds_sum{tier="file"}'] == pytest.approx(0.003)
    assert seen['kvtier_load_seconds_bucket{tier="file",le="0.002"}'] == 0
    assert seen['kvtier_load_seconds_bucket{tier="file",le="0.005"}'] == 1


def test_gauges_hold_the_present() -> None:
    metrics = Metrics()
    metrics.breaker("file", "read", True)
    assert metrics.snapshot()['kvtier_breaker_open{tier="file",direction="read"}'] == 1
    metrics.breaker("file", "read", False)
    metrics.pool("l2", "ready", 10)
    metrics.pool("l2", "ready", 8)
    seen = metrics.snapshot()
    assert seen['kvtier_breaker_open{tier="file",direction="read"}'] == 0
    assert seen['kvtier_pool_slots{tier="l2",state="ready"}'] == 8


def test_attribution_knows_its_places() -> None:
    metrics = Metrics()
    assert {metrics.snapshot()[f'kvtier_lookup_blocks_total{{tier="{tier}"}}'] for tier in lookup_results()} == {0}
    with pytest.raises(KeyError, match="l3"):
        metrics.looked_up(Attribution(1, l3=1))


def test_two_hierarchies_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.stored("l2", 1)
    assert 'kvtier_store_blocks_total{tier="l2"}' not in second.snapshot()


def test_text_is_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.dropped("file", Outcome.FULL, 3)
    samples = [sample for family in text_string_to_metric_families(metrics.text()) for sample in family.samples]
    dropped = [sample for sample in samples if sample.name == "kvtier_store_dropped_total"]
    assert [(sample.labels, sample.value) for sample in dropped] == [({"tier": "file", "reason": "full"}, 3)]


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.stored("l2", 2)

    at_once(*[count] * 4)
    assert metrics.snapshot()['kvtier_store_blocks_total{tier="l2"}'] == 16000

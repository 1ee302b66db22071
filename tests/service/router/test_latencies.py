"""What a replica's own metrics tell of waiting: of kvtier's engine, of vLLM with two engines, and of neither."""

from collections.abc import Mapping

from kvtier.service.observe.statuses import LatencyFigures
from kvtier.service.router.fleet import Latencies


def page(family: str, counts: Mapping[str, int], labels: str = "") -> bytes:
    buckets = [f'{family}_bucket{{{labels}le="{bound}"}} {count}' for bound, count in counts.items()]
    return "\n".join([f"# TYPE {family} histogram", *buckets, f"{family}_sum 1.0", ""]).encode()


def test_figures_are_of_what_came_lately() -> None:
    told = Latencies()
    assert told.figures() == {}
    told.read(page("kvtier_engine_ttft_seconds", {"0.1": 1000, "1.0": 1000, "+Inf": 1000}))
    assert told.figures() == {}  # all of it may be from long ago
    ttft = page("kvtier_engine_ttft_seconds", {"0.1": 1000, "1.0": 1090, "+Inf": 1100})
    told.read(ttft + page("kvtier_engine_itl_seconds", {"0.01": 0, "0.02": 40, "+Inf": 40}))
    assert told.figures() == {
        "ttft": LatencyFigures(num=100, p50_s=0.6, p95_s=1.0),  # between 0.1 and 1 s; the last bucket has no end
        "itl": LatencyFigures(num=40, p50_s=0.015, p95_s=0.0195),
    }
    for _ in range(12):  # a minute without requests
        told.read(ttft)
    assert told.figures() == {}


def test_engines_of_one_server_are_one_and_a_new_process_begins_anew() -> None:
    told = Latencies()
    told.read(b"")
    family = "vllm:time_to_first_token_seconds"
    one = page(family, {"0.5": 2, "+Inf": 2}, 'engine="0",model_name="m",')
    told.read(one + page(family, {"0.5": 6, "+Inf": 6}, 'engine="1",model_name="m",'))
    assert told.figures()["ttft"].num == 8
    told.read(page(family, {"0.5": 1, "+Inf": 1}, 'engine="1",'))
    assert told.figures() == {}
    told.read(page(family, {"0.5": 4, "+Inf": 4}, 'engine="1",'))
    assert told.figures()["ttft"].num == 3


def test_what_is_no_metric_changes_nothing() -> None:
    told = Latencies()
    told.read(
        b"\xff\x00" * 1000 + b'kvtier_engine_ttft_seconds_bucket{le="x"} 1\nkvtier_engine_ttft_seconds_bucket{le="'
    )
    told.read(b'sglang:inter_token_latency_seconds_bucket{le="0.1"} e+.\n' * 1000)
    assert told.figures() == {}

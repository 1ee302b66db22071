"""What requests did not have to compute: counted when they take it, in the engine's own measure or an assumed one."""

from typing import Any

import pytest
from doubles import BLOCK_SIZE, chain_of, wait_until
from http_rig import ServedDaemon, ServePages
from service_rig import Attach, load, store

from kvtier.service.node.served_tiers import Savings
from kvtier.tiers.hierarchy.lower_tier import Rates


def test_seconds_are_those_of_the_rate_that_is_known() -> None:
    rates = Rates("auto")
    savings, assuming = Savings(rates, None), Savings(rates, 1000)
    for each in (savings, assuming):
        each.took(0, 500)
    assert (savings.num_tokens, savings.num_untimed, sum(savings.seconds.values())) == (500, 500, 0)
    assert (assuming.num_untimed, assuming.seconds) == (0, {"measured": 0, "assumed": 0.5})
    assert assuming.is_assumed
    assert not savings.is_assumed
    rates.computed(100, 1.0)  # an engine measures: from here on that counts
    for each in (savings, assuming):
        each.took(0, 500)
        assert not each.is_assumed
        assert each.seconds["measured"] == pytest.approx(5.0)
    assert (savings.num_tokens, savings.num_untimed) == (1000, 500)


def told(daemon: ServedDaemon, num_saved: int) -> Any:
    """The status, once the daemon has heard of so many tokens: a client does not wait for that."""
    status: Any = None

    def is_told() -> bool:
        nonlocal status
        status = daemon.client.get("/status").json()
        return bool(status["models"][0]["saved"]["tokens"] == num_saved)

    wait_until(is_told)
    return status


@pytest.mark.parametrize("options", [{"prefill_rate": 100, "gpu_hour": 2.5}, {}])
def test_the_status_tells_what_was_saved(options: dict[str, float], serve_pages: ServePages, attach: Attach) -> None:
    daemon = serve_pages(host={"size": 1 << 20}, service=options)
    tiers, chain = attach(), chain_of(6)
    store(tiers, chain)
    assert load(tiers, chain) == 6
    num_tokens = 6 * BLOCK_SIZE
    status = told(daemon, num_tokens)
    [model] = status["models"]
    page = daemon.client.get("/metrics").text
    assert status["gpu_hour"] == options.get("gpu_hour")
    assert ("kvtier_gpu_hour_price 2.5" in page) is bool(options)
    assert f'kvtier_saved_tokens_total{{fingerprint="{model["model"]}"}} {num_tokens}.0' in page
    expected: dict[str, Any] = {"tokens": num_tokens, "load_s": 0, "assumed": bool(options)}
    expected["tokens_per_s"] = 100 if options else None
    expected |= {"untimed_tokens": 0 if options else num_tokens, "prefill_s": num_tokens / 100 if options else 0}
    assert model["saved"] == expected
    # An engine says what it measures: it counts from here on.
    tiers.computed(1000, 1.0)
    load(tiers, chain)
    [model] = told(daemon, 2 * num_tokens)["models"]
    assert not model["saved"]["assumed"]
    assert model["saved"]["prefill_s"] == pytest.approx(expected["prefill_s"] + num_tokens / 1000)

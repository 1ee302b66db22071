"""Two engines and one daemon: what one has computed the other loads, and neither notices when the daemon goes."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import BLOCK_SIZE, chain_of, wait_until
from http_rig import ServedDaemon, ServePages
from service_rig import Attach, DaemonProcess, DaemonThread, Serve, attached, load, patient, store, verify
from small_engines import KEEP
from tiny_models import config_of

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Ask
from kvtier.connector.local import LocalConnector
from kvtier.connector.overlapped import OverlappedLoad
from kvtier.connector.scheduler import SchedulerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.service.node.served_tiers import Savings
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim, Overlap
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import Rates
from kvtier.tiers.pool.core import Lease

PROMPT = [(7 * n) % 120 for n in range(150)]


@pytest.fixture
def socket() -> Iterator[Path]:
    """A short path."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name) / "s"


def engine_at(socket: Path | None) -> Engine:
    """An engine over the daemon's tiers; without a socket, over none."""
    settings = EngineConfig(block_size=16, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8, exact=True)
    section = {"block_size": settings.block_size, "load_or_recompute": "load"}
    service = {"socket": socket, "deadline": "60s"}
    config = Config.model_validate(patient({"host": {"size": "4MiB"}, "cache": section, "service": service}))
    connect = LocalConnector.connect(config) if socket is not None else None
    return Engine.from_config(config_of("llama"), settings, connect)


def tiers_of(engine: Engine) -> RemoteTiers:
    assert isinstance(engine.connector, LocalConnector)
    assert isinstance(engine.connector.tiers, RemoteTiers)
    return engine.connector.tiers


def test_what_one_engine_computed_another_loads(socket: Path) -> None:
    daemon = DaemonProcess(socket, host__size="16MiB")
    alone, first, second = engine_at(None), engine_at(socket), engine_at(socket)
    (truth,) = alone.generate([PROMPT], KEEP)
    (computed,) = first.generate([PROMPT], KEEP)
    assert first.drain(60)
    assert tiers_of(first).drain(60)
    (loaded,) = second.generate([PROMPT], KEEP)
    assert computed.num_external_tokens == 0
    assert loaded.num_external_tokens == 149  # nine blocks of sixteen and a part of the tenth; one token is computed
    assert loaded.token_ids == computed.token_ids == truth.token_ids
    assert np.array_equal(loaded.logits, truth.logits)  # to the last bit
    # The daemon is killed under them, and comes back empty: they compute, then share again.
    daemon.end(signal.SIGKILL)
    assert second.generate([[5, *PROMPT]], KEEP)[0].num_external_tokens == 0
    daemon = DaemonProcess(socket, host__size="16MiB")
    wait_until(lambda: attached(tiers_of(first)) and attached(tiers_of(second)))
    other = [9, *PROMPT]
    (computed,) = first.generate([other], KEEP)
    assert first.drain(60)
    assert tiers_of(first).drain(60)
    (loaded,) = second.generate([other], KEEP)
    assert loaded.num_external_tokens == 150
    assert loaded.token_ids == computed.token_ids
    assert second.drain(60)
    tiers_of(second).check()
    for engine in (alone, first, second):
        engine.close()
    assert daemon.end(signal.SIGTERM) == 0


# What requests did not have to compute: counted when they take it, in the engine's own measure or an assumed one.


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


PRICES = {"prefill_rate": 100, "gpu_hour": 2.5, "cache_hour": 0.36}


@pytest.mark.parametrize("options", [PRICES, {}])
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
    if options:  # 10 ms a token; and the cache's price of all its memory, over the seconds that the model is open
        expected["million_computed"] = pytest.approx(1e6 / 100 * 2.5 / 3600, abs=1e-5)
        loaded = model["saved"].pop("million_loaded")
        assert 0 < loaded <= status["uptime_s"] * 0.36 / 3600 / num_tokens * 1e6
        assert f'way="loaded"}} {loaded}' not in page  # it grows meanwhile
        assert 'way="computed"} 6.944444' in page
        assert " tokens, " in daemon.client.get("/summary").text.partition("  saved ")[2].partition("\n")[0]
    assert model["saved"] == expected
    # An engine says what it measures: it counts from here on.
    tiers.computed(1000, 1.0)
    load(tiers, chain)
    [model] = told(daemon, 2 * num_tokens)["models"]
    assert not model["saved"]["assumed"]
    assert model["saved"]["prefill_s"] == pytest.approx(expected["prefill_s"] + num_tokens / 1000)


# Compute and load at once through the daemon: it decides by its rates where both ends meet, and tells the client.


NUM_BLOCKS = 100


def asked(tiers: RemoteTiers, chain: Any, overlap: Overlap) -> tuple[Claim, int]:
    claim = tiers.submit(chain.hashes, chain.parent(0), block_size=BLOCK_SIZE, overlap=overlap)
    wait_until(lambda: tiers.poll(claim) is not PENDING)
    promised = tiers.poll(claim)
    assert isinstance(promised, int)
    return claim, promised


def hierarchy_of(daemon: DaemonThread) -> Hierarchy:
    (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
    hierarchy: Hierarchy = namespace.hierarchy
    return hierarchy


def test_the_daemon_decides_and_the_client_asks_for_the_back(home: Path, serve: Serve, attach: Attach) -> None:
    daemon = serve(
        host={"size": 4 << 20},
        file={"path": home / "slab", "size": "4MiB"},
        cache={"load_or_recompute": "auto", "prefetch_deadline": "60s"},
    )
    tiers, chain = attach(size=4 << 20), chain_of(NUM_BLOCKS)
    assert store(tiers, chain) == NUM_BLOCKS
    assert tiers.drain(60)
    hierarchy = hierarchy_of(daemon)
    hierarchy.host.pool.reset()
    # What the client measured counts, growth with the position too; the tier's rate is made up.
    rates = hierarchy.rates = Rates("auto")
    rates.loaded("file", NUM_BLOCKS * hierarchy.host.region.slot_bytes, 1.0)
    for start in (0, 4096, 8192):
        tiers.computed(400, 1.0 + start / 8192, start)
    tiers.tick()
    wait_until(lambda: rates._growth.slope > 0)
    # Not asked for both ends, a client is promised all: loading is as fast as computing.
    claim, promised = asked(tiers, chain, Overlap.NONE)
    assert (claim.split, promised) == (None, NUM_BLOCKS)
    tiers.cancel(claim)
    tiers.tick()
    wait_until(lambda: not hierarchy.promoter.active)
    hierarchy.host.pool.reset()
    before = hierarchy.stats()
    claim, promised = asked(tiers, chain, Overlap.ALLOWED)
    assert promised == 0
    assert claim.refusal is None
    assert claim.split is not None
    assert NUM_BLOCKS // 4 < claim.split.block < NUM_BLOCKS
    # Its back, group by group, is promised and loaded; the question was one lookup.
    back = OverlappedLoad(tiers, chain.hashes, chain.parent(0), claim, lambda: 0.0)
    side, link = SchedulerSide(tiers), tiers._attachment.link
    assert link is not None
    assert any(type(each) is Ask for each in link.unsent)
    side.overlapped["a"] = back
    side.build_plan()
    assert not link.unsent  # they are asked for in the step that they come up in
    back.seat(list(range(NUM_BLOCKS)), 0)
    leases: list[tuple[int, Lease]] = []

    def all_there() -> bool:
        # Groups before the meeting point are asked for, too, and any may come first.
        leases.extend((group.first, lease) for group, lease, _ in back.collect())
        return {name for _, lease in leases for name in lease.hashes} >= {*chain.hashes[claim.split.block :]}

    wait_until(all_there)
    names = [name for _, lease in sorted(leases, key=lambda each: each[0]) for name in lease.hashes]
    assert names[-(NUM_BLOCKS - claim.split.block) :] == chain.hashes[claim.split.block :]
    for _, lease in leases:
        verify(tiers, lease)
        lease.release()
    back.cancel()
    after = hierarchy.stats()
    assert sum(after[name] - before.get(name, 0) for name in after if "lookup_blocks" in name) == NUM_BLOCKS
    assert np.isfinite(claim.split.seconds)


def test_the_daemon_is_gone_and_nothing_of_the_back_comes(home: Path, attach: Attach) -> None:
    daemon = DaemonThread(home / "s", host={"size": 1 << 20})
    tiers, chain = attach(), chain_of(NUM_BLOCKS)
    daemon.close()
    claim, promised = asked(tiers, chain, Overlap.ALLOWED)
    assert (claim.split, promised) == (None, 0)

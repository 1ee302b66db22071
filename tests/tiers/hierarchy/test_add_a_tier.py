"""CONTRIBUTING.md, *Add a tier*, step by step: one row, one module, and everything that shows tiers shows the new one.

The tier is `tests/rigs/memory_tier.py`. Nothing of the product knows it but the row.
"""

from collections.abc import Iterator
from pathlib import Path

import memory_tier
import pytest
from browser_rig import browser, missing
from doubles import BLOCK_SIZE, SLOT_BYTES, bytes_in_l2, chain_of, payload_of, store, wait_until
from http_rig import ServedDaemon
from memory_tier import ROW, SHELVES
from peers_rig import Sizes
from service_rig import attach, load, where
from service_rig import store as store_remote

from kvtier.connector.daemon.wire import pack_found, unpack_found
from kvtier.connector.request import ConnectedRequest
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Sequence
from kvtier.service.doctor.doctor import examine
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.publisher import AnnouncedBlocks
from kvtier.service.router.proxy import Ledger
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.hierarchy.hierarchy import EventSource, Hierarchy, Stored
from kvtier.tiers.hierarchy.opening import TierModule, open_hierarchy
from kvtier.tiers.kinds import TIERS, lookup_results
from kvtier.tiers.metrics import Metrics

MODULE: TierModule = memory_tier  # for the type checker
FINGERPRINT = b"f" * 32  # the one that `chain_of` names its chains by
NAME = ROW.name


@pytest.fixture(autouse=True)
def _row() -> Iterator[None]:
    """Step 1: the row is in the table. Afterwards nothing of it is left."""
    before = dict(TIERS)
    TIERS[NAME] = ROW
    yield
    del TIERS[NAME]
    SHELVES.clear()
    assert before == TIERS
    assert NAME not in lookup_results()
    assert not [series for series in Metrics().snapshot() if NAME in series]


def opened() -> Hierarchy:
    host = {"size": 32 * SLOT_BYTES, "pin": False, "huge_pages": False}
    return open_hierarchy(Config.model_validate({"host": host}), FINGERPRINT, Sizes())


def test_blocks_are_stored_in_it_and_come_back_after_a_restart() -> None:
    chain = chain_of(6)
    hierarchy = opened()
    # The table's row is all that it took to be opened.
    assert [port.name for port in hierarchy.ports] == [NAME]
    assert store(hierarchy, chain) == 6
    assert hierarchy.drain(60)
    hierarchy.check()
    hierarchy.close()
    # L2 starts empty. Its blocks lie on the shelf.
    hierarchy = opened()
    found = hierarchy.lookup(chain.hashes)
    assert found == Attribution(6, shelf=6)
    assert (found[NAME], found.loadable) == (6, 6)
    # A request loads them, verified, and their bytes are those of their names.
    claim = hierarchy.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)
    wait_until(lambda: hierarchy.poll(claim) == 6)
    with hierarchy.lease(claim) as lease:
        assert lease.hashes == chain.hashes
        for name in chain.hashes:
            assert bytes_in_l2(hierarchy, name) == payload_of(name)
    assert claim.found is not None
    hierarchy.count(claim.found)
    # Counters have it under its name.
    stats = hierarchy.stats()
    assert stats['kvtier_lookup_blocks_total{tier="shelf"}'] == 6
    assert stats['kvtier_bytes_total{tier="shelf",direction="read"}'] == 6 * SLOT_BYTES
    assert stats['kvtier_pool_slots{tier="shelf",state="ready"}'] == 6
    assert stats['kvtier_breaker_open{tier="shelf",direction="read"}'] == 0
    hierarchy.check()
    hierarchy.close()


def test_what_was_found_in_it_is_said_to_clients_engines_and_routers() -> None:
    # The daemon tells its clients, in one number more.
    found = Attribution(9, l1=1, l2=2, shelf=3, miss=3)
    assert pack_found(found) == (9, 1, 2, 0, 0, 0, 0, 3, 3)
    assert unpack_found(pack_found(found)) == found
    # The engine tells in an answer's usage where the prompt's tokens came from.
    request = Sequence("r", [0] * 40, SamplingParams(), chain_of(8), 0)
    request.lookup = ConnectedRequest(request, epoch=0, found=found)
    request.num_l1_tokens, request.num_external_tokens = BLOCK_SIZE, 5 * BLOCK_SIZE
    assert request.cached_tokens == {"L1": 4, "L2": 8, "file": 0, "peers": 0, "redis": 0, "objects": 0, "shelf": 12}
    # The router adds that up.
    ledger = Ledger()
    ledger.read_usage(
        b'{"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 24, '
        b'"kvtier": {"L1": 4, "L2": 8, "shelf": 12}}}}'
    )
    assert ledger.told_tiers == {"L1": 4, "L2": 8, "shelf": 12}


def test_its_blocks_are_announced_and_count_for_routing() -> None:
    chain, blocks, index = chain_of(3), AnnouncedBlocks(FINGERPRINT), PrefixIndex(BLOCK_SIZE)
    hierarchy = opened()
    source = EventSource(hierarchy)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    events = source.take()
    assert [(event.tier, len(event.blocks)) for event in events if isinstance(event, Stored)] == [("l2", 3), (NAME, 3)]
    for line in (line for event in events for line in blocks.apply(event)):
        index.apply("node", line)
    blocks.check()
    index.check()
    assert index.holdings("node") == {"CPU": 3, "SHELF": 3}
    # L2 loses them: the router still finds them, and knows what that saves.
    hierarchy.host.pool.evict(chain.hashes)
    for line in (line for event in source.take() for line in blocks.apply(event)):
        index.apply("node", line)
    assert index.matches(prompt_hashes([*range(3 * BLOCK_SIZE)], BLOCK_SIZE)) == {"node": {"SHELF": 3}}
    assert Config().router.weights["SHELF"] == ROW.weight
    hierarchy.close()


def test_the_doctor_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.doctor.doctor._copy_rate", lambda *prefix: 1e9)  # seconds of copying
    assert [finding.found for finding in examine(Config()) if finding.check == NAME] == ["0 blocks on it"]


@pytest.fixture
def served(home: Path) -> Iterator[ServedDaemon]:
    daemon = ServedDaemon(home / "s", host={"size": 1 << 20}, service={"socket": str(home / "s")})
    yield daemon
    daemon.check()
    daemon.close()


def test_the_daemons_pages_show_it(served: ServedDaemon, home: Path) -> None:
    tiers, chain = attach(home / "s"), chain_of(6)
    assert store_remote(tiers, chain) == 6
    assert load(tiers, chain) == 6
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    namespace.hierarchy.host.pool.evict(chain.hashes)  # only the shelf has them now
    assert where(tiers, chain) == Attribution(6, shelf=6)
    # As JSON, as text, and for Prometheus.
    status = served.client.get("/status").json()
    (model,) = status["models"]
    assert status["tier_captions"][-1]["shown"] == "the shelf"
    assert model["tiers"][NAME] == {"slots": {"ready": 6}, "breakers": {"read": "closed", "write": "closed"}}
    assert (model["lookups"][NAME], model["stored"][NAME]) == (6, 6)
    summary = served.client.get("/summary").text
    assert "shelf        slots ready 6; breakers read closed, write closed" in summary
    assert 'kvtier_lookup_blocks_total{fingerprint="' in (metrics := served.client.get("/metrics").text)
    assert ',tier="shelf"} 6.0' in metrics
    tiers.close()


@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
def test_the_live_page_shows_it(served: ServedDaemon, home: Path) -> None:
    tiers, chain = attach(home / "s"), chain_of(6)
    store_remote(tiers, chain)
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    namespace.hierarchy.host.pool.evict(chain.hashes)
    assert load(tiers, chain) == 6
    with browser() as page:
        page.open(f"http://{served.http}/")
        page.wait_for("the shelf", "ready 6 · stored 6", card="Tiers")
        page.wait_for("the shelf 100 % 6", card="Lookups, by where found")
        page.wait_for("the shelf read 24.6 kB", card="Moved")
        page.wait_for("the shelf ● closed ● closed", card="Breakers")
        assert page.complaints() == []
    tiers.close()

"""A burst over real storage: what memory holds is on the slab, in Redis and in the bucket once they had time for it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, store, wait_until
from object_rig import BUCKET, NO_OBJECTS, ObjectServer
from redis_rig import NO_REDIS, standalone

from kvtier.tiers.config.config import Config
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import Outcome

SLOTS = 128
FINGERPRINT = b"f" * 32  # of `chain_of`
PATIENCE = {"connect_timeout": "20s", "deadline": "20s"}


class Shape:
    block_bytes = SLOT_BYTES
    block_size = BLOCK_SIZE


@pytest.fixture
def sections(request: pytest.FixtureRequest, disk_dir: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The configuration of these tiers, over storage that is empty."""
    wanted: list[str] = request.param
    found: dict[str, Any] = {}
    objects = ObjectServer(tmp_path) if "objects" in wanted else None
    if "file" in wanted:
        found["file"] = {"path": str(disk_dir), "size": "16MiB", "deadline": "60s"}
    try:
        if objects is not None:
            objects.start()
            keys = {"access_key_id": "somebody", "secret_access_key": "a key"}
            found["objects"] = {"bucket": BUCKET, "endpoint": objects.endpoint, **PATIENCE, **keys}
        if "redis" not in wanted:
            yield found
        else:
            with standalone() as redis:
                yield found | {"redis": {"url": redis.url, "prefix": "burst", **PATIENCE}}
    finally:
        if objects is not None:
            objects.kill()


def node(sections: dict[str, Any], **cache: Any) -> Hierarchy:
    host = {"size": SLOTS * SLOT_BYTES, "pin": False, "huge_pages": False}
    options = {"load_or_recompute": "load", "prefetch_deadline": "60s", "block_size": BLOCK_SIZE, **cache}
    return open_hierarchy(Config.load(None, host=host, cache=options, **sections), FINGERPRINT, Shape())


def found_below(hierarchy: Hierarchy, chains: list[TokenChain]) -> list[int]:
    """Blocks of each chain that a node of its own finds and reads, all of them right."""
    found = []
    for chain in chains:
        claim = hierarchy.ask(chain.hashes, chain.root, block_size=BLOCK_SIZE)
        wait_until(lambda claim=claim: isinstance(hierarchy.poll(claim), int))
        with hierarchy.take(claim) as lease:
            for slot, name in zip(lease.slots, lease.hashes, strict=True):
                assert bytes(hierarchy.host.region.slot(slot)) == payload_of(name)
            found.append(len(lease))
    return found


@pytest.mark.parametrize(
    "sections",
    [
        ["file"],
        pytest.param(["redis"], marks=pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))),
        pytest.param(["objects"], marks=pytest.mark.skipif(NO_OBJECTS is not None, reason=str(NO_OBJECTS))),
        pytest.param(["file", "redis"], marks=pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))),
    ],
    indirect=True,
)
def test_all_of_a_burst_is_found_by_the_next_process(sections: dict[str, Any]) -> None:
    chains = [chain_of(30, first_token=10_000 * number) for number in range(1, 5)]  # L2 has room for these
    with closing(node(sections, store_queue=6 * SLOT_BYTES)) as first:  # a twentieth of them may wait
        for chain in chains:
            assert store(first, chain) == 30
        for port in first.ports:  # nobody asks, drains or closes: the tiers go on by themselves
            assert port.queue.drain(60)
        held = [port.holds([name for chain in chains for name in chain.hashes]) for port in first.ports]
        assert all(all(each) for each in held)
    with closing(node(sections)) as again:
        assert found_below(again, chains) == [30] * 4
        again.check()


@pytest.mark.parametrize("sections", [["file"]], indirect=True)
def test_by_default_a_quarter_of_memory_waits_and_nothing_is_lost(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chains, gate = [chain_of(32, first_token=10_000 * number) for number in range(1, 5)], Event()
    write = FileStore.write

    def wait(*arguments: Any) -> list[Outcome]:
        gate.wait(60)
        return write(*arguments)

    monkeypatch.setattr(FileStore, "write", wait)  # the disk is busy
    with closing(node(sections)) as first:
        for chain in chains:
            assert store(first, chain) == 32
        assert first.host.pool.counts().leased == SLOTS // 4
        gate.set()
        assert first.ports[0].queue.drain(60)
        assert all(first.ports[0].holds([name for chain in chains for name in chain.hashes]))

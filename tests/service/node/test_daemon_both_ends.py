"""Compute and load at once through the daemon: it decides by its rates where both ends meet, and tells the client."""

from pathlib import Path
from typing import Any

import numpy as np
from doubles import BLOCK_SIZE, chain_of, wait_until
from service_rig import Attach, DaemonThread, Serve, store, verify

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Ask
from kvtier.connector.overlapped import OverlappedLoad
from kvtier.connector.scheduler import SchedulerSide
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim, Overlap
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import Rates
from kvtier.tiers.pool.core import Lease

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

"""Blocks dropped by name from every tier: what an operator asks for, not what room does."""

import time
from collections.abc import Sequence

from kvtier.tiers import L2, ChainHash
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.pool import REMOVED


def evict_everywhere(hierarchy: Hierarchy, hashes: Sequence[ChainHash], timeout: float) -> dict[str, int]:
    """Drop these blocks from L2 and every tier below, and tails behind them; returns how many blocks went, by tier.

    Waits up to `timeout` seconds for writes under way, which would bring them back; I/O: not for a serving thread. What
    is leased keeps its slot until its leases end, but nobody finds it any more.
    """
    pool, deadline = hierarchy.host.pool, time.monotonic() + timeout
    hierarchy.drain(timeout, below=False)
    tails = [tail.chain_hash for tail in hierarchy.host.tails_behind(hashes)]
    gone = {L2: pool.evict(hashes)}
    pool.evict(tails)
    for port in hierarchy.ports:
        port.queue.drain(max(0.0, deadline - time.monotonic()))  # its writers lease their blocks, name or no name
        tier = port.tier  # a probe may detach it meanwhile
        if tier is not None:
            held = [name for name, is_held in zip(hashes, tier.holds(hashes), strict=True) if is_held]
            gone[port.name] = len(held)
            tier.discard(hashes)
            if port.is_shared:  # others remember it themselves
                port.not_stored(held, REMOVED)
    pool.evict(hashes)  # what was read meanwhile from tiers that had it still
    return gone

"""What a policy would have held of a trace: to choose one offline."""

from collections.abc import Iterable, Sequence

from kvtier.tiers.pool import SlotPool
from kvtier.tiers.tier import ChainHash


def replay(trace: Iterable[Sequence[ChainHash]], num_slots: int, *, policy: str = "lru") -> float:
    """The share of a trace's blocks that a pool with this policy would have held: each item is one prompt's chain."""
    pool = SlotPool(num_slots, policy=policy)
    num_blocks = num_hits = 0
    for hashes in trace:
        with pool.lease(hashes) as hits:
            num_blocks += len(hashes)
            num_hits += len(hits)
            reservation = pool.reserve(hashes)
            if reservation is not None:
                pool.seal(reservation).release()
    return num_hits / num_blocks if num_blocks else 0.0

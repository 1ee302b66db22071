"""What the stories of pools share: kinds of fixtures, a store in one call, all that decides what a table does next."""

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.tiers.pool.lease import Reservation
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.pool.slots import SlotTable
from kvtier.tiers.tier import ChainHash

PoolOf = Callable[..., SlotPool]
Chain = Callable[..., list[ChainHash]]


def reserved(pool: SlotPool, hashes: Sequence[ChainHash], parent: ChainHash | None = None) -> Reservation:
    """A reservation the pool has room for."""
    reservation = pool.reserve(hashes, parent)
    assert reservation is not None
    return reservation


def store(pool: SlotPool, hashes: Sequence[ChainHash], parent: ChainHash | None = None) -> None:
    """Reserve, seal, release."""
    pool.seal(reserved(pool, hashes, parent)).release()


def state_of(table: SlotTable) -> dict[str, object]:
    """All that decides what a table does next; nobody's row means nothing."""
    everyone = np.arange(table.num_slots)
    named = np.sort(table.index.check())
    parents, alive = table.links.parents(everyone)
    return {
        "state": table.state.tolist(),
        "refs": table.refs[everyone].tolist(),
        "generation": table.generation.tolist(),
        "free": table.free_slots[: table.num_free].tolist(),
        "names": list(zip(named.tolist(), table.index.names(named), strict=True)),
        "parents": np.where(alive, parents, -1).tolist(),
        "children": table.links.children[everyone][table.state[everyone] != 0].tolist(),
        "order": np.argsort(table.policy.ranks(everyone), kind="stable").tolist(),
        "victims": (table.policy.ranks(everyone) >= 0).tolist(),
        "dirty": table.idle.dirty.tolist(),
        "counts": (table.num_free, table.num_ready, table.num_leased, table.num_evicted, table.num_dirty_dropped),
        "tails": list(table.tails),
        "told": table.changes is not None and table.changes.waiting,
    }

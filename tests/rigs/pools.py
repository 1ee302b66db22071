"""What the stories of pools share: kinds of fixtures, a store in one call, all that decides what a table does next."""

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.tiers.pool.core import SlotCore
from kvtier.tiers.pool.pool import Reservation, SlotPool
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


def state_of(core: SlotCore) -> dict[str, object]:
    """All that decides what a table does next; nobody's row means nothing."""
    everyone = np.arange(core.num_slots)
    arrays = core.state, core.refs, core.generation, core.dirty, core.is_partial, core.lists.where
    named = core.index.named().tolist()
    state = np.asarray(core.state)[:-1]
    return {
        "slots": [np.asarray(each)[:-1].tolist() for each in arrays],
        "free": np.asarray(core.free_slots)[: core.num_free].tolist(),
        "names": list(zip(named, core.names_of(named), strict=True)),
        "parents": [core.parent_of(slot) for slot in everyone.tolist()],
        "children": np.asarray(core.children)[:-1][state != 0].tolist(),
        "order": np.argsort(core.order.ranks(everyone), kind="stable").tolist(),
        "counts": (core.num_free, core.num_ready, core.num_leased, core.num_evicted, core.num_dirty_dropped),
        "partial": list(core.partial),
        "changes": core.changes is not None and core.changes.waiting,
    }

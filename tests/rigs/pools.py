"""What the stories of pools share: kinds of fixtures, and a store in one call."""

from collections.abc import Callable, Sequence

from kvtier.tiers.pool.lease import Reservation
from kvtier.tiers.pool.pool import SlotPool
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

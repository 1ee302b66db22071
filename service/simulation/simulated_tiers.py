"""SimulatedTiers: L2, a slab and Redis under one trace. The real pool, policies and extents, with no bytes behind."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers import ChainHash
from kvtier.tiers.file import BareSlab
from kvtier.tiers.pool import Lease, SlotPool
from kvtier.tiers.reuse import RequestEnd

_SIGHTINGS_PER_SLOT: Final = 4  # that are remembered, as in `tiers/hierarchy/stores.py`
_ROOT: Final = bytes(32)  # what first blocks stand behind: the slab begins a run there, as for a model's own root


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one simulation has room for."""

    memory: int  # bytes of L2
    disk: int = 0  # bytes of the slab; 0: none
    redis: int = 0  # bytes in Redis; 0: none
    redis_ttl: float = 86400.0  # seconds
    policy: str = "tail"  # of L2
    admit_after: int = 1  # sightings of a block before it is stored


class SimulatedTiers:
    """What a node's tiers would find and keep, request by request. For one thread.

    A request is over as soon as it has come: what it finds is leased, loaded into L2 and used; the rest is computed,
    stored in L2 and written through to the tiers below. Nothing fails, and no queue is ever full.
    """

    def __init__(self, capacity: Capacity, block_bytes: int, block_size: int) -> None:
        """ValueError if memory has no room for a block."""
        num_slots = capacity.memory // block_bytes
        if num_slots < 1:
            raise ValueError("no room for a block in memory")
        self.now = 0.0
        self.pool = SlotPool(num_slots, policy=capacity.policy, clock=lambda: self.now)
        self.slab = BareSlab(capacity.disk, block_bytes, block_size) if capacity.disk else None
        self._admit_after, self._sightings = capacity.admit_after, OrderedDict[ChainHash, int]()
        self.redis = _ExpiringStore(capacity.redis // block_bytes, capacity.redis_ttl) if capacity.redis else None

    def request(self, end: RequestEnd, now: float, ended: float | None = None) -> tuple[int, int, int]:
        """A request comes at `now` seconds and ends; returns how many leading blocks of its prompt L2, slab, Redis had.

        `ended`: when, in seconds; None: at once. A block that could not be loaded, as L2 had no room for it, counts as
        not found.
        """
        self.now = now
        names = end.names
        leases, found = self._find(names[: end.num_prompt])
        at = sum(found)
        leases += self._store(names[at:], names[at - 1] if at else None)
        self.now = now if ended is None else ended
        if (told := self.pool.ended(end)) is not None and self.slab is not None:
            self.slab.ended(told)
        for lease in leases:
            lease.release()
        return found[0], found[1], found[2]

    def check(self) -> None:
        """Raise AssertionError where a law of the pool or the slab is broken."""
        self.pool.check()
        if self.slab is not None:
            self.slab.check()

    def _find(self, prompt: Sequence[ChainHash]) -> tuple[list[Lease], list[int]]:
        """Lease what leads the prompt, from whatever tier has it; and how many blocks each had."""
        lease = self.pool.lease(prompt)
        leases, found = [lease], [len(lease), 0, 0]
        at = len(lease)
        while at < len(prompt) and (self.slab is not None or self.redis is not None):
            if at > len(leases[0]) and len(lease := self.pool.lease(prompt[at:])):
                leases.append(lease)
                found[0] += len(lease)
                at += len(lease)
                continue
            tier, count = self._below(prompt[at:])
            lease_or_none = self._load(prompt, at, count, tier) if count else None
            if lease_or_none is None:
                break
            leases.append(lease_or_none)
            found[tier] += len(lease_or_none)
            at += len(lease_or_none)
        return leases, found

    def _below(self, rest: Sequence[ChainHash]) -> tuple[int, int]:
        """Which lower tier has the first block, and how many leading ones, up to the next that L2 has."""
        tier, count = 1, self.slab.lookup(rest) if self.slab is not None else 0
        if not count and self.redis is not None:
            tier, count = 2, self.redis.lookup(rest, self.now)
        held = self.pool.holds(rest[:count])
        return tier, held.index(True) if True in held else count

    def _load(self, prompt: Sequence[ChainHash], at: int, count: int, tier: int) -> Lease | None:
        """Bring blocks into L2, fewer where there is less room; the block behind them is linked to them again."""
        parent, after = prompt[at - 1] if at else None, at + count
        behind = [name for name in prompt[after : after + 1] if self.pool.holds([name])[0]]
        reservation = self.pool.reserve([*prompt[at:after], *behind], parent)
        while reservation is None and count > 1:
            count //= 2
            reservation = self.pool.reserve(prompt[at : at + count], parent)
        if reservation is None:
            return None
        if tier == 1 and self.slab is not None:
            self.slab.read(prompt[at : at + count])
        return self.pool.seal(reservation)

    def _store(self, names: Sequence[ChainHash], parent: ChainHash | None) -> list[Lease]:
        """Store what was computed, or as much of its head as there is room for."""
        count = self._seen_enough(names) if self._admit_after > 1 else len(names)
        while count:
            if (reservation := self.pool.reserve(names[:count], parent)) is not None:
                stored = list(reservation.hashes)
                lease = self.pool.seal(reservation)
                if stored and self.slab is not None:
                    self.slab.write(stored, reservation.parents[0] or _ROOT)
                if stored and self.redis is not None:
                    self.redis.write(stored, self.now)
                return [lease]
            count //= 2
        return []

    def _seen_enough(self, names: Sequence[ChainHash]) -> int:
        """How many leading blocks have been seen often enough to be stored, this time included."""
        num_seen = 0
        for i, name in enumerate(names):
            self._sightings[name] = times = self._sightings.pop(name, 0) + 1
            num_seen += num_seen == i and times >= self._admit_after
        while len(self._sightings) > _SIGHTINGS_PER_SLOT * self.pool.num_slots:
            self._sightings.popitem(last=False)
        return num_seen


class _ExpiringStore:
    """Redis as a number of blocks, each with an expiry that a hit renews; the block used longest ago makes room."""

    def __init__(self, num_blocks: int, ttl: float) -> None:
        self._num_blocks, self._ttl = num_blocks, ttl
        self._used: OrderedDict[ChainHash, float] = OrderedDict()

    def lookup(self, hashes: Sequence[ChainHash], now: float) -> int:
        """How many leading blocks it has; that counts as a use of each."""
        self._expire(now)
        count = next((i for i, name in enumerate(hashes) if name not in self._used), len(hashes))
        self.write(hashes[:count], now)
        return count

    def write(self, hashes: Sequence[ChainHash], now: float) -> None:
        """Store blocks, or renew them. The deepest was used longest ago."""
        for name in reversed(hashes):
            self._used[name] = now
            self._used.move_to_end(name)
        while len(self._used) > self._num_blocks:
            self._used.popitem(last=False)

    def _expire(self, now: float) -> None:
        while self._used and now - next(iter(self._used.values())) >= self._ttl:
            self._used.popitem(last=False)

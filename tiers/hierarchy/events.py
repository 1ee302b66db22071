"""EventSource: which blocks came to a tier and which left it, for whoever tells others: KV events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.port import TierPort
from kvtier.tiers.tier import Announcer, Announces, BlockRecord, ChainHash, Changes

MOST: Final = 4096  # blocks of one tier told at a time: bounds the time under the tier's lock


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of consecutive blocks became findable in a tier; each is the parent of the next."""

    tier: str  # "l1", "l2", or a port's name
    blocks: tuple[BlockRecord, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are not in a tier any more. With `all` they are everything it was said to hold: a reset, or it is off."""

    tier: str
    hashes: tuple[ChainHash, ...]
    all: bool = False


Event = Stored | Removed


class EventSource:
    """What a hierarchy's tiers hold, told as it changes, to one reader. Nothing is logged before one is made.

    Law: a reader that applied every event up to an empty `take` knows exactly what each tier `holds`, wherever nothing
    is under way. No block is stored twice or removed unknown. A tier that goes off or fails to answer is told as
    emptied once it is closed, not while a breaker merely waits. Tiers don't wait for each other: a block may be told
    as removed from one before it is told as stored in the next.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        """Looks at every block there is: where a slab is large, not on a thread that others wait for."""
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._ports = [_PortEvents(port) for port in hierarchy.ports]
        self._host.pool.listen()

    @property
    def waiting(self) -> bool:
        """Whether there may be something to tell."""
        return self._host.pool.has_changes or any(port.waiting for port in self._ports)

    @property
    def coming(self) -> bool:
        """Whether stores or reads are under way, whose end there will be something to tell of."""
        return not all((self._hierarchy.drain(0, below=False), *(port.idle for port in self._ports)))

    def take(self, limit: int = MOST) -> list[Event]:
        """What happened since the last time; of each tier at most `limit` new blocks, the others with the next call."""
        events = list(events_of("l2", self._host.pool.changes(self._host.records, limit)))
        for port in self._ports:
            events += port.take(limit)
        return events


class TierEvents:
    """What one tier by itself tells: an engine's L1. As `EventSource`, to one reader."""

    def __init__(self, tier: str, announcer: Announcer) -> None:
        self._tier = tier
        self._announcer = announcer
        announcer.listen()

    @property
    def waiting(self) -> bool:
        """Whether there may be something to tell."""
        return self._announcer.waiting

    def take(self, limit: int = MOST) -> list[Event]:
        """What happened since the last time; at most `limit` new blocks, the others with the next call."""
        return list(events_of(self._tier, self._announcer.take(limit)))


class _PortEvents:
    """The events of one lower tier, which may be closed and opened anew meanwhile."""

    def __init__(self, port: TierPort) -> None:
        self._port = port
        self._heard = _announcer(port.tier)
        if self._heard is not None:
            self._heard.listen()

    @property
    def waiting(self) -> bool:
        tier = _announcer(self._port.tier)
        return tier is not self._heard or (tier is not None and tier.waiting)

    @property
    def idle(self) -> bool:
        return self._port.queue.idle

    def take(self, limit: int) -> Iterator[Event]:
        tier, name = _announcer(self._port.tier), self._port.name
        if tier is not self._heard:
            known = self._heard.hush() if self._heard is not None else []
            if known:
                yield Removed(name, tuple(known), all=True)
            self._heard = tier
            if tier is not None:
                tier.listen()
        if tier is not None:
            yield from events_of(name, tier.take(limit))


def _announcer(tier: object) -> Announcer | None:
    return tier.announcer if isinstance(tier, Announces) else None


def events_of(tier: str, changes: Changes) -> Iterator[Event]:
    """A tier's changes as events: removals first, and runs of blocks each of which is the next one's parent."""
    if changes.gone:
        yield Removed(tier, tuple(changes.gone), changes.cleared)
    run: list[BlockRecord] = []
    for record in changes.stored:
        if run and record.parent != run[-1].chain_hash:
            yield Stored(tier, tuple(run))
            run = []
        run.append(record)
    if run:
        yield Stored(tier, tuple(run))

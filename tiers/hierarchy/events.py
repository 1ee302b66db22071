"""EventSource: which blocks came to a tier and which left it, for the publisher of KV events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtier.tiers import L2, Announcer, Announces, BlockRecord, ChainHash, Changes
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import TierPort

MOST: Final = 4096  # blocks of one tier taken at a time: bounds the time under the tier's lock


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of consecutive blocks became findable in a tier; each is the parent of the next."""

    tier: str  # its name in the table of tiers
    blocks: tuple[BlockRecord, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier. With `all` they are everything that it was said to hold: it was reset, or went off."""

    tier: str
    hashes: tuple[ChainHash, ...]
    all: bool = False


Event = Stored | Removed


class EventSource:
    """What changes in a hierarchy's tiers, for one reader. The tiers keep no log before it is made.

    Law: a reader that applied every event up to an empty `take` knows exactly what each tier `holds`, if nothing is
    under way. No block is stored twice, and none is removed that was not stored. A tier that goes off, or fails to
    answer, is emptied by an event once it is closed, not while its breaker is open. Tiers do not wait for each other: a
    block may leave one tier before the event that it is in the next.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        """Looks at every block there is: with a large slab, not on a thread that others wait for."""
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._ports = [_PortEvents(port) for port in hierarchy.ports]
        self._host.pool.listen()

    @property
    def waiting(self) -> bool:
        """Whether there may be something to take."""
        return self._host.pool.has_changes or any(port.waiting for port in self._ports)

    @property
    def coming(self) -> bool:
        """Whether stores or reads are under way that will end in events."""
        queues = [port.queue for port in self._hierarchy.ports]
        return not all((self._hierarchy.drain(0, below=False), *(queue.idle for queue in queues)))

    def take(self, limit: int = MOST) -> list[Event]:
        """What happened since the last time; of each tier at most `limit` new blocks, the others with the next call."""
        events = list(events_of(L2, self._host.pool.changes(self._host.records, limit)))
        for port in self._ports:
            events += port.take(limit)
        return events


class TierEvents:
    """What changes in one tier by itself, an engine's L1. As `EventSource`, for one reader."""

    def __init__(self, tier: str, announcer: Announcer) -> None:
        self._tier = tier
        self._announcer = announcer
        announcer.listen()

    @property
    def waiting(self) -> bool:
        return self._announcer.waiting

    def take(self, limit: int = MOST) -> list[Event]:
        """What happened since the last time; at most `limit` new blocks, the others with the next call."""
        return list(events_of(self._tier, self._announcer.take(limit)))


class _PortEvents:
    """The events of one lower tier, which may be closed and opened anew meanwhile."""

    def __init__(self, port: TierPort) -> None:
        self._port = port
        self._followed = _announcer(port.tier)
        if self._followed is not None:
            self._followed.listen()

    @property
    def waiting(self) -> bool:
        tier = _announcer(self._port.tier)
        return tier is not self._followed or (tier is not None and tier.waiting)

    def take(self, limit: int) -> Iterator[Event]:
        tier, name = _announcer(self._port.tier), self._port.name
        if tier is not self._followed:
            known = self._followed.stop_listening() if self._followed is not None else []
            if known:
                yield Removed(name, tuple(known), all=True)
            self._followed = tier
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

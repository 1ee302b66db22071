"""For stories about KV events: a hierarchy over a small real slab, and a reader that believes what it is told."""

from collections.abc import Sequence
from pathlib import Path

from doubles import BLOCK_SIZE, SLOT_BYTES, wait_until

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.hierarchy import Event, EventSource, Hierarchy, Removed, TierEvents
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import BlockRecord, ChainHash

until = wait_until


class Shelf:
    """What a reader knows of each tier: strict, so that nothing is stored twice and nothing unknown removed."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[ChainHash, BlockRecord]] = {}

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            known = self.blocks.setdefault(event.tier, {})
            if isinstance(event, Removed):
                assert len(set(event.hashes)) == len(event.hashes)
                assert set(event.hashes) <= known.keys(), "removed, and never told of"
                assert not event.all or set(event.hashes) == known.keys(), "not all"
                for chain_hash in event.hashes:
                    del known[chain_hash]
                continue
            parents = [record.parent for record in event.blocks[1:]]
            assert parents == [record.chain_hash for record in event.blocks[:-1]], "no run"
            for record in event.blocks:
                assert record.chain_hash not in known, "stored twice"
                known[record.chain_hash] = record

    def read(self, source: EventSource | TierEvents, limit: int = 4096) -> None:
        """Everything there is to tell."""
        while source.waiting:
            self.apply(source.take(limit))

    def names(self, tier: str) -> set[ChainHash]:
        return set(self.blocks.get(tier, {}))


def held(hierarchy: Hierarchy, names: Sequence[ChainHash]) -> dict[str, set[ChainHash]]:
    """Which of the names each tier holds."""
    found = {"l2": hierarchy.host.pool.holds(names)}
    for port in hierarchy.ports:
        found[port.name] = port.tier.holds(names) if port.tier is not None else [False] * len(names)
    return {
        tier: {name for name, is_held in zip(names, flags, strict=True) if is_held} for tier, flags in found.items()
    }


def open_slab(directory: Path, size: int = 160_000) -> FileStore:
    """A slab of few extents."""
    return FileStore.open(
        directory, b"e" * 32, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=size, mode="buffered"
    )


def tiered(slots: int, directory: Path, size: int = 160_000, settings: HierarchySettings | None = None) -> Hierarchy:
    """L2 of `slots` blocks over a slab of at most `size` bytes."""
    metrics, rates = Metrics(), Rates("load")
    host = HostTier(HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False))
    patience = PortSettings(deadline=60.0, failures=2, retry_after=0.01, num_threads=2)
    port = TierPort("file", lambda: open_slab(directory, size), patience, metrics, rates)
    return Hierarchy(host, [port], settings or HierarchySettings(prefetch_deadline=60.0), metrics, rates)

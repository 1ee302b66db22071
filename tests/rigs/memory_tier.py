"""A whole lower tier in a dict: what CONTRIBUTING.md, *Add a tier*, asks for. It outlives L2, as a disk does."""

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.finding import Finding, ok
from kvtier.tiers.kinds import TierKind
from kvtier.tiers.tier import BlockRecord, BlockShape, ChainHash, Changes, ConfiguredTier, Direction, Outcome, Tier

# Step 1: the row. In the product it stands in the table itself, `tiers/kinds.py`.
ROW = TierKind("shelf", "shelf", "the shelf", "SHELF", 0.5, module="memory_tier")

Blocks = dict[ChainHash, tuple[BlockRecord, bytes]]
SHELVES: dict[bytes, Blocks] = {}  # by fingerprint: what a disk would keep


# Step 2: the tier. Every method is one of `Tier`.
class ShelfTier(Tier):
    """A `Tier` over a dict. Thread-safe. It also announces what comes and goes."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lock = Lock()  # guards the two above; never held across a copy of a whole batch
        self._counts: Counter[str] = Counter()
        self.change_feed = ShelfChanges(blocks, self._lock)

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        return next((i for i, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [name in self._blocks for name in hashes]

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        results = [self._read(name, buffer) for name, buffer in zip(hashes, into, strict=True)]
        self._counts.update("read_ok" for result in results if isinstance(result, BlockRecord))
        return results

    def _read(self, name: ChainHash, buffer: memoryview) -> BlockRecord | Outcome:
        if (found := self._blocks.get(name)) is None:
            return Outcome.EVICTED
        record, payload = found
        if record.chain_hash != name:
            return Outcome.KEY_MISMATCH
        buffer[:] = payload
        return record if checksum(buffer) == record.checksum else Outcome.CHECKSUM

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        for record, payload in zip(records, payloads, strict=True):
            with self._lock:
                self._blocks.setdefault(record.chain_hash, (record, bytes(payload)))
        return [Outcome.OK] * len(records)

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        with self._lock:
            for name in hashes:
                self._blocks.pop(name, None)

    def reset(self) -> None:
        with self._lock:
            self._blocks.clear()

    def probe(self, direction: Direction) -> bool:
        return True

    def stats(self) -> dict[str, int]:
        return {**self._counts, "evicted": 0, "slots_ready": len(self._blocks)}

    def check(self) -> None:
        assert all(name == record.chain_hash for name, (record, _) in self._blocks.items())

    def close(self) -> None:
        """There is nothing to close: what it holds stays."""


# Step 3, if its blocks are to be announced in KV events: the protocol `ChangeFeed`.
class ShelfChanges:
    """What one reader has not learned yet: the difference between what it knows and what is held."""

    def __init__(self, blocks: Blocks, lock: Lock) -> None:
        self._blocks = blocks
        self._lock = lock
        self._known: dict[ChainHash, None] | None = None

    def listen(self) -> None:
        self._known = {}

    @property
    def waiting(self) -> bool:
        return self._known is not None and self._known.keys() != self._blocks.keys()

    def take(self, limit: int) -> Changes:
        if self._known is None:
            return Changes([], [])
        with self._lock:
            gone = [name for name in self._known if name not in self._blocks]
            stored = [record for name, (record, _) in self._blocks.items() if name not in self._known][:limit]
        for name in gone:
            del self._known[name]
        self._known.update((record.chain_hash, None) for record in stored)
        return Changes(gone, stored)

    def stop_listening(self) -> list[ChainHash]:
        known, self._known = self._known, None
        return list(known or ())


# Step 4: what makes this module a `TierModule`.
def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """It has no section of the configuration, so it is always on."""
    return ConfiguredTier(lambda: ShelfTier(SHELVES.setdefault(fingerprint, {})), deadline=2.0)


def checked(config: Config) -> str | None:
    """Nothing can be wrong with it."""
    return f"{ROW.name}: always on"


def answers(config: Config) -> list[Finding]:
    return []


def examine(config: Config) -> list[Finding]:
    return [ok(ROW.name, f"{sum(map(len, SHELVES.values()))} blocks on it")]

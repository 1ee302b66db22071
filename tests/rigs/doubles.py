"""Doubles and builders the stories share: a clock, a lower tier in memory, blocks whose bytes derive from keys."""

import hashlib
import time
from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Any

import numpy as np

from kvtier.tiers.checksum import checksum
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, LoadPolicy, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.pool.pool import Reservation
from kvtier.tiers.tier import BlockRecord, ChainHash, Direction, Lineage, Outcome, Tier

BLOCK_SIZE = 4
SLOT_BYTES = 4096


class FakeClock:
    """Time that moves when the test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def chain_over(
    tokens: Sequence[int],
    salt: str | None = None,
    fingerprint: bytes = b"f" * 32,
    block_size: int = BLOCK_SIZE,
    **naming: Any,
) -> TokenChain:
    """The chain of a prompt, as a model's engine names it for a tenant."""
    chain = TokenChain(root_hash(fingerprint, cache_salt=salt), block_size, **naming)
    chain.extend(tokens)
    return chain


def chain_of(num_blocks: int, first_token: int = 0, salt: str | None = None, **naming: Any) -> TokenChain:
    """A chain of `num_blocks` blocks of consecutive token ids."""
    return chain_over(range(first_token, first_token + num_blocks * BLOCK_SIZE), salt, **naming)


def payload_of(chain_hash: ChainHash, num_bytes: int = SLOT_BYTES) -> bytes:
    """The bytes of a block, derived from its key: any mix-up shows."""
    return hashlib.shake_128(chain_hash).digest(num_bytes)


def records_of(chain: TokenChain, first: int = 0, last: int | None = None) -> tuple[BlockRecord, ...]:
    """The records of a chain's blocks, for whoever reads no bytes of them."""
    blocks = range(len(chain.hashes))[first:last]
    return tuple(BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in blocks)


def record_of(chain: TokenChain, i: int) -> BlockRecord:
    chain_hash = chain.hashes[i]
    return BlockRecord(chain_hash, chain.parent(i), chain.block_tokens(i), checksum(memoryview(payload_of(chain_hash))))


class MemoryTier(Tier):
    """A lower tier in a dict, whose every read and write can be counted, held back, failed or corrupted by the test."""

    name = "file"

    def __init__(self) -> None:
        self.blocks: dict[ChainHash, tuple[BlockRecord, bytes]] = {}
        self.reads: list[ChainHash] = []
        self.writes: list[ChainHash] = []
        self.gate = Event()  # reads and writes wait here
        self.gate.set()
        self.read_fails: dict[ChainHash, Outcome] = {}
        self.write_fails: dict[ChainHash, Outcome] = {}
        self.broken = False  # every operation is an I/O error, probes too
        self.closed = False
        self._lock = Lock()

    def fill(self, chain: TokenChain, *positions: int) -> None:
        for i in positions or range(len(chain.hashes)):
            record = record_of(chain, i)
            self.blocks[record.chain_hash] = (record, payload_of(record.chain_hash))

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [h in self.blocks for h in hashes]

    def lineage(self) -> Lineage:
        records = [record for record, _ in self.blocks.values()]
        columns = [record.chain_hash for record in records], [record.parent for record in records]
        return Lineage(*(np.frombuffer(b"".join(each), np.uint64).reshape(-1, 4) for each in columns))

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        self.gate.wait(30)
        with self._lock:
            self.reads += hashes
        return [self._read(h, buffer) for h, buffer in zip(hashes, into, strict=True)]

    def _read(self, chain_hash: ChainHash, buffer: memoryview) -> BlockRecord | Outcome:
        if self.broken:
            return Outcome.IO_ERROR
        if chain_hash in self.read_fails:
            return self.read_fails[chain_hash]
        if chain_hash not in self.blocks:
            return Outcome.EVICTED
        record, data = self.blocks[chain_hash]
        buffer[:] = data
        return record if checksum(buffer) == record.checksum else Outcome.CHECKSUM

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        self.gate.wait(30)
        outcomes = []
        for record, payload in zip(records, payloads, strict=True):
            outcome = Outcome.IO_ERROR if self.broken else self.write_fails.get(record.chain_hash, Outcome.OK)
            with self._lock:
                self.writes.append(record.chain_hash)
                if outcome is Outcome.OK:
                    self.blocks[record.chain_hash] = (record, bytes(payload))
            outcomes.append(outcome)
        return outcomes

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        for chain_hash in hashes:
            self.blocks.pop(chain_hash, None)

    def reset(self) -> None:
        self.blocks.clear()

    def probe(self, direction: Direction) -> bool:
        return not self.broken

    def stats(self) -> dict[str, int]:
        return {"slots_ready": len(self.blocks), "evicted": 0}

    def check(self) -> None:
        for chain_hash, (record, data) in self.blocks.items():
            assert record.chain_hash == chain_hash
            assert data == payload_of(chain_hash, len(data)), "a block's bytes are not those of its key"

    def close(self) -> None:
        self.closed = True


def hierarchy_of(
    slots: int = 8,
    tier: MemoryTier | None = None,
    settings: HierarchySettings | None = None,
    clock: Callable[[], float] = time.monotonic,
    load_policy: LoadPolicy = "load",
    port_settings: PortSettings | None = None,
    verify: bool = False,
) -> Hierarchy:
    """A hierarchy of `slots` L2 slots over at most one lower tier."""
    metrics, rates = Metrics(), Rates(load_policy)
    region = HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False)
    host = HostTier(region, verify=verify)
    ports = []
    if tier is not None:
        settings_of_port = port_settings or PortSettings(deadline=60.0, failures=2, retry_after=1.0, num_threads=1)
        ports = [TierPort("file", lambda: tier, settings_of_port, metrics, rates, clock)]
    return Hierarchy(host, ports, settings or HierarchySettings(prefetch_deadline=60.0), metrics, rates, clock)


def fill_slots(hierarchy: Hierarchy, slots: Sequence[int], hashes: Sequence[ChainHash]) -> None:
    """What a worker's d2h copies do."""
    for slot, chain_hash in zip(slots, hashes, strict=True):
        hierarchy.host.region.slot(int(slot))[:] = payload_of(chain_hash)


def store(hierarchy: Hierarchy, chain: TokenChain, first: int = 0, last: int | None = None) -> int:
    """Reserve, fill and seal the blocks `first:last` of a chain; returns how many were taken. Waits for the sealing."""
    taken = hand_in(hierarchy, chain, first, last)
    assert hierarchy.stores.sealing_queue.drain(60)
    return taken


def reserve(hierarchy: Hierarchy, hashes: Sequence[ChainHash], parent: ChainHash) -> Reservation | None:
    """Slots for consecutive blocks, as a step of one request reserves them."""
    (reservation,) = hierarchy.reserve([Wanted(hashes, parent, parent)])
    return reservation


def hand_in(hierarchy: Hierarchy, chain: TokenChain, first: int = 0, last: int | None = None) -> int:
    """As `store`, but the sealing goes on in the background."""
    hashes = chain.hashes[first:last]
    reservation = reserve(hierarchy, hashes, chain.parent(first))
    if reservation is None:
        return 0
    fill_slots(hierarchy, reservation.slots, reservation.hashes)
    records = [
        BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0)
        for i in (first + index for index in reservation.indices)
    ]
    hierarchy.seal(reservation, records, hierarchy.epoch)
    return len(records)


def bytes_in_l2(hierarchy: Hierarchy, chain_hash: ChainHash) -> bytes | None:
    with hierarchy.host.pool.lease([chain_hash]) as lease:
        return bytes(hierarchy.host.region.slot(lease.slots[0])) if len(lease) else None


def wait_until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Poll until the condition holds; fails the test when `timeout` seconds pass first."""
    deadline, pause = time.monotonic() + timeout, 0.002
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(pause := min(0.02, 1.2 * pause))

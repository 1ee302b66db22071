"""Pages between an engine's memory and the tiers: every batch fits, nothing hangs, what is loaded was stored."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from at_once import at_once
from doubles import SLOT_BYTES, chain_of, payload_of
from fault_rig import FaultyIO, Settled, drops, forget_l2, misses, over_slab
from numpy.typing import NDArray

from kvtier.connector.sglang import page_store
from kvtier.connector.sglang.page_store import PageStore
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import PortSettings
from kvtier.tiers.tier import ChainHash, Outcome

NUM_PAGES = 64
ROOT = b"r" * 32


class Engine:
    """An engine's pool of pages, and the store over it."""

    def __init__(self, hierarchy: Hierarchy, load_deadline: float = 20.0) -> None:
        self.memory = torch.zeros(NUM_PAGES, SLOT_BYTES, dtype=torch.uint8)
        self.hierarchy = hierarchy
        blocks = EngineBlocks([BlockPart(self.memory, 0, 0)], SLOT_BYTES)
        cache = CacheConfig(prefetch_deadline=load_deadline, write_policy=hierarchy.settings.write_policy)
        self.store = PageStore(hierarchy, blocks, ROOT, cache)

    def compute(self, names: Sequence[ChainHash]) -> NDArray[np.int64]:
        """Pages with the bytes that belong to the names, in any order."""
        pages = np.random.default_rng(1).permutation(NUM_PAGES)[: len(names)]
        for name, page in zip(names, pages.tolist(), strict=True):
            self.memory[page] = torch.frombuffer(bytearray(payload_of(name)), dtype=torch.uint8)
        return pages

    def holds(self, names: Sequence[ChainHash], pages: NDArray[np.int64]) -> bool:
        """Whether the pages hold what belongs to the names (I1)."""
        return all(
            bytes(self.memory[page].numpy()) == payload_of(name)
            for name, page in zip(names, pages.tolist(), strict=True)
        )

    def load(self, names: Sequence[ChainHash], parent: ChainHash | None = None) -> int:
        """Load into pages full of rubbish; whatever is said to be loaded must be right."""
        self.memory.fill_(0xEE)
        pages = np.arange(len(names), dtype=np.int64)[::-1].copy()
        count = self.store.load(names, pages, parent)
        assert self.holds(names[:count], pages[:count])
        return count


Open = Callable[..., Engine]


@pytest.fixture
def open_engine(disk_dir: Path, settled: Settled, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(page_store, "_STORE_WAIT", 60.0)

    def open_(io: FaultyIO | None = None, *, slots: int = 32, load_deadline: float = 60.0) -> Engine:
        patience = PortSettings(deadline=60.0, failures=3, retry_after=0.05)
        return Engine(settled(over_slab(disk_dir, io, slots=slots, patience=patience)), load_deadline)

    return open_


def test_a_batch_larger_than_l2_passes_through_it_both_ways(open_engine: Open) -> None:
    engine = open_engine(slots=8)
    names = chain_of(48).hashes
    assert engine.store.held(names) == 0
    pages = engine.compute(names)
    assert engine.store.store(names, pages) == [True] * 48
    engine.memory.zero_()  # the engine's again as soon as the call has returned
    assert engine.hierarchy.drain(60)
    assert engine.store.held(names) == 48
    assert engine.load(names) == 48
    # Nothing was dropped on the way down: six times L2, and a quarter of it is what may wait.
    assert not [name for name in engine.hierarchy.stats() if "dropped" in name]


def test_a_page_of_more_records_than_l2_has_slots_passes_through_it(open_engine: Open) -> None:
    """A recurrent state is many times a page: all of its records or none count."""
    engine = open_engine(slots=8)
    pieces = 20
    memory = torch.randint(0, 256, (6, pieces, SLOT_BYTES), dtype=torch.uint8)
    parts = [BlockPart(memory[:, piece], piece, 0, group=piece, record=piece) for piece in range(pieces)]
    blocks, cache = EngineBlocks(parts, SLOT_BYTES), CacheConfig(prefetch_deadline=60.0)
    states = PageStore(engine.hierarchy, blocks, ROOT, cache, "states")
    names = chain_of(6).hashes
    for i in (1, 2, 4):
        assert states.store(names[i : i + 1], np.array([i])) == [True]
    assert engine.hierarchy.drain(60)
    assert engine.store.held(names) == 0  # they are no pages
    assert list(states.held_ends(names, 1)) == [5, 3, 2]
    assert list(states.held_ends(names, 2)) == [3]
    kept = memory.clone()
    memory.fill_(0xEE)
    assert states.load(names[1:4], np.array([3, 0, 5])) == 2
    assert torch.equal(memory[[3, 0]], kept[[1, 2]])
    assert (memory[[1, 2, 4]] == 0xEE).all()


def test_stored_blocks_are_not_copied_again(open_engine: Open) -> None:
    engine = open_engine()
    names = chain_of(12).hashes
    engine.store.store(names[:8], engine.compute(names[:8]))
    assert engine.store.store(names, engine.compute(names)) == [True] * 12
    assert engine.hierarchy.drain(60)
    assert engine.hierarchy.stats()['kvtier_store_blocks_total{tier="l2"}'] == 12
    assert engine.load(names) == 12


def test_leading_pages_are_found_and_the_first_hole_ends_the_run(open_engine: Open) -> None:
    engine = open_engine()
    names = chain_of(12).hashes
    engine.store.store(names[:5], engine.compute(names[:5]))
    engine.store.store(names[6:], engine.compute(names[6:]), names[5])
    assert engine.hierarchy.drain(60)
    assert engine.store.held(names) == 5
    assert engine.load(names) == 5
    assert engine.store.held(names[6:]) == 6  # a later part of the chain by itself, as SGLang asks
    assert engine.load(names[6:], names[5]) == 6
    assert engine.load(names[6:]) == 6  # the parent need not be known


def test_a_corrupt_page_ends_the_run_and_is_forgotten(open_engine: Open, disk_dir: Path) -> None:
    engine = open_engine()
    names = chain_of(12).hashes
    engine.store.store(names, engine.compute(names))
    assert engine.hierarchy.drain(60)
    [slab] = disk_dir.glob("*.slab")
    content = bytearray(slab.read_bytes())
    at = content.index(payload_of(names[7]))
    content[at] ^= 1
    slab.write_bytes(content)
    forget_l2(engine.hierarchy)
    assert engine.load(names) == 7
    assert engine.hierarchy.stats()['kvtier_corruption_total{tier="file"}'] == 1
    assert engine.store.held(names) == 7  # computed again, it will be stored again
    assert engine.store.store(names[7:8], engine.compute(names[7:8])) == [True]
    assert engine.hierarchy.drain(60)
    assert engine.load(names) == 12


def test_a_hung_disk_delays_neither_loads_nor_stores_past_their_deadlines(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FaultyIO()
    engine = open_engine(io, slots=8, load_deadline=0.3)
    names = chain_of(24).hashes
    engine.store.store(names, engine.compute(names))
    assert engine.hierarchy.drain(60)
    monkeypatch.setattr(page_store, "_STORE_WAIT", 0.5)
    io.gate.clear()
    started = time.monotonic()
    assert engine.load(names[:12]) <= 12
    others = chain_of(48, first_token=1000).hashes
    engine.store.store(others, engine.compute(others))
    assert time.monotonic() - started < 30  # the gate would have held it for sixty
    io.gate.set()


def test_stores_without_room_are_dropped_and_counted(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(slots=8)
    names, others = chain_of(8).hashes, chain_of(8, first_token=1000).hashes
    engine.store.store(names, engine.compute(names))
    assert engine.hierarchy.drain(60)
    monkeypatch.setattr(page_store, "_STORE_WAIT", 0.2)
    with engine.hierarchy.host.pool.lease(names):  # somebody reads all of L2
        assert engine.store.store(others, engine.compute(others)) == [False] * 8
    assert drops(engine.hierarchy, "l2", Outcome.NO_SLOT) == 2  # the first batch, a quarter of L2 …
    assert drops(engine.hierarchy, "l2", Outcome.PARENT_FAILED) == 6  # … and what nobody would find behind it
    assert engine.store.store(others, engine.compute(others)) == [True] * 8


def test_a_page_outside_the_pool_fails_as_a_copy(open_engine: Open) -> None:
    engine = open_engine()
    names = chain_of(2).hashes
    assert engine.store.store(names, np.array([0, NUM_PAGES])) == [False, False]
    assert drops(engine.hierarchy, "l2", Outcome.COPY_FAILED) == 2
    engine.store.store(names, engine.compute(names))
    assert engine.hierarchy.drain(60)
    assert engine.store.load(names, np.array([0, NUM_PAGES])) == 0
    assert misses(engine.hierarchy, Outcome.COPY_FAILED) == 2


def test_reset_forgets_also_what_is_being_stored(open_engine: Open) -> None:
    engine = open_engine()
    names = chain_of(12).hashes
    engine.store.store(names, engine.compute(names))
    engine.hierarchy.reset()
    assert engine.hierarchy.drain(60)
    assert engine.store.held(names) == 0
    assert engine.load(names) == 0


def test_the_engines_threads_ask_load_and_store_at_once(open_engine: Open) -> None:
    engine = open_engine(slots=16)
    chains = [chain_of(16, first_token=1000 * i).hashes for i in range(6)]
    wrong: list[str] = []
    stop = time.monotonic() + 2.0

    def store() -> None:
        # pages 0…31 are this thread's, the others are loaded into
        i = 0
        while time.monotonic() < stop:
            names = chains[i % len(chains)]
            for page, name in enumerate(names):
                engine.memory[page] = torch.frombuffer(bytearray(payload_of(name)), dtype=torch.uint8)
            engine.store.store(names, np.arange(16))
            i += 1

    def load() -> None:
        pages = np.arange(32, 48)
        i = 0
        while time.monotonic() < stop:
            names = chains[(i := i + 1) % len(chains)]
            if (count := engine.store.load(names, pages)) and not engine.holds(names[:count], pages[:count]):
                wrong.append(f"{count} pages")

    def ask() -> None:
        while time.monotonic() < stop:
            for names in chains:
                engine.store.held(names)

    at_once(store, load, ask)
    assert not wrong
    assert engine.hierarchy.stats()['kvtier_bytes_total{tier="l2",direction="load"}'] > 0

"""The slab evicts what is needed least, as requests' ends tell; where they tell nothing, what is oldest."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doubles import FakeClock, chain_of
from fault_rig import over_slab, settle
from numpy.typing import NDArray
from slab_rig import SLOT, hash_of, put

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.reuse import ClassifiedEnd, RequestEnd
from kvtier.tiers.tier import ChainHash

PER = 7  # blocks of an extent, and of each chain here
TALKS, SCANS = 4, 40  # chains; the slab has eight extents
LONG, SHORT = 300, 10  # tokens of an answer: talks have long ones, and go on


class Requests:
    """What a pool learned of two kinds of requests: those of long answers return after 20 s, the others never."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._pool = SlotPool(8, policy="predicted", clock=self.clock)
        for number in range(160):
            self.clock.advance(5.0)
            self._told(chain_of(4, first_token=100 * number).hashes, LONG)
            self._told(chain_of(4, first_token=100 * number + 50).hashes, SHORT)
            if number >= 4:
                self._told(chain_of(8, first_token=100 * number - 400).hashes, LONG)

    def end(self, keys: range, tokens: int) -> ClassifiedEnd:
        """A request of these blocks ends now."""
        return self._told([hash_of(key) for key in keys], tokens)

    def _told(self, names: list[ChainHash], tokens: int) -> ClassifiedEnd:
        told = self._pool.ended(RequestEnd(names, len(names), tokens))
        assert told is not None
        return told


@pytest.fixture(scope="module")
def learned() -> Requests:
    return Requests()


@pytest.fixture
def slab(disk_dir: Path) -> Iterator[FileStore]:
    store = open_slab(disk_dir)
    yield store
    store.check()
    store.close()


def open_slab(directory: Path) -> FileStore:
    store = FileStore.open(directory, bytes(32), slot_bytes=SLOT, block_size=4, size=60 * 4400, mode="buffered")
    blocks = store._blocks
    assert (blocks.per_extent, blocks.num_extents) == (PER, 8)
    return store


def chain(number: int) -> range:
    """The keys of a chain that fills an extent."""
    return range(100 * number, 100 * number + PER)


def held(store: FileStore, numbers: range) -> list[int]:
    """Which of these chains are held whole."""
    return [number for number in numbers if store.lookup([hash_of(key) for key in chain(number)]) == PER]


def scan(store: FileStore, requests: Requests, numbers: range, *, tells: bool = True) -> None:
    """Long prompts that nobody asks for again."""
    for number in numbers:
        requests.clock.advance(0.5)
        put(store, chain(number))
        if tells:
            store.ended(requests.end(chain(number), SHORT))


def test_conversations_that_go_on_survive_scans(slab: FileStore, learned: Requests) -> None:
    talks, scans = range(TALKS), range(TALKS, TALKS + SCANS)
    for number in talks:
        put(slab, chain(number))
        slab.ended(learned.end(chain(number), LONG))
    scan(slab, learned, scans)  # ten times what the slab has room for beside them
    assert held(slab, talks) == [0, 1, 2, 3]
    assert slab.stats()["evicted"] == (SCANS - 4) * PER
    # They did not come back within the minutes in which such conversations do: now they go.
    learned.clock.advance(3000.0)
    scan(slab, learned, range(100, 108))
    assert held(slab, talks) == []


def test_an_end_that_is_told_before_its_blocks_are_written_counts(slab: FileStore, learned: Requests) -> None:
    for number in range(TALKS):
        slab.ended(learned.end(chain(number), LONG))  # the store queue is behind
        put(slab, chain(number))
    scan(slab, learned, range(TALKS, TALKS + SCANS))
    assert held(slab, range(TALKS)) == [0, 1, 2, 3]


def test_without_ends_and_after_a_restart_the_oldest_goes_first(disk_dir: Path, learned: Requests) -> None:
    slab = open_slab(disk_dir)
    for number in range(8):
        put(slab, chain(number))
    scan(slab, learned, range(8, 10), tells=False)
    assert held(slab, range(10)) == [2, 3, 4, 5, 6, 7, 8, 9]
    slab.ended(learned.end(chain(2), LONG))
    slab.close()
    again = open_slab(disk_dir)  # it knows nothing of the end
    scan(again, learned, range(10, 11), tells=False)
    assert held(again, range(11)) == [3, 4, 5, 6, 7, 8, 9, 10]
    again.ended(learned.end(chain(3), LONG))  # one is told of, the others are as old as the start
    scan(again, learned, range(11, 13), tells=False)
    assert held(again, range(13)) == [3, 6, 7, 8, 9, 10, 11, 12]
    again.reset()
    again.check()
    assert not again._blocks.room.decides
    again.close()


def test_a_chain_goes_from_its_end_and_a_beginning_stays_whose_others_need_more(
    slab: FileStore, learned: Requests
) -> None:
    two_extents = range(900, 900 + 2 * PER)
    put(slab, two_extents)
    slab.ended(learned.end(two_extents, SHORT))
    for number in range(10, 17):  # six are free: one of the two makes room
        put(slab, chain(number))
        slab.ended(learned.end(chain(number), SHORT))
    assert slab.lookup([hash_of(key) for key in two_extents]) == PER
    put(slab, chain(0))
    slab.ended(learned.end(chain(0), LONG))
    slab.ended(learned.end(chain(0)[:3], SHORT))  # another question needs less than half of the conversation's blocks
    scan(slab, learned, range(20, 60))
    assert held(slab, range(1)) == [0]


class KeepsOneClass:
    """An order in which one class outlives all others."""

    KEPT = 3

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.where(kinds == self.KEPT, 1, 0)

    def ahead(self, kind: int) -> float:
        return 0.0


def test_a_beginning_that_requests_share_goes_by_its_own_class(slab: FileStore, learned: Requests) -> None:
    two_extents, order = range(90_000, 90_000 + 2 * PER), KeepsOneClass()

    def end(keys: range, num_head: int) -> ClassifiedEnd:
        told = learned.end(keys, SHORT)
        return told._replace(order=order, kind=0, num_head=num_head, head_kind=order.KEPT)

    put(slab, two_extents)
    slab.ended(end(two_extents, PER))
    for number in range(TALKS, TALKS + SCANS):
        put(slab, chain(number))
        slab.ended(end(chain(number), 0))
    assert slab.lookup([hash_of(key) for key in two_extents]) == PER


def test_while_the_order_by_age_would_keep_more_it_holds(slab: FileStore, learned: Requests) -> None:
    for number in range(TALKS):
        put(slab, chain(number))
        slab.ended(learned.end(chain(number), LONG))
    slab._blocks.room.rival.leads = True
    scan(slab, learned, range(TALKS, TALKS + 6), tells=False)
    assert held(slab, range(TALKS)) == [2, 3]


def test_the_hierarchy_passes_ends_on_to_its_slab(disk_dir: Path) -> None:
    hierarchy = over_slab(disk_dir, slots=32)
    names = chain_of(4).hashes
    hierarchy.ended(RequestEnd(names, 4, LONG))
    tier = hierarchy.ports[0].tier
    assert isinstance(tier, FileStore)
    hears = tier._blocks.room.decides
    assert hears == (hierarchy.host.pool.return_gaps() is not None)  # a pool that learns, or one that does not
    settle(hierarchy)

"""Stories of one sealing job for many stores: each has its own outcome, a drain waits for all, and a close ends all."""

from collections.abc import Iterator
from threading import Event

import pytest
from doubles import chain_of, hand_in, hierarchy_of, payload_of, record_of, reserve
from fault_rig import Settled

from kvtier.tiers.checksum import checksum
from kvtier.tiers.hierarchy import stores
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.tier import Outcome


class Hashing:
    """The sealing thread stops before it hashes, until it may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = Event(), Event()
        patch.setattr(stores, "_SEALED_NOW", -1)  # else who stores a few bytes hashes them
        patch.setattr(HostRegion, "checksums", lambda region, slots: [*map(self._wait, map(region.slot, slots))])

    def _wait(self, payload: memoryview) -> int:
        self.begun.set()
        assert self.may_go_on.wait(60)
        return checksum(payload)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    hashing = Hashing(monkeypatch)
    yield hashing
    hashing.may_go_on.set()


def dropped(hierarchy: Hierarchy, reason: Outcome) -> float:
    return sum(
        count
        for name, count in hierarchy.stats().items()
        if "drop" in name and f'"{reason.value}"' in name and '"l2"' in name
    )


def test_what_was_sealed_cannot_be_abandoned(settled: Settled, hashing: Hashing) -> None:
    hierarchy, chain = settled(hierarchy_of(slots=4)), chain_of(2)
    reservation = reserve(hierarchy, chain.hashes, chain.root)
    assert reservation is not None
    for slot, name in zip(reservation.slots, reservation.hashes, strict=True):
        hierarchy.host.region.slot(slot)[:] = payload_of(name)
    hierarchy.seal(reservation, [record_of(chain, i) for i in range(2)], hierarchy.epoch)
    assert hashing.begun.wait(60)
    with pytest.raises(ValueError, match="sealed"):
        hierarchy.abandon(reservation, Outcome.ABORTED)
    hashing.may_go_on.set()
    assert hierarchy.drain(60)
    assert hierarchy.holds(chain.hashes) == [True, True]


def test_a_store_that_cannot_be_hashed_fails_alone(settled: Settled, hashing: Hashing) -> None:
    hierarchy = settled(hierarchy_of(slots=8))
    chains = [chain_of(1, first_token=100 * n) for n in range(4)]
    hand_in(hierarchy, chains[0])
    assert hashing.begun.wait(60)
    for chain in chains[1:]:  # one job for all of these
        if chain is chains[2]:
            reservation = reserve(hierarchy, chain.hashes, chain.root)
            assert reservation is not None
            hierarchy.seal(reservation, [record_of(chain, 0)] * 2, hierarchy.epoch)
        else:
            hand_in(hierarchy, chain)
    hashing.may_go_on.set()
    assert hierarchy.drain(60)
    assert [hierarchy.holds(chain.hashes)[0] for chain in chains] == [True, True, False, True]
    assert dropped(hierarchy, Outcome.IO_ERROR) == 1


def test_of_a_step_the_record_that_fits_no_block_fails_alone(settled: Settled) -> None:
    """FAULTS: what is wrong with one store is no other request's."""
    hierarchy = settled(hierarchy_of(slots=64))
    chains = [chain_of(1, first_token=100 * n) for n in range(32)]
    made = hierarchy.reserve([Wanted(chain.hashes, chain.root, chain.root) for chain in chains])
    filled = []
    for n, (chain, reservation) in enumerate(zip(chains, made, strict=True)):
        assert reservation is not None
        tokens = chain.block_tokens(0)
        if n == 7:
            tokens *= 100_000  # more than any block has
        if n == 9:
            reservation.hashes = [b"x" * 32]  # and a slot that was taken for another block
        filled.append((reservation, [tokens], hierarchy.epoch))
    hierarchy.seal_each(filled)
    assert hierarchy.drain(60)
    assert [hierarchy.holds(chain.hashes)[0] for chain in chains] == [n not in (7, 9) for n in range(32)]
    assert dropped(hierarchy, Outcome.IO_ERROR) == 2
    assert not hierarchy.stores.unsealed
    assert hierarchy.host.pool.counts().filling == 0


def test_a_record_that_names_another_block_is_not_published(settled: Settled) -> None:
    hierarchy = settled(hierarchy_of(slots=8))
    chain, other = chain_of(1), chain_of(1, first_token=100)
    reservation = reserve(hierarchy, chain.hashes, chain.root)
    assert reservation is not None
    hierarchy.seal(reservation, [record_of(other, 0)], hierarchy.epoch)
    assert hierarchy.drain(60)
    assert hierarchy.holds([*chain.hashes, *other.hashes]) == [False, False]
    assert dropped(hierarchy, Outcome.IO_ERROR) == 1


def test_a_large_step_is_sealed_in_parts(settled: Settled, hashing: Hashing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "AT_ONCE", 4)
    hierarchy = settled(hierarchy_of(slots=64))
    chains = [chain_of(1 + n % 3, first_token=100 * n) for n in range(13)]
    made = hierarchy.reserve([Wanted(chain.hashes, chain.root, chain.root) for chain in chains])
    filled = []
    for chain, reservation in zip(chains, made, strict=True):
        assert reservation is not None
        filled.append((reservation, [chain.block_tokens(i) for i in range(len(chain.hashes))], hierarchy.epoch))
    hierarchy.seal_each(filled)
    assert hashing.begun.wait(60)
    parts = {id(part): part for part in hierarchy.stores.unsealed.values()}.values()
    assert all(len(part.names) <= 4 for part in parts)
    assert sum(len(part.names) for part in parts) == sum(len(chain.hashes) for chain in chains)
    hashing.may_go_on.set()
    assert hierarchy.drain(60)
    assert all(all(hierarchy.holds(chain.hashes)) for chain in chains)


def test_what_is_too_much_to_wait_is_given_back(
    settled: Settled, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_MAX_SEALING", 3)
    hierarchy = settled(hierarchy_of(slots=16))
    chains = [chain_of(1, first_token=100 * n) for n in range(8)]
    hand_in(hierarchy, chains[0])
    assert hashing.begun.wait(60)  # it waits no more
    made = hierarchy.reserve([Wanted(chain.hashes, chain.root, chain.root) for chain in chains[1:]])
    hierarchy.seal_each([(each, [b"\0" * 16], hierarchy.epoch) for each in made if each is not None])
    assert dropped(hierarchy, Outcome.QUEUE_FULL) == 4
    hashing.may_go_on.set()
    assert hierarchy.drain(60)
    assert [hierarchy.holds(chain.hashes)[0] for chain in chains] == [True] * 4 + [False] * 4


def test_a_close_ends_however_many_stores_wait(
    settled: Settled, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "AT_ONCE", 1)  # as many jobs as stores: more than Python has frames
    chains = [chain_of(1, first_token=100 * n) for n in range(1200)]
    hierarchy = settled(hierarchy_of(slots=len(chains)))
    hand_in(hierarchy, chains[0])
    assert hashing.begun.wait(60)
    for chain in chains[1:]:
        reservation = reserve(hierarchy, chain.hashes, chain.root)
        assert reservation is not None
        hierarchy.seal(reservation, [record_of(chain, 0)], hierarchy.epoch)
    last = hierarchy.stores.sealing(chains[-1].hashes[0])
    assert not hierarchy.stores.sealing_queue.close(0.01)  # the first one still hangs in its hashing
    assert last is not None
    assert last.done
    assert dropped(hierarchy, Outcome.CLOSED) == len(chains) - 1
    hashing.may_go_on.set()
    assert hierarchy.stores.sealing_queue.close(60)
    assert not hierarchy.stores.unsealed


def test_a_few_bytes_are_published_by_the_storing_thread(settled: Settled, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = settled(hierarchy_of(slots=8))
    monkeypatch.setattr(hierarchy.stores.sealing_queue, "submit", lambda job, *, urgent=False: False)
    chain = chain_of(2)
    hand_in(hierarchy, chain)
    assert hierarchy.holds(chain.hashes) == [True, True]
    assert not hierarchy.stores.unsealed


def test_a_few_bytes_wait_for_stores_being_hashed(
    settled: Settled, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy = settled(hierarchy_of(slots=8))
    first, second = chain_of(1), chain_of(1, first_token=100)
    hand_in(hierarchy, first)
    assert hashing.begun.wait(60)
    monkeypatch.setattr(stores, "_SEALED_NOW", 1 << 20)
    hand_in(hierarchy, second)
    assert hierarchy.holds([*first.hashes, *second.hashes]) == [False, False]
    hashing.may_go_on.set()
    assert hierarchy.drain(60)
    assert hierarchy.holds([*first.hashes, *second.hashes]) == [True, True]


def test_a_few_bytes_that_cannot_be_published_are_given_back(settled: Settled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stores them gets no exception."""
    hierarchy = settled(hierarchy_of(slots=8))

    def fail(reservations: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(hierarchy.host.pool, "seal_each", fail)
        hand_in(hierarchy, chain_of(2))
    assert dropped(hierarchy, Outcome.IO_ERROR) == 2
    assert hierarchy.host.pool.counts().filling == 0

"""Places kept of the last long questions: always those that looking names up gives, whatever happened meanwhile."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiers import ChainHash
from kvtier.tiers.pool import SlotPool, Slots, listed

NUM_SLOTS = 400
CHAINS = [[random.Random(f"{chain} {i}").randbytes(32) for i in range(200)] for chain in range(4)]
CHAINS.append(CHAINS[0][:130] + [random.Random(i).randbytes(32) for i in range(70)])  # parts from the first one


@pytest.fixture(autouse=True)
def _python_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled twin is asked for more before anything is kept: test_few_compiled.py holds it to the same places."""
    monkeypatch.setenv("KVTIER_COMPILED", "off")


def store(pool: SlotPool, hashes: list[ChainHash], parent: ChainHash | None = None) -> bool:
    reservation = pool.reserve(hashes, parent)
    if reservation is None:
        return False
    pool.seal(reservation).release()
    return True


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "store", "drop", "reset", "leave"]), st.integers(0, 4), st.integers(0, 200)
        ),
        max_size=40,
    )
)
def test_places_are_those_that_the_index_gives(steps: list[tuple[str, int, int]]) -> None:
    pool = SlotPool(NUM_SLOTS)
    for verb, number, count in steps:
        chain = CHAINS[number]
        if verb == "store":
            store(pool, chain[:count])
        elif verb == "drop":
            pool.evict(chain[count : count + 3])
        elif verb == "leave":
            pool.evict_idle(chain[count:][::-1])
        elif verb == "reset":
            pool.reset()
        asked = chain[:count]
        for _ in range(2):
            places = pool.places(asked)
            expected = listed(pool._table.find_run(asked)) if asked else []
            assert listed(places.slots) == expected
            if not isinstance(places.slots, list):
                assert listed(places.generations) == [pool.generation(slot) for slot in expected]
            with pool.lease(asked[: len(places)], places) as lease:
                assert lease.hashes == asked[: len(places)]
                assert listed(lease.places) == expected
        assert len(pool._places) == sum(len(names) for names, _ in pool._places._kept.values()) <= NUM_SLOTS // 2
    assert pool.check().leased == 0


def test_a_lease_by_place_ends_before_the_first_block_that_left() -> None:
    pool = SlotPool(NUM_SLOTS)
    chain, other = CHAINS[1], CHAINS[2]
    store(pool, chain)
    places = pool.places(chain)
    assert len(places) == 200
    # Forgotten, and the slots taken again by another chain.
    pool.evict(chain[150:])
    with pool.lease(chain, places) as lease:
        assert lease.hashes == chain[:150]
    store(pool, other)
    with pool.lease(chain, places) as lease:
        assert lease.hashes == chain[:150]
    # All of it, and stored anew in other slots or at other generations.
    pool.reset()
    assert len(pool.lease(chain, places)) == 0
    store(pool, other)
    store(pool, chain)
    assert len(pool.lease(chain, places)) == 0
    again = pool.places(chain)
    with pool.lease(chain, again) as lease:
        assert lease.hashes == chain
    assert pool.check().leased == 0


def test_the_next_turn_looks_only_new_names_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlotPool(NUM_SLOTS)
    chain = CHAINS[1]
    store(pool, chain[:140])
    pool.places(chain[:140])  # 128 of them are kept
    asked: list[int] = []
    find_run = pool._table.find_run

    def counting(hashes: Sequence[ChainHash]) -> Slots:
        asked.append(len(hashes))
        return find_run(hashes)

    monkeypatch.setattr(pool._table, "find_run", counting)
    assert len(pool.places(chain)) == 140
    assert asked == [72]
    asked.clear()
    assert len(pool.places(chain[:128])) == 128
    assert asked == []


def test_equal_last_names_are_not_enough() -> None:
    """Names of other engines are no chain of ours: nothing follows from the last one."""
    pool = SlotPool(NUM_SLOTS)
    chain = CHAINS[1][:128]
    store(pool, chain)
    assert len(pool.places(chain)) == 128
    strange = [random.Random("x").randbytes(32), *chain[1:]]
    assert len(pool.places(strange)) == 0
    assert len(pool.places([*CHAINS[3][:64], *chain[64:]])) == 0
    swapped = [*chain[:2][::-1], *chain[2:]]
    places = pool.places(swapped)
    assert listed(places.slots) == listed(pool._table.find_run(swapped))

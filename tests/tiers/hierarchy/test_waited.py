"""Blocks that waiting requests hold: counted once each, by slot or by name, as a plain counter of names would."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy.promotion import Holding, WaitedBlocks

NUM_SLOTS = 64


def name(block: int) -> ChainHash:
    return block.to_bytes(32, "big")


class Plain:
    """The same by names alone."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def room(self, run: list[int], most: int) -> int:
        room = most - len(self.held)
        for i, block in enumerate(run):
            if block not in self.held:
                if room <= 0:
                    return i
                room -= 1
        return len(run)


@given(st.data())
def test_each_block_counts_once_however_it_is_held(data: st.DataObject) -> None:
    waited, plain = WaitedBlocks(NUM_SLOTS), Plain()
    holds: list[tuple[Holding, list[int]]] = []
    num_in_l2 = 0  # leading blocks of the chain; block i lies in slot i
    for _ in range(data.draw(st.integers(1, 12))):
        lets_go: bool = data.draw(st.booleans())
        if holds and lets_go:
            held, run = holds.pop(data.draw(st.integers(0, len(holds) - 1)))
            waited.drop(held)
            plain.held.subtract(run)
            plain.held += Counter()  # without the zeros
        else:
            first = data.draw(st.integers(0, NUM_SLOTS - 1))
            run = list(range(first, data.draw(st.integers(first + 1, NUM_SLOTS))))
            num_in_l2 = data.draw(st.integers(num_in_l2, NUM_SLOTS))  # what is read meanwhile comes there
            num_held = min(max(0, num_in_l2 - first), len(run))
            slots = run[:num_held]
            names, most = [name(block) for block in run], data.draw(st.integers(0, NUM_SLOTS))
            assert waited.room(names, slots, most) == plain.room(run, most)
            holds.append((waited.hold(names, slots), run))
            plain.held.update(run)
        waited.check()
        if data.draw(st.booleans()):  # else what came is counted one by one when there may be too little room
            assert len(waited) == len(plain.held)
    for held, _ in holds:
        waited.drop(held)
    waited.check()
    assert len(waited) == 0


def test_a_block_behind_one_that_is_not_in_l2_may_count_twice_but_never_less() -> None:
    waited = WaitedBlocks(NUM_SLOTS)
    by_slot = waited.hold([name(1), name(2)], [1, 2])
    by_name = waited.hold([name(0), name(1)], [])  # the first is not in L2, so no place is known of the second
    assert 3 <= len(waited) <= 4
    waited.drop(by_slot)
    assert len(waited) == 2
    waited.drop(by_name)
    waited.check()
    assert len(waited) == 0

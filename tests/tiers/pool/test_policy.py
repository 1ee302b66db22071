"""Eviction policies by themselves: who goes next, and how the order survives removals, returns and compactions."""

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.pool.core import FIRST, LRU, S3FIFO, Index, Learned, SlotLists
from kvtier.tiers.pool.policy import make_core


class Order:
    """An order over slots, interpreted; the name of block b is b."""

    def __init__(self, kind: Any, num_slots: int) -> None:
        self.lists: Any = SlotLists(num_slots)
        self.index = Index(num_slots)
        self.order: Any = kind(self.lists) if kind is LRU else kind(self.lists, self.index)
        self.named = set[int]()

    def put(self, slot: int, block: int) -> None:
        """A block is stored in a slot, and not used since."""
        if slot in self.named:
            self.index.remove(slot)
        self.named.add(slot)
        assert self.index.put(block.to_bytes(32, "little"), slot)
        self.order.admit(slot)
        self.order.enter(slot)

    def use(self, *slots: int) -> None:
        for slot in slots:
            self.order.leave(slot)
        for slot in slots:
            self.order.enter(slot)

    def evict(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count and (slot := self.order.pop()) >= 0:
            self.order.evicted(slot)
            victims.append(slot)
        return victims

    def is_victim(self, *slots: int) -> list[bool]:
        return [rank > -(1 << 62) for rank in self.order.ranks(np.array(slots)).tolist()]


@given(st.lists(st.tuples(st.sampled_from(["append", "push", "remove", "pop"]), st.integers(0, 9))))
def test_a_list_of_slots_is_a_deque(steps: list[tuple[str, int]]) -> None:
    lists, model = SlotLists(10), deque[int]()
    for verb, number in steps:
        if verb == "pop":
            assert lists.pop(FIRST) == (model.popleft() if model else -1)
        elif verb == "remove":
            lists.remove(number)
            if number in model:
                model.remove(number)
        elif number not in model:
            getattr(lists, verb)(FIRST, number)
            (model.append if verb == "append" else model.appendleft)(number)
        lists.check()
    in_list = [slot for slot in range(10) if lists.where[slot] == FIRST]
    assert sorted(in_list, key=lambda slot: lists.stamps[slot]) == list(model)


def test_s3fifo_lets_a_scan_pass_and_keeps_what_is_used() -> None:
    order = Order(S3FIFO, 20)  # small queue: 2 of 20
    for slot in range(20):
        order.put(slot, 100 + slot)
    order.use(0, 1)
    order.use(0, 1)  # twice: worth the main queue
    order.use(2)  # once: not yet
    # Everything used once or never leaves by the small queue, in order, around 0 and 1.
    assert order.evict(16) == list(range(2, 18))
    # What is left is one of each: two in the small queue, two in the main one. At its share, the small queue is spared.
    assert sorted(order.evict(2)) == [0, 1]
    assert order.evict(9) == [18, 19]


def test_s3fifo_remembers_whom_it_sent_away() -> None:
    order = Order(S3FIFO, 20)
    for slot in range(20):
        order.put(slot, 100 + slot)
    assert order.evict(2) == [0, 1]
    order.put(0, 100)  # comes back: into the main queue
    order.put(1, 999)  # a stranger
    assert order.evict(17) == list(range(2, 19))  # the small queue, down to its share of two
    assert order.evict(1) == [0]  # then the main one
    assert order.evict(2) == [19, 1]


def test_s3fifo_forgets_old_ghosts() -> None:
    order = Order(S3FIFO, 10)
    for block in range(30):  # one slot, one block after the other: each is sent away
        order.put(0, 1000 + block)
        assert order.evict(1) == [0]
    for slot in range(1, 10):
        order.put(slot, slot)
    order.put(0, 1000)  # 30 evictions ago, of 10 remembered: a stranger, so in the small queue
    assert order.evict(9) == list(range(1, 10))
    order.put(1, 1)  # evicted a moment ago
    order.put(2, 2000)
    assert order.evict(1) == [0]  # the small queue is above its share of one
    assert order.evict(1) == [1]
    order.lists.reset()
    order.order.reset()
    assert order.evict(1) == []


def test_s3fifo_gives_a_block_as_many_rounds_as_it_had_uses() -> None:
    order = Order(S3FIFO, 10)
    for slot in range(4):
        order.put(slot, slot + 1)
    assert order.evict(4) == [0, 1, 2, 3]
    for slot in range(4):
        order.put(slot, slot + 1)  # all remembered: the main queue
    order.use(0)
    order.use(1)
    order.use(1)
    assert order.evict(4) == [2, 3, 0, 1]


def test_s3fifo_passes_over_slots_in_use_and_keeps_their_place() -> None:
    order = Order(S3FIFO, 10)
    for slot in range(4):
        order.put(slot, 100 + slot)
    order.order.leave(0)
    order.order.leave(1)
    assert order.is_victim(0, 1) == [False, False]
    order.order.enter(1)  # released before anyone looked: its place is kept
    assert order.evict(2) == [1, 2]  # 0 was met in use, and left its queue
    order.order.enter(0)
    assert order.evict(9) == [0, 3]  # 0 was used at the queue's end: the main queue, whose turn it is
    # A slot dropped by force and given to another block starts anew.
    order.put(5, 105)
    order.order.leave(5)
    order.put(5, 106)
    assert order.evict(9) == [5]


def test_policies_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    assert [type(make_core(4, name).order) for name in ("lru", "s3fifo", "predicted")] == [LRU, S3FIFO, Learned]
    with pytest.raises(ValueError, match="'fifo': use one of lru, s3fifo"):
        make_core(4, "fifo")

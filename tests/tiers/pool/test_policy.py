"""Eviction policies by themselves: who goes next, and how the order survives removals, returns and compactions."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.pool.index import Slots, Words
from kvtier.tiers.pool.policy import LRU, S3FIFO, make_policy
from kvtier.tiers.pool.slot_queue import SlotQueue


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int64)


class Names:
    """Who is in which slot: the name of block b is (b, b, b, b)."""

    def __init__(self, num_slots: int) -> None:
        self.block = np.zeros(num_slots, np.uint64)

    def __call__(self, which: Slots) -> Words:
        return np.repeat(self.block[which], 4).reshape(-1, 4)

    def put(self, policy: S3FIFO | LRU, slot: int, block: int) -> None:
        """Block stored in a slot and not used since."""
        self.block[slot] = block
        if policy.admit is not None:
            policy.admit(slots(slot))
        policy.enter(slots(slot))


def use(policy: S3FIFO | LRU, *numbers: int) -> None:
    policy.leave(slots(*numbers))
    policy.enter(slots(*numbers))


def evict(policy: S3FIFO | LRU, count: int) -> list[int]:
    victims = policy.pop(count)
    policy.evicted(victims)
    return [int(slot) for slot in victims]


@given(st.lists(st.tuples(st.sampled_from(["append", "push_front", "remove", "take"]), st.integers(0, 9))))
def test_a_slot_queue_is_a_deque(steps: list[tuple[str, int]]) -> None:
    queue, model = SlotQueue(10), deque[int]()
    for verb, number in steps:
        if verb == "take":
            expected = [model.popleft() for _ in range(min(number, len(model)))]
            assert queue.take(number).tolist() == expected
        elif verb == "remove":
            queue.remove(slots(number))
            if number in model:
                model.remove(number)
        elif number not in model:
            getattr(queue, verb)(slots(number))
            if verb == "append":
                model.append(number)
            else:
                model.appendleft(number)
    tickets = queue.tickets(np.arange(10))
    assert [int(slot) for slot in np.argsort(tickets, kind="stable") if tickets[slot] >= 0] == list(model)


def test_a_slot_queue_goes_round_its_ring_and_compacts() -> None:
    queue, batch = SlotQueue(100), np.arange(100)
    queue.append(batch)
    # The same slots moved to the end again and again, out of order, beyond the ring's size many times.
    for step in range(50):
        moved = np.roll(batch, step)[:60]
        queue.remove(moved)
        queue.append(moved)
    last = np.roll(batch, 49)[:60]
    assert queue.take(1000).tolist()[-60:] == last.tolist()
    # And the other way round.
    for _ in range(50):
        queue.push_front(batch)
        assert queue.take(40).tolist() == batch[:40].tolist()
        queue.remove(batch)
    assert queue.take(1).tolist() == []


def test_lru_orders_by_last_use() -> None:
    names = Names(4)
    lru = LRU(4, names)
    for slot in range(4):
        names.put(lru, slot, 100 + slot)
    use(lru, 0)
    lru.leave(slots(2))
    assert evict(lru, 2) == [1, 3]
    assert lru.ranks(slots(0, 1, 2)).tolist()[1:] == [-1, -1]
    # A victim given back goes before those that stayed.
    lru.give_back(slots(3))
    lru.enter(slots(2))
    assert evict(lru, 9) == [3, 0, 2]
    names.put(lru, 1, 7)
    lru.reset()
    assert evict(lru, 9) == []


def test_s3fifo_lets_a_scan_pass_and_keeps_what_is_used() -> None:
    names = Names(20)
    policy = S3FIFO(20, names)  # small queue: 2 of 20
    for slot in range(20):
        names.put(policy, slot, 100 + slot)
    use(policy, 0, 1)
    use(policy, 0, 1)  # twice: worth the main queue
    use(policy, 2)  # once: not yet
    # Everything used once or never leaves by the small queue, in order, around 0 and 1.
    assert evict(policy, 16) == list(range(2, 18))
    # What is left is one of each: two in the small queue, two in the main one. At its share, the small queue is spared.
    assert sorted(evict(policy, 2)) == [0, 1]
    assert evict(policy, 9) == [18, 19]


def test_s3fifo_remembers_whom_it_sent_away() -> None:
    names = Names(20)
    policy = S3FIFO(20, names)
    for slot in range(20):
        names.put(policy, slot, 100 + slot)
    assert evict(policy, 2) == [0, 1]
    names.put(policy, 0, 100)  # comes back: into the main queue
    names.put(policy, 1, 999)  # a stranger
    assert evict(policy, 17) == list(range(2, 19))  # the small queue, down to its share of two
    assert evict(policy, 1) == [0]  # then the main one
    assert evict(policy, 2) == [19, 1]


def test_s3fifo_forgets_old_ghosts() -> None:
    names = Names(10)
    policy = S3FIFO(10, names)
    for block in range(30):  # one slot, one block after the other: each is sent away
        names.put(policy, 0, 1000 + block)
        assert evict(policy, 1) == [0]
    for slot in range(1, 10):
        names.put(policy, slot, slot)
    names.put(policy, 0, 1000)  # 30 evictions ago, of 10 remembered: a stranger, so in the small queue
    assert evict(policy, 9) == list(range(1, 10))
    names.put(policy, 1, 1)  # evicted a moment ago
    names.put(policy, 2, 2000)
    assert evict(policy, 1) == [0]  # the small queue is above its share of one
    assert evict(policy, 1) == [1]
    policy.reset()
    assert evict(policy, 1) == []


def test_s3fifo_gives_a_block_as_many_rounds_as_it_had_uses() -> None:
    names = Names(10)
    policy = S3FIFO(10, names)
    for slot in range(4):
        names.put(policy, slot, slot + 1)
    assert evict(policy, 4) == [0, 1, 2, 3]
    for slot in range(4):
        names.put(policy, slot, slot + 1)  # all remembered: the main queue
    use(policy, 0)
    use(policy, 1)
    use(policy, 1)
    assert evict(policy, 4) == [2, 3, 0, 1]


def test_s3fifo_passes_over_slots_in_use_and_keeps_their_place() -> None:
    names = Names(10)
    policy = S3FIFO(10, names)
    for slot in range(4):
        names.put(policy, slot, 100 + slot)
    policy.leave(slots(0, 1))
    assert policy.ranks(slots(0, 1)).tolist() == [-1, -1]
    policy.enter(slots(1))  # released before anyone looked: its place is kept
    assert evict(policy, 2) == [1, 2]  # 0 was met in use, and left its queue
    policy.enter(slots(0))
    assert evict(policy, 9) == [0, 3]  # 0 was used at the queue's end: the main queue, whose turn it is
    # A slot dropped by force and given to another block starts anew.
    names.put(policy, 5, 105)
    policy.leave(slots(5))
    names.put(policy, 5, 106)
    assert evict(policy, 9) == [5]


def test_policies_are_chosen_by_name() -> None:
    assert isinstance(make_policy("lru", 4, Names(4)), LRU)
    assert isinstance(make_policy("s3fifo", 4, Names(4)), S3FIFO)
    with pytest.raises(ValueError, match="'fifo': use one of lru, s3fifo"):
        make_policy("fifo", 4, Names(4))

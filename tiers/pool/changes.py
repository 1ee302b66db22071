"""ChangeLog: which slots' blocks a reader does not know yet, and which names it has to forget. And names as words."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash

Slots = NDArray[np.int64]
Words = NDArray[np.uint64]

HASH_BYTES: Final = 32
# Odd constants: keys that are no good hashes (a counter, zero padding) must spread over the buckets all the same. Such
# keys differ at one end; words between would cost a name that comes alone a fifth more.
NAME_MIX: Final = np.array([0x9E3779B97F4A7C15, 0, 0, 0x27D4EB2F165667C5], np.uint64)


def to_words(hashes: Sequence[ChainHash]) -> Words:
    """Chain hashes as `[n, 4]` uint64. ValueError if they are not 32 bytes each."""
    joined = b"".join(hashes)
    if len(joined) != HASH_BYTES * len(hashes):
        raise ValueError(f"chain hashes of {sorted(set(map(len, hashes)))} bytes: must be {HASH_BYTES}")
    return np.frombuffer(joined, np.uint64).reshape(-1, 4)


class ChangeLog:
    """The difference between what a tier holds and what its reader knows. It takes no lock: the tier's guards it.

    It notes slots, not events, so it is bounded by the tier's size however late the reader comes, and nothing is ever
    lost: a block that comes and goes between two readings is not mentioned, one that goes and comes back is in both
    lists. Batches go in, in numpy; what costs time per block is left to the reader.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.bool_)  # slots whose block the reader knows
        self._ticket = np.full(
            num_slots, -1, np.int64
        )  # a slot's place in the line of those the reader does not know yet
        self._line: deque[tuple[Slots, Slots]] = deque()  # (slots, tickets); a slot whose ticket differs is stale
        self._num_in_line = 0
        self._next_ticket = 0
        self._gone: list[Words] = []
        self._cleared = False

    @property
    def waiting(self) -> bool:
        """Whether the reader may have something to learn."""
        return bool(self._gone or self._line)

    def stored(self, slots: Slots) -> None:
        """The blocks in these slots became findable; each slot's block before was `removed`."""
        tickets = np.arange(self._next_ticket, self._next_ticket + len(slots))
        self._next_ticket += len(slots)
        self._ticket[slots] = tickets
        self._line.append((slots, tickets))
        self._num_in_line += len(slots)
        if self._num_in_line > 2 * len(self._ticket):  # at least half is stale
            line, self._line = self._line, deque()
            slots, tickets = (np.concatenate(parts) for parts in zip(*line, strict=True))
            valid = self._ticket[slots] == tickets
            self._line.append((slots[valid], tickets[valid]))
            self._num_in_line = int(np.count_nonzero(valid))

    def removed(self, slots: Slots, words: Words) -> None:
        """The blocks in these slots, of these names, are not found any more."""
        known = self._known[slots]
        if known.any():
            self._gone.append(words[known])
            self._known[slots] = False
        self._ticket[slots] = -1

    def cleared(self, words_of: Callable[[Slots], Words]) -> None:
        """No block is found any more; `words_of` has the names that slots had."""
        known = np.flatnonzero(self._known)
        self.removed(known, words_of(known))
        self._ticket[:] = -1
        self._line.clear()
        self._num_in_line = 0
        self._cleared |= bool(self._gone)

    def take(self, limit: int) -> tuple[list[ChainHash], Slots, bool]:
        """What the reader learns now: names gone, up to `limit` slots with blocks new to it, whether `gone` is all."""
        joined = b"".join(words.tobytes() for words in self._gone)
        gone = [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
        was_cleared, self._cleared = self._cleared, False
        self._gone.clear()
        batches = [np.zeros(0, np.int64)]
        while self._line and limit > 0:
            slots, tickets = self._line.popleft()
            if len(slots) > limit:
                self._line.appendleft((slots[limit:], tickets[limit:]))
                slots, tickets = slots[:limit], tickets[:limit]
            self._num_in_line -= len(slots)
            limit -= len(slots)
            batches.append(slots[self._ticket[slots] == tickets])
        fresh = np.concatenate(batches)
        self._known[fresh] = True
        return gone, fresh, was_cleared

    def check(self, held: Slots) -> None:
        """Raise AssertionError unless every block in `held`, and no other, is known to the reader or waits for it."""
        due = np.concatenate([slots[self._ticket[slots] == tickets] for slots, tickets in self._line] or [held[:0]])
        assert self._num_in_line == sum(len(slots) for slots, _ in self._line), "line count"
        assert not self._known[due].any(), "a block would be reported twice"
        reported = np.concatenate([np.flatnonzero(self._known), due])
        assert np.array_equal(np.sort(reported), np.sort(held)), "what the reader knows and is due is not what is held"

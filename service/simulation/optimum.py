"""Optimum: the most blocks that any policy of a given size could find, with all requests known in advance.

Belady's rule with bypass: without room, the block needed last is evicted, the deepest of its chain first. A request
for a block also requests those before it. So the rule never evicts a block before those behind it, and what it keeps
of a chain is always its beginning: the bound is exact for a cache of prefixes.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NEVER = np.iinfo(np.int64).max


class Optimum:
    """The bound for one list of requests, at any capacity. It keeps three numbers for a run of blocks, and no names.

    Blocks of one request that the same request needs next are one run: only the number kept of them matters.
    O(n log n) of blocks once, then O(runs log requests) for each capacity.
    """

    def __init__(self, chains: Sequence[Sequence[int]], num_prompt: Sequence[int] | None = None) -> None:
        """`chains`: each request's blocks, its prompt's first; `num_prompt`: the number of the prompt's (None: all)."""
        lengths = np.array([len(chain) for chain in chains], np.int64)
        flat = np.fromiter((block for chain in chains for block in chain), np.int64, int(lengths.sum()))
        num_needed = lengths if num_prompt is None else np.asarray(num_prompt, np.int64)
        self.num_requests = len(lengths)
        self.num_asked = int(num_needed.sum())  # blocks
        request = np.repeat(np.arange(self.num_requests), lengths)
        place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        needed = _next_use(flat, request, place < num_needed[request])
        self._runs = _runs_of(request, needed)

    def hits(self, capacity: int) -> NDArray[np.int64]:
        """`[requests]`: the blocks of each prompt found with room for `capacity` blocks."""
        found = np.zeros(self.num_requests, np.int64)
        kept: dict[int, int] = {}  # request → blocks kept for it
        furthest: list[int] = []  # a heap of these requests, negated
        total, at = 0, 0
        requests, needed, counts = self._runs
        for request, wanted_by, count in zip(requests, needed, counts, strict=True):
            if request != at:
                for passed in range(at + 1, request + 1):
                    found[passed] = held = kept.pop(passed, 0)
                    total -= held
                at = request
            if wanted_by not in kept:
                kept[wanted_by] = 0
                heapq.heappush(furthest, -wanted_by)
            kept[wanted_by] += count
            total += count
            while total > capacity:
                last = -furthest[0]
                excess = min(kept.get(last, 0), total - capacity)
                total -= excess
                if excess and kept[last] > excess:
                    kept[last] -= excess
                else:
                    kept.pop(last, None)
                    heapq.heappop(furthest)
        for passed in range(at + 1, self.num_requests):
            found[passed] = kept.pop(passed, 0)
        return found

    def share(self, capacity: int) -> float:
        return float(self.hits(capacity).sum()) / self.num_asked if self.num_asked else 0.0


def _next_use(blocks: NDArray[np.int64], request: NDArray[np.int64], is_needed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each block of each request the next request that needs it; _NEVER if none does.

    A block that an answer stores again before it is needed need not be kept until then: _NEVER, too.
    """
    order = np.lexsort((request, blocks))
    sorted_blocks, sorted_requests = blocks[order], request[order]
    after = np.full(len(blocks), _NEVER)
    is_next = (sorted_blocks[1:] == sorted_blocks[:-1]) & is_needed[order][1:]
    is_next &= sorted_requests[1:] > sorted_requests[:-1]
    after[:-1][is_next] = sorted_requests[1:][is_next]
    result = np.empty(len(blocks), np.int64)
    result[order] = after
    return result


def _runs_of(request: NDArray[np.int64], needed: NDArray[np.int64]) -> tuple[list[int], list[int], list[int]]:
    """(request, the next request that needs it, number of blocks) of each run that is needed again, in order."""
    again = needed != _NEVER
    width = int(request[-1]) + 1 if len(request) else 1
    # One number for a pair: sorting numbers releases the GIL, so that a daemon's loop goes on.
    pairs, counts = np.unique(request[again] * width + needed[again], return_counts=True)
    return (pairs // width).tolist(), (pairs % width).tolist(), counts.tolist()

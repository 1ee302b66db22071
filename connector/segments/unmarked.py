"""Segments of prompts without marks: where a text is cut, and which of its pieces came before."""

import math
from collections import abc
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.connector.segments.segment import Segment
from kvtier.tiers import ChainHash
from kvtier.tiers.naming import TokenChain

_LEAST_COVERED: Final = 0.5  # of the tokens that would be computed: below this a blend saves nothing
_MOST_RETURNS: Final = 0.5  # of blended prompts: above this most are computed again, exactly, for their next turn
_RECENT: Final = 64  # prompts whose returns count

_SIGHTINGS: Final = 1  # of a block before it is computed alone; … of a prefix before it is computed exactly
_WINDOW: Final = 8  # tokens of the rolling hash
_LONGEST: Final = 8  # times the shortest segment: where no border comes, a text is cut there
_MOST: Final = 4096  # segments of one prompt
_NAMES: Final = 1 << 18  # whose sightings are counted: 2 MiB
_COUNT: Final = np.uint64(3)  # the bits of a count


def segments_in(token_ids: abc.Sequence[int], shortest: int, start: int = 0) -> list[Segment]:
    """The text cut at its borders, without the segments that end by `start`; at most 4,096.

    None is longer than 8 × `shortest`. Work and memory grow with the text's length alone, whatever is in it.
    """
    longest, num_tokens = _LONGEST * shortest, len(token_ids)
    cuts = [0, *borders(token_ids, shortest).tolist(), num_tokens]
    found: list[Segment] = []
    for begin, end in pairwise(cuts):
        while end > start and begin < end and len(found) < _MOST:
            last = end if end - begin <= longest else begin + longest
            if last > start:
                found.append(Segment(begin, last))
            begin = last
    return found


def borders(token_ids: abc.Sequence[int], shortest: int) -> NDArray[np.int64]:
    """The positions whose rolling hash is the lowest of all within `shortest` tokens on either side; of equal ones
    the first.

    Two have more than `shortest` tokens between them, and twice as many on average. Whether a position is one depends
    on no token before the last `shortest`, and on none after the next `shortest` + 8.
    """
    hashes = _rolling(np.asarray(token_ids, np.uint64))
    if len(hashes) <= 2 * shortest:
        return np.zeros(0, np.int64)
    lowest = _lowest(hashes, shortest)
    middle = hashes[shortest:-shortest]
    is_border = (middle < lowest[: len(middle)]) & (middle <= lowest[shortest + 1 :])
    return np.flatnonzero(is_border) + shortest


def _rolling(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A gear hash of the 8 tokens from each position on: Σ mix(token j) · 2^j, mod 2^64."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    width = 1
    while width < _WINDOW:
        mixed = mixed[:-width] + (mixed[width:] << np.uint64(width))
        width *= 2
    return mixed


def _lowest(values: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """The lowest of each `width` neighbours, in about log₂(width) passes."""
    done = 1
    while done < width:
        step = min(done, width - done)
        values = np.minimum(values[:-step], values[step:])
        done += step
    return values


class SeenNames:
    """How often names came, up to 3. A table of fixed size: a name that takes another's place replaces it."""

    def __init__(self, size: int = _NAMES) -> None:
        """`size`: a power of two."""
        self._table = np.zeros(size, np.uint64)

    def counts(self, names: abc.Sequence[ChainHash]) -> NDArray[np.int64]:
        """How often each was noted."""
        keys, places = self._keys(names)
        found = self._table[places]
        return np.where(found & ~_COUNT == keys, found & _COUNT, 0).astype(np.int64)

    def note(self, names: abc.Sequence[ChainHash]) -> None:
        """Count one more sighting of each; equal names are one."""
        keys, places = self._keys(names)
        self._table[places] = keys | np.minimum(self.counts(names) + 1, 3).astype(np.uint64)

    def _keys(self, names: abc.Sequence[ChainHash]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        keys = np.frombuffer(b"".join(name[:8] for name in names), "<u8") & ~_COUNT
        return keys, (keys >> np.uint64(2)).astype(np.intp) & (len(self._table) - 1)


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A piece of a prompt. Its blocks' names are those of a prompt that begins where it does; the last may reach
    beyond its end, so that no token before the next border is left over.
    """

    segment: Segment
    hashes: tuple[ChainHash, ...]
    num_seen: int  # leading blocks that came often enough to be computed alone


@dataclass(frozen=True, slots=True)
class FoundSegments:
    """What one prompt consists of. `names`: to be noted."""

    num_exact: int  # leading tokens that are cached, or return as a prefix: they are computed exactly
    num_least: int  # tokens that have to be reused, or a blend saves nothing
    segments: tuple[FoundSegment, ...]
    names: tuple[ChainHash, ...]
    last: tuple[ChainHash, ...]  # the name of the prompt's last full block, if it has one


class UnmarkedSegments:
    """Cuts one engine's prompts. The only thing it keeps is a table of 2 MiB with names of seen blocks.

    The names have the tenant's salt in them, so what one tenant sends is never seen for another.
    """

    def __init__(self, block_size: int, min_tokens: int, sightings: int = _SIGHTINGS) -> None:
        self._block_size = block_size
        self._sightings = sightings
        self._shortest = max(block_size, min_tokens)
        self._seen = SeenNames()
        self._last = SeenNames(1 << 12)  # last blocks of prompts that were worth a blend: noted again, it returned
        self._num_worth, self._num_returned = 0.0, 0.0

    def find(self, chain: TokenChain, token_ids: abc.Sequence[int], num_cached: int) -> FoundSegments:
        """The segments after the prompt's exact prefix, of which `num_cached` tokens are cached. Notes nothing.

        `chain` names the prompt.
        """
        size = self._block_size
        own = chain.hashes[num_cached // size :]
        returned = _leading(self._seen.counts(own) >= self._sightings)
        num_exact = max(num_cached, (num_cached // size + returned) * size) if returned else num_cached
        found, names = [], list(own)
        for segment in segments_in(token_ids, self._shortest, num_exact):
            if segment.start:
                hashes = self._named(chain, token_ids, segment)
                if hashes and segment.start + len(hashes) * size > num_exact:
                    found.append((segment, hashes))
                    names += hashes
        counts, at = self._seen.counts(names) >= self._sightings, len(own)
        made = []
        for segment, hashes in found:
            made.append(FoundSegment(segment, hashes, _leading(counts[at : at + len(hashes)])))
            at += len(hashes)
        num_least = max(self._shortest, math.ceil(_LEAST_COVERED * (len(token_ids) - 1 - num_exact)))
        return FoundSegments(num_exact, num_least, tuple(made), tuple(names), tuple(chain.hashes[-1:]))

    def note(self, chain: TokenChain, found: FoundSegments) -> None:
        """Count this sighting of the prompt's blocks and of its segments', and the earlier prompt that it goes on."""
        self._seen.note(found.names)
        returned = np.flatnonzero(self._last.counts(chain.hashes) == 1)
        self._last.note([chain.hashes[at] for at in returned])
        self._num_returned += len(returned)

    def pays(self, found: FoundSegments, num_reused: int) -> bool:
        """Whether to blend a prompt with so many reused tokens. Notes that it was worth one.

        What is blended has no name, so its next turn is computed exactly. Where most prompts have one, so is the first.
        """
        if num_reused < found.num_least:
            return False
        self._last.note(found.last)
        self._num_worth += 1
        if self._num_worth > _RECENT:
            self._num_worth, self._num_returned = self._num_worth / 2, self._num_returned / 2
        return self._num_returned <= max(2.0, _MOST_RETURNS * self._num_worth)

    def texts(self, token_ids: abc.Sequence[int]) -> list[list[int]]:
        """What has to be computed, each alone, so that this text's segments are found behind any other."""
        return [
            list(token_ids[each.start : each.start + num_tokens])
            for each in segments_in(token_ids, self._shortest)
            if each.start and (num_tokens := self._num_tokens(each, len(token_ids)))
        ]

    def _named(self, chain: TokenChain, token_ids: abc.Sequence[int], segment: Segment) -> tuple[ChainHash, ...]:
        alone = TokenChain(chain.root, self._block_size, chain.scheme)
        alone.extend(token_ids[segment.start : segment.start + self._num_tokens(segment, len(token_ids))])
        return tuple(alone.hashes)

    def _num_tokens(self, segment: Segment, num_tokens: int) -> int:
        """Of its full blocks, as many as it needs and the prompt has."""
        size = self._block_size
        return min(-(-(segment.end - segment.start) // size), (num_tokens - segment.start) // size) * size


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return int(np.argmin(np.append(flags, False)))

"""What of each prompt is held, by block size, if nothing is ever evicted: whole blocks, parts of them, tails."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from _chats import Exchange

CHILDREN: Final = 8  # that `ChildIndex` of tiers/pool/core.py remembers of one block, at most


class PrefixReuse(Enum):
    """What a prompt can use of the block in which it parts from what is held."""

    WHOLE = "off"  # nothing
    PARTIAL = "on"  # the leading tokens of a full block
    TAILS = "on, and tails"  # the same, and of the unfinished blocks that requests ended with


@dataclass(slots=True)
class Replayed:
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0  # that would be cached if all children of a block were known, and not eight of them
    loads: int = 0  # blocks
    stores: int = 0  # blocks
    held_blocks: int = 0  # full ones


class PrefixTree:
    """Every text that was held, symbol by symbol. A node is a prefix; each knows the longest text held through it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._held = [0]  # tokens

    def longest(self, exchange: Exchange) -> int:
        """How many leading tokens of the text the held text has that agrees longest."""
        node = most = tokens = 0
        for symbol in exchange.symbols:
            found = self._next.get((node, symbol))
            if found is None:
                break
            node, tokens = found, min(tokens + exchange.unit, exchange.num_told)
            most = max(most, min(tokens, self._held[node]))
        return most

    def add(self, exchange: Exchange, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the text are held."""
        node = tokens = 0
        for symbol in exchange.symbols:
            if tokens >= num_tokens:
                return
            found = self._next.setdefault((node, symbol), len(self._held))
            if found == len(self._held):
                self._held.append(0)
            node, tokens = found, tokens + exchange.unit
            self._held[node] = max(self._held[node], num_tokens)


class RememberedChildren:
    """The last eight blocks that were stored behind each block: the index forgets, and a replay has to as well."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._behind: dict[tuple[int, ...], list[Sequence[int]]] = {}

    def shared(self, symbols: Sequence[int], num_whole: int) -> int:
        """The most tokens that a known child of block `num_whole - 1` shares with the text behind it."""
        start = num_whole * self._size
        wanted = symbols[start : start + self._size]
        known = self._behind.get(self._name(symbols, num_whole), ())
        return max((agree(wanted, child) for child in known), default=0)

    def add(self, symbols: Sequence[int], block: int, count: int) -> None:
        """Block `block` of the text, of so many tokens, was stored."""
        known = self._behind.setdefault(self._name(symbols, block), [])
        known.append(symbols[block * self._size : block * self._size + count])
        del known[:-CHILDREN]

    def _name(self, symbols: Sequence[int], block: int) -> tuple[int, ...]:
        # what a text is up to a block: its tokens are random, so its length and its last ones tell it
        return (block, *symbols[max(0, block * self._size - 8) : block * self._size])


def replay(exchanges: Sequence[Exchange], block_size: int, reuse: PrefixReuse) -> Replayed:
    """Ask for every prompt, one after another, and store what it computes."""
    whole, any_length, done = PrefixTree(), PrefixTree(), Replayed()
    children = RememberedChildren(block_size) if all(one.unit == 1 for one in exchanges) else None
    for exchange in exchanges:
        usable = exchange.num_prompt - 1  # the last token is always computed
        held = max(whole.longest(exchange), exchange.num_continued // block_size * block_size)
        num_whole = min(held, usable) // block_size
        cached = ideal = num_whole * block_size
        if reuse is not PrefixReuse.WHOLE:
            longest = held
            if reuse is PrefixReuse.TAILS:
                longest = max(longest, any_length.longest(exchange), exchange.num_continued)
            cached = ideal = min(longest, usable, (num_whole + 1) * block_size)
            if children is not None:
                part = children.shared(exchange.symbols, num_whole)
                cached = min(num_whole * block_size + part, usable)
        num_full, tail = divmod(exchange.num_held, block_size)
        new = range(held // block_size, num_full)
        keeps_tail = reuse is PrefixReuse.TAILS and bool(tail)
        done.num_requests += 1
        done.prompt_tokens += exchange.num_prompt
        done.cached_tokens += cached
        done.ideal_tokens += ideal
        done.loads += -(-cached // block_size)
        done.stores += len(new) + keeps_tail
        done.held_blocks += len(new)
        whole.add(exchange, num_full * block_size)
        if reuse is PrefixReuse.TAILS:
            any_length.add(exchange, exchange.num_held)
        if children is not None and reuse is not PrefixReuse.WHOLE:
            for block in new:
                children.add(exchange.symbols, block, block_size)
            if keeps_tail:
                children.add(exchange.symbols, num_full, tail)
    return done


def agree(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""Prompts of chats and traces, and what of each is held, by block size: of a cache that evicts nothing, or of an LRU.

A trace's texts are known by its blocks' numbers, made-up chats by token.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from _rig import random_tokens
from numpy.typing import NDArray

from kvtier.service.traces import read_trace

Name = int  # of a prefix: equal ones are equal texts
CHILDREN: Final = 8  # that `ChildIndex` of tiers/pool/core.py remembers of one block, at most
TRACE_UNIT: Final = 512  # tokens of the trace's blocks

_SYSTEMS: Final = 4
_PHRASES: Final = 12  # openings that questions have in common
_VOCABULARY: Final = 50_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its answer as symbols of `unit` tokens each; the last one may stand for fewer."""

    symbols: Sequence[int]  # equal ones behind equal ones: equal text
    unit: int
    num_prompt: int  # tokens
    num_held: int  # tokens whose KV is there afterwards
    num_told: int  # tokens that `symbols` stand for
    num_continued: int = 0  # tokens of the exchange that this is the next turn of: held before it, whatever its symbols

    def tokens(self) -> NDArray[np.uint32]:
        numbers = np.asarray(self.symbols, np.uint32)[:, None] * np.uint32(self.unit)
        told = (numbers + np.arange(self.unit, dtype=np.uint32)).reshape(-1)[: self.num_told]
        return np.concatenate([told, np.zeros(max(0, self.num_held - self.num_told), np.uint32)])


def trace_exchanges(path: Path, limit: int | None) -> list[Exchange]:
    """Requests of a trace in Mooncake's form with blocks of 512 tokens.

    It says nothing of the text of answers, nor of where in a block two prompts part. So a prompt that begins with all
    full blocks of an earlier one, two or more, and is longer than it and its answer, is taken for the next turn.
    """
    turns: dict[tuple[int, int], int] = {}  # full blocks, the last one → tokens held
    made = []
    for line in islice(read_trace(path), limit):
        if not line.input_length:
            continue
        length = min(line.input_length, len(line.hash_ids) * TRACE_UNIT)
        continued = 0
        for count in range(len(line.hash_ids), 1, -1):
            if 0 < (earlier := turns.get((count, line.hash_ids[count - 1]), 0)) < length:
                continued = earlier
                break
        held = length + max(0, line.output_length - 1)
        made.append(Exchange(line.hash_ids, TRACE_UNIT, length, held, length, continued))
        if (full := length // TRACE_UNIT) > 1:
            turns[full, line.hash_ids[full - 1]] = held
    return made


def chats(num_requests: int) -> list[Exchange]:
    """Conversations beside each other, each with one of four system prompts of 90 to 700 tokens.

    A turn's prompt is all that was said, then a question. One answer in five is asked for again, and one question in
    seven is edited in its middle. A third of the questions begin with a phrase that many begin with.
    """
    draw = np.random.default_rng(1)
    systems = [_text(draw, int(draw.integers(90, 700))) for _ in range(_SYSTEMS)]
    phrases = [_text(draw, int(draw.integers(5, 40))) for _ in range(_PHRASES)]
    live: list[Iterator[Exchange]] = []
    made: list[Exchange] = []
    while len(made) < num_requests:
        if len(live) < 12:
            live.append(_conversation(draw, systems[int(draw.integers(_SYSTEMS))], phrases))
        place = int(draw.integers(len(live)))
        if (exchange := next(live[place], None)) is None:
            del live[place]
        else:
            made.append(exchange)
    return made


def _conversation(draw: np.random.Generator, said: list[int], phrases: list[list[int]]) -> Iterator[Exchange]:
    def answered(question: list[int]) -> tuple[list[int], Exchange]:
        answer = _text(draw, 4 + int(draw.lognormal(4.8, 0.7)))
        held = len(said) + len(question) + len(answer) - 1  # the KV of an answer's last token is never computed
        return answer, Exchange(said + question + answer, 1, len(said) + len(question), held, held + 1)

    for _ in range(int(draw.geometric(0.2))):
        opening = phrases[int(draw.integers(len(phrases)))] if draw.random() < 1 / 3 else []
        question = opening + _text(draw, 8 + int(draw.lognormal(3.5, 0.8)))
        answer, exchange = answered(question)
        yield exchange
        if draw.random() < 1 / 5:
            answer, exchange = answered(question)
            yield exchange
        if draw.random() < 1 / 7:
            question = question[: len(question) // 2] + _text(draw, 12)
            answer, exchange = answered(question)
            yield exchange
        said = said + question + answer


def _text(draw: np.random.Generator, length: int) -> list[int]:
    return random_tokens(draw, length, 0, _VOCABULARY)


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
    loads: int = 0  # blocks
    stores: int = 0  # blocks
    held_blocks: int = 0  # full ones


class PrefixTree:
    """Every text that was held, symbol by symbol. A node is a prefix; each knows the longest text held through it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._held = [0]  # tokens

    def longest(self, exchange: Exchange) -> int:
        node = most = tokens = 0
        for symbol in exchange.symbols:
            found = self._next.get((node, symbol))
            if found is None:
                break
            node, tokens = found, min(tokens + exchange.unit, exchange.num_told)
            most = max(most, min(tokens, self._held[node]))
        return most

    def add(self, exchange: Exchange, num_tokens: int) -> None:
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
        known = self._behind.setdefault(self._name(symbols, block), [])
        known.append(symbols[block * self._size : block * self._size + count])
        del known[:-CHILDREN]

    def _name(self, symbols: Sequence[int], block: int) -> tuple[int, ...]:
        # what a text is up to a block: its tokens are random, so its length and its last ones tell it
        return (block, *symbols[max(0, block * self._size - 8) : block * self._size])


def replay(exchanges: Sequence[Exchange], block_size: int, reuse: PrefixReuse) -> Replayed:
    whole, any_length, done = PrefixTree(), PrefixTree(), Replayed()
    children = RememberedChildren(block_size) if all(one.unit == 1 for one in exchanges) else None
    for exchange in exchanges:
        usable = exchange.num_prompt - 1  # the last token is always computed
        held = max(whole.longest(exchange), exchange.num_continued // block_size * block_size)
        num_whole = min(held, usable) // block_size
        cached = num_whole * block_size
        if children is not None and reuse is not PrefixReuse.WHOLE:
            cached = min(cached + children.shared(exchange.symbols, num_whole), usable)
        elif reuse is not PrefixReuse.WHOLE:
            tails = reuse is PrefixReuse.TAILS
            longest = max(held, any_length.longest(exchange), exchange.num_continued) if tails else held
            cached = min(longest, usable, cached + block_size)
        num_full, tail = divmod(exchange.num_held, block_size)
        new = range(held // block_size, num_full)
        keeps_tail = reuse is PrefixReuse.TAILS and bool(tail)
        done.num_requests += 1
        done.prompt_tokens += exchange.num_prompt
        done.cached_tokens += cached
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


class BoundedCache:
    """`num_slots` blocks, unfinished last ones among them, the one used least recently going first.

    An unfinished one beyond an eighth of all slots pushes the oldest of them out.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._size = block_size
        self._blocks: OrderedDict[Name, tuple[Name, Sequence[int]]] = OrderedDict()  # name → parent, tokens
        self._tails: OrderedDict[Name, None] = OrderedDict()  # those of the blocks that are not whole, oldest first
        self._children: defaultdict[Name, dict[Name, Sequence[int]]] = defaultdict(dict)

    def ask(self, exchange: Exchange) -> int:
        """How many tokens of the prompt are held. What is computed instead is stored then, and the answer, too."""
        symbols, size, usable = exchange.symbols, self._size, exchange.num_prompt - 1
        names = self._names(exchange)
        whole = next((i for i, name in enumerate(names[: usable // size]) if name not in self._blocks), usable // size)
        parent = names[whole - 1] if whole else 0
        wanted = symbols[whole * size : (whole + 1) * size]
        known = list(self._children[parent].items())[-CHILDREN:]
        shared, child = max(((agree(wanted, held), name) for name, held in known), default=(0, None))
        if child is not None and shared:
            self._blocks.move_to_end(child)
        for i in range(whole, len(names)):
            self._store(names[i], names[i - 1] if i else 0, symbols[i * size : (i + 1) * size])
        for name in reversed(names):  # a chain's end goes first
            if name in self._blocks:
                self._blocks.move_to_end(name)
        rest = symbols[len(names) * size : exchange.num_held]
        if 8 * len(rest) >= size:
            self._store(hash((names[-1] if names else 0, tuple(rest))), names[-1] if names else 0, rest)
        return min(whole * size + shared, usable)

    def _names(self, exchange: Exchange) -> list[Name]:
        names: list[Name] = []
        for first in range(0, exchange.num_held // self._size * self._size, self._size):
            names.append(hash((names[-1] if names else 0, tuple(exchange.symbols[first : first + self._size]))))
        return names

    def _store(self, name: Name, parent: Name, tokens: Sequence[int]) -> None:
        following = self._children[parent]
        if name in self._blocks or any(held[: len(tokens)] == tokens for held in following.values()):
            return
        for other in [other for other, held in following.items() if tokens[: len(held)] == held]:
            self._drop(other)  # this goes on as that one does
        is_partial = len(tokens) < self._size
        if is_partial and len(self._tails) >= max(1, self._num_slots // 8):
            self._drop(next(iter(self._tails)))
        while len(self._blocks) >= self._num_slots:
            self._drop(next(iter(self._blocks)))
        self._blocks[name] = parent, tokens
        self._children[parent][name] = tokens
        if is_partial:
            self._tails[name] = None

    def _drop(self, name: Name) -> None:
        parent, _ = self._blocks.pop(name)
        del self._children[parent][name]
        self._tails.pop(name, None)


def computed_in(exchanges: Sequence[Exchange], room: int, block_size: int) -> float:
    """Tokens computed a request in so many tokens of room."""
    cache = BoundedCache(room // block_size, block_size)
    return sum(exchange.num_prompt - cache.ask(exchange) for exchange in exchanges) / len(exchanges)

"""What of each prompt is held where L2 has room for a part of all texts: whole blocks and tails in one LRU."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from enum import Enum

from _prefix_reuse import CHILDREN, Exchange, agree

Name = int  # of a prefix: equal ones are equal texts


class Tails(Enum):
    """What becomes of the unfinished blocks that requests end with."""

    NONE = "none"
    FIRST = "first to go"  # before any whole block
    AGED = "aged, an eighth"  # as blocks age; one beyond an eighth of all slots pushes the oldest tail out


class BoundedCache:
    """`num_slots` blocks or tails, the one used least recently going first."""

    def __init__(self, num_slots: int, block_size: int, tails: Tails) -> None:
        self._num_slots = num_slots
        self._size = block_size
        self._kind = tails
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
        if self._kind is not Tails.NONE and 8 * len(rest) >= size:
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
        is_tail = len(tokens) < self._size
        if is_tail and self._kind is Tails.AGED and len(self._tails) >= max(1, self._num_slots // 8):
            self._drop(next(iter(self._tails)))
        while len(self._blocks) >= self._num_slots:
            is_first = self._kind is Tails.FIRST and self._tails
            self._drop(next(iter(self._tails if is_first else self._blocks)))
        self._blocks[name] = parent, tokens
        self._children[parent][name] = tokens
        if is_tail:
            self._tails[name] = None

    def _drop(self, name: Name) -> None:
        parent, _ = self._blocks.pop(name)
        del self._children[parent][name]
        self._tails.pop(name, None)


def computed_in(exchanges: Sequence[Exchange], room: int, block_size: int, tails: Tails) -> float:
    """Tokens computed a request in so many tokens of room."""
    cache = BoundedCache(room // block_size, block_size, tails)
    return sum(exchange.num_prompt - cache.ask(exchange) for exchange in exchanges) / len(exchanges)

"""AnnouncedBlocks: one model's blocks in every tier, and the events that announce those a prefix lookup can find."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.service.events.wire import BlockRemoved, BlockStored, KVEvent, external_hash, namespace_of
from kvtier.tiers import L2, TIERS, BlockRecord, ChainHash, TierKind
from kvtier.tiers.hierarchy import Event, Removed
from kvtier.tiers.naming import is_named_by, root_hash

MAX_RUN: Final = 512  # blocks in one event


@dataclass(slots=True)
class _Block:
    parent: ChainHash
    tokens: bytes
    tiers: int = 0  # a bit for each that holds it
    is_announced: bool = False


class AnnouncedBlocks:
    """What the tiers hold, and which of it is announced. For one thread; publish what the calls return, in order.

    A block is announced while its whole chain is held, each block in some tier: that is what a prefix lookup finds. If
    its parent is missing, the block waits for it. If a chain breaks, the blocks behind the break are announced as
    removed. So a reader never sees an unknown parent, in whichever order the tiers' changes come in.

    A block is withheld if its parent and tokens alone do not make its name: another engine named it, or an image is in
    it. A reader knows blocks by their tokens, and would take it for another. Law: `check`.
    """

    def __init__(self, fingerprint: bytes) -> None:
        """Reads the table of tiers, once."""
        self._tiers = tuple(TIERS.values())
        self._places = {kind.name: place for place, kind in enumerate(self._tiers)}  # a tier → its bit
        self._roots: dict[ChainHash, str | None] = {root_hash(fingerprint): None}  # a root → its namespace
        self._blocks: dict[ChainHash, _Block] = {}
        self._children: dict[ChainHash, dict[ChainHash, None]] = {}  # a parent, held or not → blocks held
        self.num_announced = 0
        self.num_withheld = 0  # blocks that came and are never announced
        self.num_hidden = 0  # blocks in host memory whose chain is not whole, or not known to begin anywhere
        self._in_host = 1 << self._places[L2]

    def begin_at(self, root: ChainHash) -> list[KVEvent]:
        """Chains begin at `root`, a tenant's or an adapter's: announce what is held behind it, now and later."""
        if root in self._roots:
            return []
        self._roots[root] = namespace_of(root)
        lines = self._lines()
        for child in self._children.get(root, ()):
            self._announce(child, lines)
        return lines.events

    def apply(self, event: Event) -> list[KVEvent]:
        """Take in what changed in a tier, in the order in which it did. Returns the events that readers need."""
        lines = self._lines()
        tier = self._places[event.tier]
        if isinstance(event, Removed):
            for name in event.hashes:
                self._remove(name, tier, lines)
        else:
            for record in event.blocks:
                self._store(record, tier, lines)
        return lines.events

    def clear(self) -> list[KVEvent]:
        """The tiers are closed: they hold nothing any more."""
        lines = self._lines()
        for name, block in self._blocks.items():
            for tier in _bits(block.tiers) if block.is_announced else ():
                lines.removed(name, tier)
        self._blocks.clear()
        self._children.clear()
        self.num_announced = self.num_hidden = 0
        return lines.events

    def snapshot(self) -> list[KVEvent]:
        """All that is announced, for a reader who knows nothing: parents first."""
        lines = self._lines()
        for name in self._in_order():
            for tier in _bits(self._blocks[name].tiers):
                lines.stored(name, self._blocks[name], tier)
        return lines.events

    def check(self) -> None:
        """Raise AssertionError unless exactly what a lookup can find is announced."""
        reachable = set(self._in_order())
        announced = {name for name, block in self._blocks.items() if block.is_announced}
        assert announced == reachable, "what is announced is not what can be found"
        assert self.num_announced == len(announced), "count of announced blocks"
        hidden = [block for block in self._blocks.values() if block.tiers & self._in_host and not block.is_announced]
        assert self.num_hidden == len(hidden), "count of hidden blocks"
        assert all(block.tiers for block in self._blocks.values()), "a block that no tier holds"
        links = {(block.parent, name) for name, block in self._blocks.items()}
        assert links == {(parent, child) for parent, held in self._children.items() for child in held}, "links"
        assert all(self._children.values()), "an empty list of children"

    def _lines(self) -> "_Lines":
        return _Lines(self._roots, self._tiers)

    def _in_order(self) -> Iterator[ChainHash]:
        """Blocks whose chain is held, chain by chain."""
        waiting = [child for root in self._roots for child in self._children.get(root, ())]
        while waiting:
            name = waiting.pop()
            yield name
            waiting += self._children.get(name, ())

    def _store(self, record: BlockRecord, tier: int, lines: "_Lines") -> None:
        name = record.chain_hash
        block = self._blocks.get(name)
        if block is None:
            if not is_named_by(record):
                self.num_withheld += 1
                return
            block = self._blocks[name] = _Block(record.parent, record.tokens)
            self._children.setdefault(record.parent, {})[name] = None
        if 1 << tier & ~block.tiers & self._in_host and not block.is_announced:
            self.num_hidden += 1
        block.tiers |= 1 << tier
        if block.is_announced:
            lines.stored(name, block, tier)
        elif block.parent in self._roots or (block.parent in self._blocks and self._blocks[block.parent].is_announced):
            self._announce(name, lines)

    def _remove(self, name: ChainHash, tier: int, lines: "_Lines") -> None:
        block = self._blocks.get(name)
        if block is None or not block.tiers >> tier & 1:
            return  # it was withheld
        block.tiers &= ~(1 << tier)
        if block.is_announced:
            lines.removed(name, tier)
        elif 1 << tier == self._in_host:
            self.num_hidden -= 1
        if block.tiers:
            return
        self._retract(name, lines)
        del self._blocks[name]
        siblings = self._children[block.parent]
        del siblings[name]
        if not siblings:
            del self._children[block.parent]

    def _announce(self, name: ChainHash, lines: "_Lines") -> None:
        """The block's chain is whole: announce it and what waits behind it."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            block = self._blocks[name]
            block.is_announced = True
            self.num_announced += 1
            self.num_hidden -= bool(block.tiers & self._in_host)
            for tier in _bits(block.tiers):
                lines.stored(name, block, tier)
            waiting += self._children.get(name, ())

    def _retract(self, name: ChainHash, lines: "_Lines") -> None:
        """The block's chain is broken: announce it and what stands behind it as removed."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            block = self._blocks[name]
            if block.is_announced:
                block.is_announced = False
                self.num_announced -= 1
                self.num_hidden += bool(block.tiers & self._in_host)
                for tier in _bits(block.tiers):
                    lines.removed(name, tier)
                waiting += self._children.get(name, ())


class _Lines:
    """Events in the making: blocks that follow one another in a chain and a tier become one event."""

    def __init__(self, roots: Mapping[ChainHash, str | None], tiers: Sequence[TierKind]) -> None:
        self._roots = roots
        self._tiers = tiers
        self._runs: list[tuple[int, list[tuple[ChainHash, _Block]]]] = []
        self._gone: dict[int, list[ChainHash]] = {}
        self._events: list[KVEvent] = []

    def stored(self, name: ChainHash, block: _Block, tier: int) -> None:
        """A block is in a tier; its parent is known to the reader."""
        self._close(removed=True)
        for number, run in reversed(self._runs):
            if number == tier and run[-1][0] == block.parent and len(run) < MAX_RUN:
                run.append((name, block))
                return
        if len(self._runs) >= len(self._tiers):  # a chain may grow in every tier side by side
            self._close(stored=True)
        self._runs.append((tier, [(name, block)]))

    def removed(self, name: ChainHash, tier: int) -> None:
        self._close(stored=True)
        self._gone.setdefault(tier, []).append(name)

    @property
    def events(self) -> list[KVEvent]:
        """All of them; call it once, at the end."""
        self._close(stored=True, removed=True)
        return self._events

    def _close(self, *, stored: bool = False, removed: bool = False) -> None:
        if stored:
            self._events += [self._stored(tier, run) for tier, run in self._runs]
            self._runs.clear()
        if removed:
            for tier, names in self._gone.items():
                for i in range(0, len(names), MAX_RUN):
                    hashes = [external_hash(name) for name in names[i : i + MAX_RUN]]
                    self._events.append(BlockRemoved(hashes, self._tiers[tier].medium))
            self._gone.clear()

    def _stored(self, tier: int, run: Sequence[tuple[ChainHash, _Block]]) -> BlockStored:
        first = run[0][1]
        is_first = first.parent in self._roots
        namespace = self._roots[first.parent] if is_first else None
        tokens = np.frombuffer(b"".join(block.tokens for _, block in run), "<u4")
        return BlockStored(
            block_hashes=[external_hash(name) for name, _ in run],
            parent_block_hash=None if is_first else external_hash(first.parent),
            token_ids=tokens.tolist(),
            block_size=len(first.tokens) // 4,
            lora_id=None,
            medium=self._tiers[tier].medium,
            lora_name=None,
            extra_keys=None if namespace is None else [(namespace,), *[None] * (len(run) - 1)],
        )


def _bits(tiers: int) -> Iterator[int]:
    return (tier for tier in range(tiers.bit_length()) if tiers >> tier & 1)

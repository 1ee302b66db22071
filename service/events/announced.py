"""ToldBlocks: one model's blocks in every tier, and the events by which others come to know those a lookup can find."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.connector.events import BlockRemoved, BlockStored, KVEvent, external_hash, namespace_of
from kvtier.tiers.chain import is_named_by, root_hash
from kvtier.tiers.events import Event, Removed
from kvtier.tiers.tier import BlockRecord, ChainHash

MEDIUM: Final[Mapping[str, str]] = {"l1": "GPU", "l2": "CPU", "file": "STORAGE", "redis": "EXTERNAL"}
"""A tier's name in events."""

MAX_RUN: Final = 512  # blocks in one event
_TIERS: Final = tuple(MEDIUM)


@dataclass(slots=True)
class _Block:
    """One block that some tier holds."""

    parent: ChainHash
    tokens: bytes
    tiers: int = 0  # a bit for each that holds it
    is_told: bool = False


class ToldBlocks:
    """What the tiers hold, and what of it is told. One thread at a time; what calls return is to be published in order.

    Told are blocks whose whole chain is held, each in some tier: what a prefix lookup can find. A block whose parent is
    missing waits for it, and a chain that breaks is told as removed behind the break: a reader never hears of an
    unknown parent, however the tiers' news came in between one another. A block whose name is not made of its parent
    and tokens alone, of another engine's dialect or with an image in it, is never told: by its tokens others would take
    it for what it is not. Law: `check`.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._roots: dict[ChainHash, str | None] = {root_hash(fingerprint): None}  # a root → its namespace
        self._blocks: dict[ChainHash, _Block] = {}
        self._children: dict[ChainHash, dict[ChainHash, None]] = {}  # a parent, held or not → blocks held
        self.num_told = 0
        self.num_untellable = 0  # blocks heard of that cannot be told

    def begin_at(self, root: ChainHash) -> list[KVEvent]:
        """Chains begin at `root`: a tenant's, an adapter's. Whatever is held behind it is told from now on."""
        if root in self._roots:
            return []
        self._roots[root] = namespace_of(root)
        lines = _Lines(self._roots)
        for child in self._children.get(root, ()):
            self._tell(child, lines)
        return lines.events

    def take_in(self, event: Event) -> list[KVEvent]:
        """What a tier has told, in the order it did; returns what others have to know."""
        lines = _Lines(self._roots)
        tier = _TIERS.index(event.tier)
        if isinstance(event, Removed):
            for name in event.hashes:
                self._remove(name, tier, lines)
        else:
            for record in event.blocks:
                self._store(record, tier, lines)
        return lines.events

    def clear(self) -> list[KVEvent]:
        """The tiers are closed: they hold nothing any more."""
        lines = _Lines(self._roots)
        for name, block in self._blocks.items():
            for tier in _bits(block.tiers) if block.is_told else ():
                lines.removed(name, tier)
        self._blocks.clear()
        self._children.clear()
        self.num_told = 0
        return lines.events

    def snapshot(self) -> list[KVEvent]:
        """All that is told, for a reader who knows nothing: parents first."""
        lines = _Lines(self._roots)
        for name in self._in_order():
            for tier in _bits(self._blocks[name].tiers):
                lines.stored(name, self._blocks[name], tier)
        return lines.events

    def check(self) -> None:
        """Raise AssertionError unless just what a lookup can find is told."""
        reachable = set(self._in_order())
        told = {name for name, block in self._blocks.items() if block.is_told}
        assert told == reachable, "told is not what can be found"
        assert self.num_told == len(told), "count of told blocks"
        assert all(block.tiers for block in self._blocks.values()), "a block that no tier holds"
        links = {(block.parent, name) for name, block in self._blocks.items()}
        assert links == {(parent, child) for parent, held in self._children.items() for child in held}, "links"
        assert all(self._children.values()), "an empty list of children"

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
                self.num_untellable += 1
                return
            block = self._blocks[name] = _Block(record.parent, record.tokens)
            self._children.setdefault(record.parent, {})[name] = None
        block.tiers |= 1 << tier
        if block.is_told:
            lines.stored(name, block, tier)
        elif block.parent in self._roots or (block.parent in self._blocks and self._blocks[block.parent].is_told):
            self._tell(name, lines)

    def _remove(self, name: ChainHash, tier: int, lines: "_Lines") -> None:
        block = self._blocks.get(name)
        if block is None or not block.tiers >> tier & 1:
            return  # it was not tellable
        block.tiers &= ~(1 << tier)
        if block.is_told:
            lines.removed(name, tier)
        if block.tiers:
            return
        self._retract(name, lines)
        del self._blocks[name]
        siblings = self._children[block.parent]
        del siblings[name]
        if not siblings:
            del self._children[block.parent]

    def _tell(self, name: ChainHash, lines: "_Lines") -> None:
        """The block's chain is whole: tell it and what waits behind it."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            block = self._blocks[name]
            block.is_told = True
            self.num_told += 1
            for tier in _bits(block.tiers):
                lines.stored(name, block, tier)
            waiting += self._children.get(name, ())

    def _retract(self, name: ChainHash, lines: "_Lines") -> None:
        """The block's chain is broken: whatever is told of it and behind it is not to be found any more."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            block = self._blocks[name]
            if block.is_told:
                block.is_told = False
                self.num_told -= 1
                for tier in _bits(block.tiers):
                    lines.removed(name, tier)
                waiting += self._children.get(name, ())


class _Lines:
    """Events in the making: what follows one another in a chain and a tier becomes one."""

    def __init__(self, roots: Mapping[ChainHash, str | None]) -> None:
        self._roots = roots
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
        if len(self._runs) >= len(_TIERS):  # a chain in each tier may grow side by side
            self._close(stored=True)
        self._runs.append((tier, [(name, block)]))

    def removed(self, name: ChainHash, tier: int) -> None:
        """A block is in a tier no more."""
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
                    self._events.append(BlockRemoved(hashes, MEDIUM[_TIERS[tier]]))
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
            medium=MEDIUM[_TIERS[tier]],
            lora_name=None,
            extra_keys=None if namespace is None else [(namespace,), *[None] * (len(run) - 1)],
        )


def _bits(tiers: int) -> Iterator[int]:
    return (tier for tier in range(len(_TIERS)) if tiers >> tier & 1)

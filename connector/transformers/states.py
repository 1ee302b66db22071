"""Recurrent states in the tiers: a border's records, the last border that all rows can go on from, and new records."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.connector import StatePieces
from kvtier.connector.transformers.blocks import Blocks
from kvtier.connector.transformers.state_form import StateForm
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers.hierarchy import Attribution

_PATIENCE: Final = 0.25  # seconds in which every border is looked at; then only powers of two
_ATTEMPTS: Final = 4  # borders whose records turned out to be lost, before nothing is loaded


@dataclass(frozen=True, slots=True)
class FoundBorder:
    """Where all rows of a call go on and what they need for it."""

    border: int = 0  # blocks
    parted: int = 0  # leading blocks that are held of the best known row
    blocks: Sequence[Blocks] = ()  # of each row
    states: torch.Tensor | None = None  # `[rows, num_bytes]` of bytes


class StateRecords:
    """Loads and stores the states of one model beside its blocks. Never raises for a storage failure."""

    def __init__(self, blocks: TierBlocks, states: StateForm) -> None:
        self._blocks = blocks
        self._states = states
        self._has_blocks = bool(blocks.form.layers)
        self._size = blocks.form.block_size
        self.num_slots = -(-states.num_bytes // blocks.form.block_bytes)  # of one row's states: a record each

    def find(self, rows: Sequence[PromptRow], least: int) -> FoundBorder:
        """The last border at which every row's blocks and states are held whole, `least` blocks or more."""
        size, deadline = self._blocks.form.block_size, self._blocks.deadline
        usable = (min(len(row.token_ids) for row in rows) - 1) // size
        runs = [usable] * len(rows)
        if self._has_blocks and usable:
            told = [self._blocks.found(row.chain.hashes[:usable], deadline) for row in rows]
            runs = [found.blocks - found.miss for found in told]
        parted = max(runs) if self._has_blocks else 0
        num_lost = 0
        for border in _borders(min(runs), max(1, least)):
            if time.monotonic() >= deadline or num_lost >= _ATTEMPTS:
                break
            if not all(self.is_held(row, border, deadline) for row in rows):
                continue
            loaded = [self._bring(row, border, deadline) for row in rows]
            if all(each is not None for each in loaded):
                whole = [each for each in loaded if each is not None]
                self._count(rows, usable, border, deadline)
                return FoundBorder(border, parted, whole, self._bytes(whole))
            num_lost += 1
        self._count(rows, usable, 0, deadline)
        return FoundBorder(parted=parted)

    def is_held(self, row: PromptRow, border: int, deadline: float) -> bool:
        """Whether all of a row's states at a border seem to be held somewhere."""
        return not self._blocks.found(self._pieces(row, border).hashes, deadline).miss

    def store(self, row: PromptRow, border: int, state: torch.Tensor) -> None:
        """Keep a row's states, `[num_bytes]`, as they are behind its first `border` blocks: all their pieces."""
        pieces = self._pieces(row, border)
        slots = torch.zeros(self.num_slots, self._blocks.form.block_bytes, dtype=torch.uint8)
        slots.view(-1)[: len(state)] = state
        records = Blocks.of(slots.view(self._blocks.dtype), self._blocks.form, 0)
        self._blocks.store_chain(pieces, range(len(slots)), records, row.epoch)

    def _pieces(self, row: PromptRow, border: int) -> StatePieces:
        return StatePieces(row.chain, border, self.num_slots)

    def _bring(self, row: PromptRow, border: int, deadline: float) -> Blocks | None:
        """A row's blocks up to a border, if there are such, and behind them its states; None if anything is lost."""
        pieces = self._pieces(row, border)
        if self._has_blocks:
            names, parent, block_size = [*row.chain.hashes[:border], *pieces.hashes], row.chain.root, self._size
        else:  # what a few records save is the whole prompt
            names, parent, block_size = list(pieces.hashes), pieces.root, 0
        num_blocks = border if self._has_blocks else 0
        loaded = self._blocks.bring(names, parent, deadline, block_size, num_blocks)
        return loaded if len(loaded) == len(names) else None

    def _bytes(self, loaded: Sequence[Blocks]) -> torch.Tensor:
        """The states of each row."""
        rows = [each.states.reshape(-1).view(torch.uint8) for each in loaded]
        return torch.stack([row[: self._states.num_bytes] for row in rows])

    def _count(self, rows: Sequence[PromptRow], usable: int, border: int, deadline: float) -> None:
        """Count what a lookup of blocks counts: those up to the border as found, the others as misses."""
        tiers = self._blocks.tiers
        for row in rows:
            if self._has_blocks:
                if border:
                    tiers.count(self._blocks.found(row.chain.hashes[:border], deadline))
                if usable > border:
                    tiers.count(Attribution(usable - border, miss=usable - border))
            elif usable:
                names = self._pieces(row, border or usable).hashes
                found = self._blocks.found(names, deadline) if border else Attribution(len(names), miss=len(names))
                tiers.count(found)


def _borders(last: int, least: int) -> Iterator[int]:
    """Every border from the last one backwards; if that takes long, only powers of two, where long prompts have one."""
    started = time.monotonic()
    border = last
    while border >= least:
        yield border
        border -= 1
        if time.monotonic() - started > _PATIENCE:
            border = 1 << border.bit_length() - 1 if border > 0 else 0

"""Flight: the blocks of one batch that one peer is asked for, and what becomes of each."""

from collections.abc import Sequence
from typing import Final

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.peers.link import PeerLink
from kvtier.tiers.peers.peer import OtherNode
from kvtier.tiers.peers.wire import MAX_NAMES

WRONG: Final = frozenset({Outcome.EVICTED, Outcome.CHECKSUM, Outcome.KEY_MISMATCH})
"""What becomes of a block that a peer does not have as it should."""


class Flight:
    """Every block that was asked for gets an outcome in `results`, once."""

    def __init__(
        self,
        peer: OtherNode,
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        positions: list[int],
        results: list[BlockRecord | Outcome],
    ) -> None:
        self.peer = peer
        self._hashes = hashes
        self._into = into
        self._positions = positions
        self._results = results
        self._open = set(positions)  # no outcome yet
        self.hinted: set[int] = set()  # positions that are asked for because the peer's events name them

    @property
    def hints(self) -> list[tuple[ChainHash, bool]]:
        """The blocks of `hinted`, and whether the peer had something else of each, or nothing."""
        return [(self._hashes[p], self._results[p] in WRONG) for p in self._positions if p in self.hinted]

    def hear(self, link: PeerLink, deadline: float) -> None:
        """PeerFailed; what came before is good."""
        asked = self._positions[:MAX_NAMES]
        names, into = [self._hashes[p] for p in asked], [self._into[p] for p in asked]
        link.hear_blocks(names, into, self._settle, deadline)
        self.lost(Outcome.ABSENT)  # more than one question has names: not asked

    def lost(self, outcome: Outcome) -> None:
        """What has not come will not."""
        for position in self._open:
            self._results[position] = outcome
        self._open.clear()

    def _settle(self, number: int, result: BlockRecord | Outcome) -> None:
        position = self._positions[number]
        self._results[position] = result
        self._open.discard(position)

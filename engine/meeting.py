"""Requests that come to their blocks from both ends: how far each may compute, and what has joined. No torch."""

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.engine.offload import NoOffload
from kvtier.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvtier.connector import BothEndsSide


class MeetingPoint:
    """What the scheduler asks of the requests among `connector.backs`; it has nothing to say of others."""

    def __init__(self, connector: "BothEndsSide | NoOffload", stats: Counter[str], block_size: int) -> None:
        self._connector = connector
        self._stats = stats
        self._block_size = block_size

    def reached(self, sequence: Sequence) -> int:
        """How many tokens it has, with what has arrived right behind those it has computed."""
        return self._connector.backs[sequence.request_id].reach(sequence.num_computed)

    def join(self, sequence: Sequence, reached: int) -> None:
        """The front is at the back: those tokens were loaded. The tiers have them, so they are not stored again."""
        num_joined = reached - sequence.num_computed
        sequence.num_computed = reached
        sequence.num_stored = max(sequence.num_stored, reached // self._block_size)
        if not sequence.num_preempted:
            sequence.num_external_tokens += num_joined
        self._stats["external_tokens"] += num_joined

    def limit(self, sequence: Sequence, *, alone: bool) -> int:
        """Up to which token it may compute in this step; what it has, if it is to wait."""
        back = self._connector.backs[sequence.request_id]
        if back.is_over(sequence.num_computed):
            self.leave(sequence)
            return sequence.num_tokens
        return min(back.limit(sequence.num_computed, alone=alone), sequence.num_tokens)

    def leave(self, sequence: Sequence) -> None:
        """It has all of its blocks, or none any more."""
        self._stats["skipped_tokens"] += self._connector.leave(sequence.request_id) * self._block_size

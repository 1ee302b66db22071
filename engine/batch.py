"""What passes between the scheduler and the runner: one step's chunks and copies."""

import time
from collections import abc
from dataclasses import dataclass, field

from kvtier.connector import StepPlan
from kvtier.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end` of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    end: int
    samples: bool  # whether its last row brings the next token
    blends: int = 0  # of the step's tokens that it has for a blend before it; that fills what is left up to `start`


@dataclass(slots=True)
class Batch:
    """One step's work. Empty where everybody waits."""

    chunks: list[Chunk]
    num_tokens: int  # that the step computes
    plan: StepPlan
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks of L1, source and target, before it computes
    started: float = field(default_factory=time.perf_counter)
    has_blended: bool = False  # what it took says nothing of its tokens
    arrived: bool = True  # set by the runner: False where a layerwise load failed or was late

    def blended(self, unfinished: abc.Collection[Chunk]) -> None:
        """Blends took their part of the step; what stands behind one that goes on in another step is not computed."""
        self.has_blended = True
        self.chunks = [chunk for chunk in self.chunks if chunk not in unfinished]
        self.num_tokens = sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def position(self) -> float:
        """How many tokens those that it computes follow, on average."""
        seen = sum((chunk.start + chunk.end) / 2 * (chunk.end - chunk.start) for chunk in self.chunks)
        return seen / max(1, self.num_tokens)

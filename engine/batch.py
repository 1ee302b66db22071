"""What passes between the scheduler, the pool and the runner: blocks, and one step's chunks."""

import time
from collections import abc
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import ArrayLike, NDArray

from kvtier.connector import StepPlan
from kvtier.engine.sequence import Sequence
from kvtier.tiers import BlockRecord, ChainHash


class BlockAllocator(Protocol):
    """What the scheduler asks of L1; `tiers.device.BlockPool` is the real one."""

    tells: bool  # whether `publish` wants records: somebody is told what L1 holds

    def lookup(self, hashes: list[ChainHash]) -> int:
        """Leading blocks held; no side effect."""

    def match(self, hashes: list[ChainHash]) -> NDArray[Any]:
        """Ids of the leading blocks held, each with one reference more."""

    def allocate(self, n: int, leaving: int = 0) -> NDArray[Any] | None:
        """`n` blocks with one reference each; None: no room for them and `leaving` more."""

    def publish(
        self,
        block_ids: ArrayLike,
        hashes: list[ChainHash],
        parent: ChainHash | None,
        records: abc.Sequence[BlockRecord] = (),
    ) -> None:
        """Name full blocks: from now on they are found."""

    def hold(self, block_ids: ArrayLike) -> None:
        """One reference more to each."""

    def free(self, block_ids: ArrayLike) -> None:
        """One reference less to each."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end` of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    end: int
    samples: bool  # whether its last row brings the next token


@dataclass(slots=True)
class Batch:
    """One step's work. Empty where everybody waits."""

    chunks: list[Chunk]
    num_tokens: int  # that the step computes
    plan: StepPlan
    started: float = field(default_factory=time.perf_counter)
    arrived: bool = True  # set by the runner: False where a layerwise load failed or was late

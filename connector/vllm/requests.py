"""What the scheduler half remembers: of each live vLLM request, of each copy under way, of the next message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.connector.scheduler import BlockChain
from kvtier.connector.vllm_keys import OwnChain, VllmChain

Tables = Sequence[Sequence[int]]
"""A request's block ids, one table for each KV group."""


@dataclass(slots=True)
class Row:
    """A live request of vLLM's. Implements the scheduler side's `Request`."""

    request: Any
    request_id: str
    keys: VllmChain | OwnChain
    stored: int | None = None  # leading blocks stored, loaded or found; None: not scheduled yet
    asked: int = 0  # tokens vLLM had at the last lookup
    answer: tuple[int | None, bool] | None = None
    good_until: float = 0.0
    synchronous: bool = False  # how the answer's load would be made
    tables: Tables = ()  # as of its last load or store

    @property
    def chain(self) -> BlockChain:
        """Its blocks' names so far."""
        return self.keys.current()

    @property
    def num_tokens(self) -> int:
        """Its tokens so far."""
        return int(self.request.num_tokens)


@dataclass(slots=True)
class WatchedOp:
    """A copy that not every rank has reported yet."""

    request_id: str
    layerwise: bool
    blocks: tuple[int, ...]  # that it reads, by the workers' ids; none for a load
    left: int  # ranks
    failed: bool = False


@dataclass(slots=True)
class NextStep:
    """What is collected for the next message."""

    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)  # blocks that loads write to, by vLLM's ids

"""Lineage: which blocks a tier holds and what is before each, as arrays: what figures of its content are made of."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Lineage(NamedTuple):
    """Blocks in no particular order: names and parents as `[n, 4]` uint64. Some may have left meanwhile."""

    names: NDArray[np.uint64]
    parents: NDArray[np.uint64]


@runtime_checkable
class TellsLineage(Protocol):
    """A tier that can list what it holds without a Python object a block."""

    def lineage(self) -> Lineage:
        """Every block. No I/O, and the tier's lock for some blocks at a time."""

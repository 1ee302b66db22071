"""How much two blocks of tokens have in common, wherever it stands."""

from collections.abc import Sequence
from typing import Final

_RUN: Final = 3  # tokens one after the other that count as the same at another place
_PART: Final = 4  # a quarter of a block has to be the same, or it is another prompt's


def num_alike(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens that are the same: of their beginnings, or of runs at any place. 0 if that is less than a quarter."""
    same = next((i for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), len(theirs))
    runs = len(_runs(mine) & _runs(theirs))
    alike = max(same, runs and runs + _RUN - 1)
    return alike if _PART * alike >= len(mine) else 0


def _runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + _RUN]) for at in range(len(tokens) - _RUN + 1)}

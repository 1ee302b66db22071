"""What a model keeps of a call beside the cache: taken away before another one goes on behind blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_POSITIONS: Final = (
    "rope_deltas"  # of M-RoPE: how far an image moved all later positions; renewed without a cache alone
)
_OF_TORCH: Final = frozenset(vars(torch.nn.Module()))


class Carried:
    """M-RoPE's positions, and other attributes that a model may set to a tensor while it computes: they were None.

    A model that was just loaded has none of it, and of the positions one that went through a text alone has zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        owners = list(map(vars, model.modules()))
        self._positions = [own for own in owners if _POSITIONS in own]
        self._others = [
            (own, name)
            for own in owners
            for name, value in own.items()
            if value is None and name != _POSITIONS and name not in _OF_TORCH
        ]

    def forget(self) -> None:
        """The next pass counts positions as if the model was just loaded."""
        for own in self._positions:
            own[_POSITIONS] = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """The same while it is open."""
        held = [own[_POSITIONS] for own in self._positions]
        self.forget()
        try:
            yield
        finally:
            for own, value in zip(self._positions, held, strict=True):
                own[_POSITIONS] = value

    @property
    def shown(self) -> str | None:
        """The name of what changes the next pass over a text; None: nothing does."""
        return self.unknown or next((_POSITIONS for own in self._positions if _counts(own[_POSITIONS])), None)

    @property
    def unknown(self) -> str | None:
        """The same of attributes of which nothing is known, so that nobody here may change them."""
        return next((name for own, name in self._others if _counts(own.get(name))), None)


def _counts(value: object) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.any())

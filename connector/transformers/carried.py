"""What a model keeps of a call beside the cache: taken away before another one goes on behind blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_POSITIONS: Final = (
    "rope_deltas"  # of M-RoPE: how far an image moved all later positions; renewed without a cache alone
)
_OF_TORCH: Final = frozenset(vars(torch.nn.Module()))


class Carried:
    """Attributes that a model sets to a tensor while it computes: those that were None, and M-RoPE's positions.

    A model that was just loaded has none of it, and one that went through a text alone has zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (own, name)
            for own in map(vars, model.modules())
            for name, value in own.items()
            if name == _POSITIONS or (value is None and name not in _OF_TORCH)
        ]

    @property
    def _held(self) -> list[tuple[dict[str, Any], str]]:
        return [(own, name) for own, name in self._places if isinstance(own.get(name), torch.Tensor)]

    def forget(self) -> None:
        """The next pass finds the model as if it was just loaded."""
        for own, name in self._held:
            own[name] = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """The same while it is open."""
        held = [(own, name, own[name]) for own, name in self._held]
        self.forget()
        try:
            yield
        finally:
            for own, name, value in held:
                own[name] = value

    def shows(self) -> str | None:
        """The name of what changes the next pass over a text; None: nothing does."""
        return next((name for own, name in self._held if bool(own[name].any())), None)

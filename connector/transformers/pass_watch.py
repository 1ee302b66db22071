"""Caches that see every pass into them: whether the model computed it under the name that the cache began with."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.tiers import ChainHash


@dataclass(slots=True)
class PassWatch:
    """Looks at the model once a pass, where its first tokens come. Copies of a cache go on with one of their own."""

    root: ChainHash  # where the names of the cache's blocks begin
    named: Callable[[], ChainHash | None]  # the same of what the model computes now; None: nothing names it
    layer: int  # the first one that keeps tokens
    is_torn: bool = False  # a pass computed something else

    def look(self) -> bool:
        """Whether the model computes, and did in every pass, what the cache's name says."""
        self.is_torn = self.is_torn or self.named() != self.root
        return not self.is_torn

    def __deepcopy__(self, _: Any) -> "PassWatch":
        return replace(self)

    def __reduce__(self) -> Any:
        return type(None), ()  # another process has another model


class WatchedCache(DynamicCache):
    """A cache that `TierBlocks.watch` gives a watch. A compiled pass is not looked at: its graph has no room for it."""

    watch: PassWatch | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> Any:
        if self.watch is not None and layer_idx == self.watch.layer and not torch.compiler.is_compiling():
            self.watch.look()
        return super().update(key_states, value_states, layer_idx, *args, **options)


@cache
def watched(kind: type[DynamicCache]) -> type[DynamicCache]:
    """A model's own class of caches, with a watch."""
    return type(f"WatchedModel{kind.__name__}", (WatchedCache, kind), {"__module__": __name__})


def is_torn(cache: Any) -> bool:
    """Whether a pass into the cache, or the model now, computes something else than the cache's name says."""
    watch: PassWatch | None = getattr(cache, "watch", None)
    return watch is not None and not watch.look()

"""What a model's cache keeps instead of K and V for each token: its recurrent states, as bytes and back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from transformers import DynamicCache
from transformers import cache_utils as _cache_utils

from kvtier.connector.transformers.host_copy import HostCopy
from kvtier.tiers import ConfigError

_MIXIN: Final[Any] = getattr(_cache_utils, "LinearAttentionCacheLayerMixin", ())  # () where transformers is older
_KINDS: Final = ("conv_states", "recurrent_states")  # of such a layer: one tensor for each of its states
_OWN: Final = "linear_cache"  # of MiniMax's cache: one tensor for each layer
STATES: Final = (*_KINDS, _OWN)
_PIECE: Final = 4 << 20  # bytes of a record at most, if no blocks give the size of slots


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state, `[rows, *shape]` in the cache."""

    layer: int
    kind: str  # one of STATES
    index: int  # among the layer's states of this kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """For the identity: `0.conv_states.0:float32:256x4`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layer}.{self.kind}.{self.index}:{dtype}:{'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class StateForm:
    """All recurrent states of a model after some token: one row's are `num_bytes`, part after part."""

    parts: tuple[StatePart, ...]

    @classmethod
    def of(cls, cache: DynamicCache) -> Self | None:
        """Reads it from a cache with tokens; None if no layer keeps a state."""
        parts = [
            StatePart(layer, kind, index, tuple(tensor.shape[1:]), tensor.dtype)
            for layer, kind, index, tensor in _states(cache)
        ]
        return cls(tuple(parts)) if parts else None

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def name(self) -> str:
        """For the identity: shapes and dtypes of all that is kept."""
        return ",".join(part.name for part in self.parts)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a record, if there are no blocks beside them: equal pieces of at most 4 MiB."""
        num_pieces = math.ceil(self.num_bytes / _PIECE)
        return math.ceil(self.num_bytes / num_pieces / 64) * 64

    def take(self, cache: DynamicCache) -> list[torch.Tensor]:
        """A copy of the states as they are now: of each part all rows, on the model's device."""
        tensors = [tensor for _, _, _, tensor in _states(cache)]
        if [tuple(tensor.shape[1:]) for tensor in tensors] != [part.shape for part in self.parts]:
            raise ValueError("the cache keeps other states than it did")
        return [tensor.detach().clone() for tensor in tensors]

    def rows(self, taken: Sequence[torch.Tensor]) -> HostCopy:
        """What `take` took as bytes on their way to host memory, `[rows, num_bytes]`."""
        return HostCopy(self.device_rows(taken))

    def device_rows(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same where the states are."""
        rows = [tensor.contiguous().view(len(tensor), -1).view(torch.uint8) for tensor in taken]
        return torch.cat(rows, dim=1)

    def put(self, cache: DynamicCache, rows: torch.Tensor, device: torch.device) -> None:
        """Give an empty cache the states of these rows, `[rows, num_bytes]` of bytes."""
        start = 0
        for part in self.parts:
            held = rows[:, start : start + part.num_bytes].clone().view(part.dtype)
            self._put(cache, part, held.view(len(rows), *part.shape).to(device))
            start += part.num_bytes

    def _put(self, cache: Any, part: StatePart, tensor: torch.Tensor) -> None:
        if part.kind == _OWN:
            cache.set_linear_cache(part.layer, tensor)
            return
        layer = cache.layers[part.layer]
        if part.kind == "conv_states":
            layer.update_conv_state(tensor, state_idx=part.index, conv_kernel_size=part.shape[-1])
        else:
            layer.update_recurrent_state(tensor, state_idx=part.index)
        layer.has_previous_state[part.index] = True


def require_known(cache: DynamicCache) -> None:
    """Raise ConfigError if a layer's states are not where this code looks for them."""
    layers: Any = cache.layers
    for layer in layers:
        if isinstance(layer, _MIXIN) and not isinstance(getattr(layer, "conv_states", None), dict):
            raise ConfigError("transformers: this version keeps states in another way; pip install -U transformers")


def _states(cache: Any) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    """Layer, kind, index and tensor of each state. A convolution's is cut to what it needs."""
    own = getattr(cache, _OWN, None) or []
    for number, tensor in enumerate(own):
        if isinstance(tensor, torch.Tensor):
            yield number, _OWN, 0, tensor
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, _MIXIN):
            continue
        for kind in _KINDS:
            for index, tensor in getattr(layer, kind).items():
                if tensor is not None:
                    width = layer.conv_kernel_size[index] if kind == "conv_states" else None
                    yield number, kind, index, tensor if width is None else tensor[..., -width:]

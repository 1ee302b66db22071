"""The shape of one KV block, and where an engine keeps its layers: layout is data, not a class per engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of `block_size` tokens in all layers of one KV group.

    A block is `[num_layers, num_kv, block_size, num_kv_heads, head_dim]` of `dtype`, C-contiguous: the canonical block
    layout, the same in L1, L2 and L3. `num_kv` is 2 (K, V), or 1 if both are read from one latent (MLA).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES
    num_kv: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_kv"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)}: must be at least 1")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, num_kv, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, self.num_kv, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one block."""
        return self.num_kv * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class FlatShape(KVShape):
    """A block that is one row of `num_elements`: its layers differ, and who fills it knows what lies where."""

    num_elements: int = 0

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (1, 1, 1, 1, self.num_elements)

    @property
    def layer_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where an engine keeps its KV: one base address per layer and the strides, all in bytes.

    Element (block, kv, token, head) of layer i is `head_dim` contiguous elements at
    `bases[i] + block * block_stride + kv * kv_stride + token * token_stride + head * head_stride`.
    """

    bases: Sequence[int]
    block_stride: int
    kv_stride: int
    token_stride: int
    head_stride: int

"""What the layout kernels must do, in numpy: copies between an engine's own layout and canonical blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.host import memory
from kvtier.tiers.naming.identity import DTYPE_BYTES, KVLayout, KVShape


def gather_reference(
    layout: KVLayout,
    shape: KVShape,
    blocks: Sequence[int] | NDArray[np.int64],
    slots: NDArray[np.uint8],
    layers: tuple[int, int] | None = None,
) -> None:
    """Copy blocks of a layout in host memory into `slots`, `[len(blocks), block_bytes]`; `layers` half-open."""
    for layer in range(*(layers or (0, shape.num_layers))):
        part = slots[:, layer * shape.layer_bytes : (layer + 1) * shape.layer_bytes]
        part[:] = _layer_view(layout, shape, layer, blocks)[np.asarray(blocks)].reshape(len(blocks), -1)


def scatter_reference(
    layout: KVLayout,
    shape: KVShape,
    blocks: Sequence[int] | NDArray[np.int64],
    slots: NDArray[np.uint8],
    layers: tuple[int, int] | None = None,
) -> None:
    """Copy `slots`, `[len(blocks), block_bytes]`, into blocks of a layout in host memory; `layers` half-open."""
    for layer in range(*(layers or (0, shape.num_layers))):
        view = _layer_view(layout, shape, layer, blocks)
        part = slots[:, layer * shape.layer_bytes : (layer + 1) * shape.layer_bytes]
        view[np.asarray(blocks)] = part.reshape(len(blocks), *view.shape[1:])


def _layer_view(
    layout: KVLayout, shape: KVShape, layer: int, blocks: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.uint8]:
    """One layer's bytes in place, `[num_blocks, num_kv, block_size, num_kv_heads, head_bytes]`."""
    head_bytes = shape.head_dim * DTYPE_BYTES[shape.dtype]
    dimensions = (max(blocks, default=-1) + 1, shape.num_kv, shape.block_size, shape.num_kv_heads, head_bytes)
    strides = (layout.block_stride, layout.kv_stride, layout.token_stride, layout.head_stride, 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(dimensions, strides, strict=True))
    flat = memory.bytes_at(layout.bases[layer], max(0, extent))
    return np.lib.stride_tricks.as_strided(flat, dimensions, strides)

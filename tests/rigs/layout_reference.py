"""What the layout kernels must do, in numpy: copies between an engine's own layout and canonical blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.kernels import Geometry
from kvtier.tiers.host import memory
from kvtier.tiers.naming.identity import DTYPE_BYTES, KVLayout, KVShape


def geometry_of(layout: KVLayout, shape: KVShape) -> Geometry:
    """Merge heads into tokens, tokens into K and V, K and V into a layer, if they lie next to each other."""
    run = shape.head_dim * DTYPE_BYTES[shape.dtype]
    num_kv, num_tokens, num_heads = shape.num_kv, shape.block_size, shape.num_kv_heads
    if num_heads == 1 or layout.head_stride == run:
        run, num_heads = run * num_heads, 1
        if num_tokens == 1 or layout.token_stride == run:
            run, num_tokens = run * num_tokens, 1
            if num_kv == 1 or layout.kv_stride == run:
                run, num_kv = run * num_kv, 1
    strides = layout.block_stride, layout.kv_stride, layout.token_stride, layout.head_stride
    return Geometry(tuple(layout.bases), *strides, num_kv, num_tokens, num_heads, run)


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

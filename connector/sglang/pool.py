"""Pages of SGLang's host pools as strided views: a memory layout is a permutation of dimensions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtier.tiers import ConfigError
from kvtier.tiers.copies import BlockPart, EngineBlocks

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[torch.Tensor]

# layout → the dimension with all tokens (to be split into pages and their tokens; None: already split), and the order
# of dimensions that makes a canonical block of each page: [pages, layers, K or V, tokens, heads, elements].
_LayoutTable = dict[str, tuple[int | None, tuple[int, ...]]]
_MHA: Final[_LayoutTable] = {
    "layer_first": (2, (2, 1, 0, 3, 4, 5)),  # [2, layers, tokens, heads, elements]
    "page_first": (1, (1, 3, 0, 2, 4, 5)),  # [2, tokens, layers, heads, elements]
    "page_first_direct": (None, (1, 2, 0, 3, 4, 5)),  # [2, pages, layers, tokens, heads, elements]
    "page_head": (None, (1, 4, 0, 3, 2, 5)),  # [2, pages, heads, tokens, layers, elements]
    "page_unified": (None, (0, 2, 3, 4, 1, 5, 6)),  # [pages, groups, layers, 2, tokens, heads of a group, elements]
}
_MLA: Final[_LayoutTable] = {
    "layer_first": (1, (1, 0, 2, 3, 4)),  # [layers, tokens, 1, elements]
    "page_first": (0, (0, 2, 1, 3, 4)),  # [tokens, layers, 1, elements]
    "page_first_direct": (None, (0, 1, 2, 3, 4)),  # [pages, layers, tokens, 1, elements]
    "page_unified": (None, (0, 1, 2, 3)),  # [pages, layers, tokens, elements]
}
# K and V of different size, a tensor each: [tokens, layers, heads, elements], [pages, layers, tokens, heads, elements].
_UNEQUAL: Final[_LayoutTable] = {"page_first": (0, (0, 2, 1, 3, 4)), "page_first_direct": (None, (0, 1, 2, 3, 4))}
_INDEX: Final[_LayoutTable] = {
    "layer_first": (None, (1, 0, 2)),  # [layers, pages, bytes]
    "page_first": (None, (0, 1, 2, 3)),  # [pages, layers, 1, bytes]
    "page_first_direct": (None, (0, 1, 2, 3)),
}
_STATES: Final[_LayoutTable] = {  # [states, layers, 1, …]
    "page_first": (None, ()),
    "page_first_direct": (None, ()),
}


@dataclass(frozen=True, slots=True)
class PoolPages:
    """The pages of one host pool: `units` are the pieces of every page, views `[pages, …]` of the pool's memory.

    Units are in canonical order: layer by layer, K before V. `layers` has each unit's layer, by its number in the pool.
    """

    kind: str  # SGLang's class
    page_size: int  # tokens of an index; 1: the pool keeps one state at a page's end
    dtype: str
    units: "Tensors"
    layers: Sequence[int]

    @property
    def page_bytes(self) -> int:
        return sum(self.unit_bytes)

    @property
    def unit_bytes(self) -> list[int]:
        return [unit[0].numel() * unit.itemsize for unit in self.units]

    @property
    def least_slot(self) -> int:
        """The least bytes of a slot: the largest unit that cannot be cut. A state's can be cut anywhere."""
        return 0 if self.kind == "MambaPoolHost" else max(self.unit_bytes)

    @property
    def is_latent(self) -> bool:
        """Whether the pool keeps one latent per token (MLA) instead of K and V."""
        return self.kind == "MLATokenToKVPoolHost"

    @property
    def text(self) -> str:
        """Everything that determines the meaning of a page's bytes: equal texts, equal formats."""
        sizes = [f"{str(unit.dtype).removeprefix('torch.')}[{unit[0].numel()}]" for unit in self.units]
        return f"{self.kind} {self.page_size} {self.dtype} {' '.join(sizes)}"


def pool_pages(pool: Any) -> PoolPages:
    """A host pool's pages. ConfigError in one line for an unsupported pool."""
    kind = type(pool).__name__
    if kind not in _KINDS:
        raise _refused(f"host pool {kind}", f"pools of {', '.join(_KINDS)} can be stored: serve a model that has those")
    layouts, views = _KINDS[kind]
    if pool.layout not in layouts:
        raise _refused(f"layout {pool.layout!r} of {kind}", f"use --hicache-mem-layout {' or '.join(layouts)}")
    if getattr(pool, "storage_format_tag", None) is not None:
        raise _refused(f"page format {pool.storage_format_tag!r}", "switch off what changes it")
    if getattr(pool, "kv_buffer", 0) is None:
        raise _refused("a host pool without memory", "let every rank keep its own host pool")
    units, layers = views(pool, *layouts[pool.layout])
    dtype = str(pool.dtype).removeprefix("torch.")
    return PoolPages(kind, pool.page_size, dtype, units, layers)


def page_blocks(pages: PoolPages, slot_bytes: int, *, whole: bool) -> EngineBlocks:
    """The pages as blocks of the tiers.

    `whole`: a page is one record, the canonical block. Else as many records of `slot_bytes` as its units fill, in their
    order; record `i` of page `p` has the id `i * pages + p`. A flat unit larger than a slot is cut. ValueError for any
    other.
    """
    parts: list[BlockPart] = []
    piece = end = 0
    cut = [
        (run, layer)
        for unit, layer in zip(pages.units, pages.layers, strict=True)
        for run in ([unit] if whole or unit.dim() > 2 else _runs(unit, slot_bytes // unit.itemsize))
    ]
    for unit, layer in cut:
        size = unit[0].numel() * unit.itemsize
        if not whole and end + size > slot_bytes:
            piece, end = piece + (end > 0), 0
        parts.append(BlockPart(unit, layer, end, group=piece, record=piece))
        end += size
    return EngineBlocks(parts, slot_bytes)


def _runs(unit: "torch.Tensor", length: int) -> "list[torch.Tensor]":
    """`[pages, numbers]` in runs of at most so many numbers."""
    return [unit[:, start : start + length] for start in range(0, unit.shape[1], length)]


def _ordered(buffer: "torch.Tensor", page_size: int, tokens: int | None, order: tuple[int, ...]) -> "torch.Tensor":
    """`[pages, layers, …]`."""
    if tokens is not None:
        sizes = list(buffer.shape)
        sizes[tokens : tokens + 1] = [-1, page_size]
        buffer = buffer.view(sizes)
    return buffer.permute(order)


def _keys_and_values(pool: Any, tokens: int | None, order: tuple[int, ...]) -> tuple["Tensors", list[int]]:
    if pool.head_dim != pool.v_head_dim:
        raise _refused(f"heads of {pool.head_dim} (K) and {pool.v_head_dim} (V) in one buffer", "use another layout")
    pages = _ordered(pool.kv_buffer, pool.page_size, tokens, order)
    layers = range(pages.shape[1])
    return [pages[:, layer, kv] for layer in layers for kv in (0, 1)], [layer for layer in layers for _ in (0, 1)]


def _unequal_keys_and_values(pool: Any, tokens: int | None, order: tuple[int, ...]) -> tuple["Tensors", list[int]]:
    both = [_ordered(buffer, pool.page_size, tokens, order) for buffer in pool.kv_buffer]
    layers = range(both[0].shape[1])
    return [pages[:, layer] for layer in layers for pages in both], [layer for layer in layers for _ in both]


def _latents(pool: Any, tokens: int | None, order: tuple[int, ...]) -> tuple["Tensors", list[int]]:
    pages = _ordered(pool.kv_buffer, pool.page_size, tokens, order)
    layers = range(pages.shape[1])
    return [pages[:, layer] for layer in layers], list(layers)


def _indexes(pool: Any, _: int | None, order: tuple[int, ...]) -> tuple["Tensors", list[int]]:
    pages = pool.index_k_with_scale_buffer.permute(order)
    layers = range(pages.shape[1])
    return [pages[:, layer] for layer in layers], list(layers)


def _states(pool: Any, *_: object) -> tuple["Tensors", list[int]]:
    """Recurrent layers' states, layer by layer; then a slot's other state, which belongs to no layer."""
    kept = [buffer for buffer in (pool.temporal_buffer, *pool.conv_buffer) if buffer.numel()]
    layers = range(kept[0].shape[1])
    units = [buffer[:, layer].flatten(1) for layer in layers for buffer in kept]
    others = [buffer.flatten(1) for buffer in pool.slot_state_buffers]
    return [*units, *others], [*(layer for layer in layers for _ in kept), *(0 for _ in others)]


_UnitViews = Callable[[Any, int | None, tuple[int, ...]], tuple["Tensors", list[int]]]
# Exactly these: a subclass may have other or more data.
_KINDS: Final[dict[str, tuple[_LayoutTable, _UnitViews]]] = {
    "MHATokenToKVPoolHost": (_MHA, _keys_and_values),
    "AsymmetricMHATokenToKVPoolHost": (_UNEQUAL, _unequal_keys_and_values),
    "MLATokenToKVPoolHost": (_MLA, _latents),
    "DSAIndexerPoolHost": (_INDEX, _indexes),
    "MambaPoolHost": (_STATES, _states),
}


def _refused(what: str, fix: str) -> ConfigError:
    return ConfigError(f"SGLang: {what}: kvtier cannot store that; {fix}, or another storage backend")

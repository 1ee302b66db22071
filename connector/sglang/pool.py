"""Where SGLang's host pools keep their pages, as strided views: a memory layout is a permutation of dimensions."""

from typing import TYPE_CHECKING, Any, Final

from kvtier.tiers import ConfigError
from kvtier.tiers.copies import BlockPart, EngineBlocks
from kvtier.tiers.naming import DTYPE_BYTES, KVShape

if TYPE_CHECKING:
    import torch

# layout → the dimension that holds all tokens (to be split into pages and their tokens; None: it is split already), and
# the order of dimensions that makes a canonical block of each page: [pages, layers, K or V, tokens, heads, elements].
_MHA: Final[dict[str, tuple[int | None, tuple[int, ...]]]] = {
    "layer_first": (2, (2, 1, 0, 3, 4, 5)),  # [2, layers, tokens, heads, elements]
    "page_first": (1, (1, 3, 0, 2, 4, 5)),  # [2, tokens, layers, heads, elements]
    "page_first_direct": (None, (1, 2, 0, 3, 4, 5)),  # [2, pages, layers, tokens, heads, elements]
    "page_head": (None, (1, 4, 0, 3, 2, 5)),  # [2, pages, heads, tokens, layers, elements]
    "page_unified": (None, (0, 2, 3, 4, 1, 5, 6)),  # [pages, groups, layers, 2, tokens, heads of a group, elements]
}
_MLA: Final[dict[str, tuple[int | None, tuple[int, ...]]]] = {
    "layer_first": (1, (1, 0, 2, 3, 4)),  # [layers, tokens, 1, elements]
    "page_first": (0, (0, 2, 1, 3, 4)),  # [tokens, layers, 1, elements]
    "page_first_direct": (None, (0, 1, 2, 3, 4)),  # [pages, layers, tokens, 1, elements]
    "page_unified": (None, (0, 1, 2, 3)),  # [pages, layers, tokens, elements]
}
# Exactly these: a subclass keeps something else, or something more.
_KINDS: Final = {"MHATokenToKVPoolHost": _MHA, "MLATokenToKVPoolHost": _MLA}


def is_latent(pool: Any) -> bool:
    """Whether the pool keeps one latent a token (MLA) and not K and V."""
    return type(pool).__name__ == "MLATokenToKVPoolHost"


def pool_shape(pool: Any) -> KVShape:
    """The shape of one page. ConfigError in one line for a pool that canonical blocks cannot be made of."""
    kind = type(pool).__name__
    if kind not in _KINDS:
        raise _refused(f"host pool {kind}", f"pages of {', '.join(_KINDS)} can be stored")
    layouts = _KINDS[kind]
    if pool.layout not in layouts:
        raise _refused(f"layout {pool.layout!r} of {kind}", f"use --hicache-mem-layout {' or '.join(layouts)}")
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise _refused(f"KV dtype {dtype}", f"use --kv-cache-dtype auto with a model of {', '.join(DTYPE_BYTES)}")
    if pool.storage_format_tag is not None:
        raise _refused(f"page format {pool.storage_format_tag!r}", "switch off what changes it")
    num_layers = pool.end_layer - pool.start_layer
    if pool.layer_num != num_layers:
        raise _refused(f"{pool.layer_num} layers in the pool of {num_layers}", "switch off the draft model")
    if pool.kv_buffer is None:
        raise _refused("a host pool without memory", "let every rank keep its own host pool")
    if is_latent(pool):
        return KVShape(num_layers, 1, pool.kv_cache_dim, pool.page_size, dtype, num_kv=1)
    if pool.head_dim != pool.v_head_dim:
        raise _refused(f"heads of {pool.head_dim} (K) and {pool.v_head_dim} (V)", "use a model where they are equal")
    return KVShape(num_layers, pool.head_num, pool.head_dim, pool.page_size, dtype)


def pool_blocks(pool: Any, shape: KVShape) -> EngineBlocks:
    """The pool's pages as blocks: a part for K and one for V of each layer, views of the pool's memory.

    In a slot they make up the canonical block, `shape.block_shape`.
    """
    tokens, order = _KINDS[type(pool).__name__][pool.layout]
    pages: torch.Tensor = pool.kv_buffer
    if tokens is not None:
        sizes = list(pages.shape)
        sizes[tokens : tokens + 1] = [-1, shape.block_size]
        pages = pages.view(sizes)
    pages = pages.permute(order)
    if is_latent(pool):
        pages = pages.unsqueeze(2)  # K or V: neither, once
    part_bytes = shape.layer_bytes // shape.num_kv
    return EngineBlocks(
        [
            BlockPart(pages[:, layer, kv], layer, (layer * shape.num_kv + kv) * part_bytes)
            for layer in range(shape.num_layers)
            for kv in range(shape.num_kv)
        ],
        shape.block_bytes,
    )


def _refused(what: str, fix: str) -> ConfigError:
    return ConfigError(f"SGLang: {what}: kvtier cannot store that; {fix}, or another storage backend")

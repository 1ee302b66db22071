"""What of a rank's pages is a block each: with `[cache] share_across_tp`, the heads and layers of a smaller rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier.connector.sglang.pool import PoolPages
from kvtier.tiers import ConfigError
from kvtier.tiers.config import CacheConfig

Stages = Callable[[int, int, int], tuple[int, int]]
"""SGLang's `get_pp_indices`: number of layers, stage, number of stages → first layer, and the one after the last."""

_VIEW: Final = 4  # dimensions of a unit whose heads can be cut: [pages, tokens, heads, elements]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a model's KV that one rank of `tp_size` × `pp_size` has. All ranges are half-open."""

    tp_ranks: tuple[int, int]
    tp_size: int
    stage: int
    pp_size: int
    heads: tuple[int, int]  # of the pool
    layers: tuple[int, int]  # of the model

    @property
    def num_ranks(self) -> int:
        """How many of them divide memory and disk."""
        return self.pp_size * (self.tp_size // (self.tp_ranks[1] - self.tp_ranks[0]))

    def of(self, pages: PoolPages, pool: Any) -> PoolPages:
        """The piece of the pool's pages, as views."""
        own = [number for number, layer in enumerate(pages.layers) if layer + pool.start_layer in range(*self.layers)]
        first, layers = self.layers[0] - pool.start_layer, [pages.layers[number] for number in own]
        units = [pages.units[number] for number in own]
        if not pages.is_latent and self.heads != (0, pool.head_num):
            units = [unit[:, :, slice(*self.heads)] for unit in units]
        return replace(pages, units=units, layers=[layer - first for layer in layers])


def pieces_of(
    storage: Any, pool: Any, pages: PoolPages, cache: CacheConfig, configuration: Mapping[str, Any], stages: Stages
) -> list[Piece]:
    """The pieces of this rank's pages; one, unless `cache` names sizes. ConfigError for a pool that cannot be cut so.

    Every rank of an MLA model has all of its KV, so it is the only one whatever the size.
    """
    tp, pp = cache.share_across_tp, cache.share_across_pp
    own_layers = pool.start_layer, pool.end_layer
    num_heads = 1 if pages.is_latent else pool.head_num
    whole = Piece(
        (storage.tp_rank, storage.tp_rank + 1), storage.tp_size, storage.pp_rank, storage.pp_size,
        (0, num_heads), own_layers,
    )  # fmt: skip
    if storage.is_mla_model:
        whole = replace(whole, tp_ranks=(0, 1), tp_size=1)
    if tp is None and pp is None:
        return [whole]
    text = configuration.get("text_config") or configuration
    of_layers = [whole] if pp is None else _cut(whole, pp, int(text.get("num_hidden_layers") or pool.end_layer), stages)
    if tp is None or storage.is_mla_model:
        return of_layers
    total = int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 0)
    cuts = tp // storage.tp_size
    problem = f"[cache] share_across_tp {tp}"
    if tp % storage.tp_size:
        raise ConfigError(f"{problem}: --tp-size {storage.tp_size} does not divide it; use a multiple")
    if pool.head_num * storage.tp_size != total:
        raise ConfigError(f"{problem}: ranks have equal heads, {pool.head_num} of {total} each; leave it out")
    if pool.head_num % cuts or any(unit.dim() != _VIEW for unit in pages.units):
        fix = f"use a number that divides the {total} KV heads, and --hicache-mem-layout page_first_direct"
        raise ConfigError(f"{problem}: {pool.head_num} heads a rank as {pool.layout} cannot be cut so; {fix}")
    width = pool.head_num // cuts
    return [
        replace(each, tp_ranks=(rank, rank + 1), tp_size=tp, heads=(cut * width, (cut + 1) * width))
        for each in of_layers
        for cut in range(cuts)
        for rank in [storage.tp_rank * cuts + cut]
    ]


def _cut(whole: Piece, pp_size: int, num_layers: int, stages: Stages) -> list[Piece]:
    """The piece in those of `pp_size` stages. ConfigError if a border of its layers is within one of theirs."""
    try:
        borders = [stages(num_layers, stage, pp_size) for stage in range(pp_size)]
    except ValueError as error:  # SGLANG_PP_LAYER_PARTITION
        raise ConfigError(f"[cache] share_across_pp {pp_size}: {error}; leave it out") from None
    first, end = whole.layers
    found = [(stage, border) for stage, border in enumerate(borders) if first <= border[0] < border[1] <= end]
    if sum(border[1] - border[0] for _, border in found) != end - first:
        fix = f"use a multiple of --pp-size {whole.pp_size} that divides them"
        raise ConfigError(f"[cache] share_across_pp {pp_size}: it cuts {num_layers} layers elsewhere; {fix}")
    return [replace(whole, stage=stage, pp_size=pp_size, layers=border) for stage, border in found]

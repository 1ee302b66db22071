"""In which order a slot holds a layer's heads and tokens: one for every backend, or that of vLLM's own memory."""

import logging
from typing import Any, Final

from kvtier.connector.vllm.options import Order
from kvtier.connector.vllm.slots import SlotPlan
from kvtier.tiers import ConfigError

_log = logging.getLogger(__name__)

_TOKENS_FIRST: Final = ("LBNHC", "BLNHC")  # vLLM's names of layouts whose blocks are [tokens, heads, content]


def slot_order(order: Order, vllm_config: Any, kv_cache_config: Any) -> str:
    """The order's name, the same in both halves: it is part of the blocks' identity.

    Whatever it is, slots hold exactly that order; if vLLM's memory has it, a layer of a block is one run. ConfigError
    if vLLM's own order is asked for, and vLLM does not say which it is.
    """
    if order == "head-token":
        return order
    layout = _layout_of(vllm_config, kv_cache_config)
    if layout is None:
        fix = "leave order out"
        raise ConfigError(f"kv_connector_extra_config, order {order!r}: this vLLM does not name its KV layout; {fix}")
    return "token-head" if layout in _TOKENS_FIRST else "head-token"


def warn_of_order(plan: SlotPlan, vllm_config: Any, kv_cache_config: Any) -> None:
    """Say once what a transpose would be spared by."""
    layout = _layout_of(vllm_config, kv_cache_config)
    if layout in _TOKENS_FIRST and plan.order == "head-token" and not plan.canonical:
        spared = 'every block is transposed; "order": "physical" keeps it so, under other names'
        _log.info("vLLM keeps KV as %s, so %s", layout, spared)


def _layout_of(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """vLLM's name of its KV layout. Its engine core chooses one for all layers before it makes any connector."""
    for config in (kv_cache_config, vllm_config.cache_config):
        if (layout := getattr(config, "kv_cache_layout", None)) is not None:
            return str(getattr(layout, "name", layout))
    return None

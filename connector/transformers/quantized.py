"""Quantized caches: loaded tokens are quantized with the rest of the prompt, and its exact KV are kept aside."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache


def quantized_cache(model: Any, loaded: DynamicCache, settings: Mapping[str, Any] | None) -> QuantizedCache:
    """The cache that `generate` makes of `cache_config` settings, for a prompt that goes on behind what is loaded.

    The prompt's first pass attends to exact KV and has all of it quantized at once, as if it computed all. In this
    pass `loaded` is given the rest of the prompt, exact. Nothing is added to it later.
    """
    options = {"config": model.config.get_text_config(decoder=True), **copy.deepcopy(dict(settings or {}))}
    cache = QuantizedCache(backend=options.pop("backend", "quanto"), **options)
    layers: Any = cache.layers
    for number, layer in enumerate(layers):
        _join(layer, loaded, number)
    return cache


def _join(layer: Any, loaded: DynamicCache, number: int) -> None:
    update = layer.update

    def first(keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        del layer.update  # the class's own again
        layer.cumulative_length = 0
        return update(*loaded.update(keys, values, number), *arguments, **options)

    layer.cumulative_length = loaded.get_seq_length(number)  # the mask and the prompt's rest are made after it
    layer.update = first

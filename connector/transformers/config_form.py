"""The `CacheForm` of a configuration alone: without weights, and without memory for the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers import __version__ as version

from kvtier.connector.models import dtype_of
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.connector.transformers.config_file import CONFIG_FIX, fields_of, read_config
from kvtier.tiers import ConfigError

_NEEDED: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size")  # a library's default does not count
_REAL_BYTES: Final = 2 << 30  # weights of a model that is run in real memory if it cannot be run without


def form_of_config(path: Path, block_size: int, dtype: str = "auto") -> tuple[str, CacheForm]:
    """The kind of the model whose config.json is at `path` (the file or its directory), and its blocks' form.

    The model is made without memory and run on a few tokens, so that its form is the same as in `KVTier` and the
    engine. `dtype` "auto" is the configuration's own. ConfigError names the field that is missing or wrong.
    """
    file, raw = read_config(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:
        known = f"model_type {raw['model_type']!r:.60}, by transformers {version}"
        raise ConfigError(f"{file}: {known}: {' '.join(str(error).split())[:300]}; {CONFIG_FIX}") from None
    if getattr(config, "is_encoder_decoder", False):
        fix = "name a decoder's"
        raise ConfigError(f"{file}: is_encoder_decoder: K and V also depend on the encoder's text; {fix}")
    text = config.get_text_config(decoder=True)
    _require_told(file, raw, text)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # of the weights only: KV has the compute dtype
    wanted = dtype_of(config, dtype)
    auto: Any = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    try:
        return config.model_type, replace(_tried(auto, config, wanted), block_size=block_size)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (
        ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        raise ConfigError(f"{file}: no model can be made of it ({reason}); {CONFIG_FIX}") from None


def _tried(auto: Any, config: PretrainedConfig, dtype: torch.dtype) -> CacheForm:
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype)
    try:
        return CacheForm.of(model, 1)
    except ConfigError:
        # A few kinds read computed values, which do not exist then; others have no such kernel in fp32.
        if sum(weight.nbytes for weight in model.parameters()) > _REAL_BYTES:
            raise
        return CacheForm.of(auto.from_config(config, dtype=dtype), 1)


def _require_told(file: Path, raw: Mapping[str, Any], text: PretrainedConfig) -> None:
    """ConfigError if the file lacks a field that determines the size of its KV: a default is another model's."""
    names = {name for name, _ in fields_of(raw)}
    renamed: Mapping[str, str] = getattr(text, "attribute_map", {})
    for name in _NEEDED:
        own = renamed.get(name, name)
        if hasattr(text, name) and names.isdisjoint((name, own)):
            raise ConfigError(f"{file}: {own}: missing; {CONFIG_FIX}")

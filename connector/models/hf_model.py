"""Reads from a transformers model what its KV depends on: the shape of its blocks, and its identity."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvtier.connector.models.checkpoint import config_digest_of, revision_of, weight_files
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import DTYPE_BYTES, KVShape, ModelIdentity, config_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that keep K and V
_OTHERS: Final = "docs/models.md lists the models that are kept; leave kvtier out for this one"


def kv_shape(model: "PreTrainedModel", block_size: int) -> KVShape:
    """The shape of a model's blocks, if all its layers keep K and V of one shape.

    Raises ConfigError for another model: a compressed cache (MLA), a recurrent state, an encoder, or an unknown dtype.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        kind = model.config.model_type
        raise ConfigError(f"model kind {kind!r}: K and V also depend on the encoder's text; {_OTHERS}")
    config: Any = model.config.get_text_config(decoder=True)
    if model._is_stateful:
        kept = "it keeps a state instead of K and V for each token"
        raise ConfigError(f"model kind {config.model_type!r}: {kept}; {_OTHERS}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "kv_lora_rank", None):
        fix = "blocks of vLLM and SGLang hold one latent a token: use kvtier with these"
        raise ConfigError(f"model kind {config.model_type!r}: K and V differ in shape (MLA); {fix}")
    if odd := sorted(kinds - _ATTENTION):
        kept = f"layers of kind {', '.join(odd)} do not keep K and V for each token"
        raise ConfigError(f"model kind {config.model_type!r}: {kept}; {_OTHERS}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(f"model kind {config.model_type!r}: layers share K and V; {_OTHERS}")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype}: blocks are made of {', '.join(DTYPE_BYTES)}; load the model in one of these")
    heads = {_heads(layer) for layer in getattr(config, "per_layer_config", None) or [config]}
    if len(heads) > 1:
        raise ConfigError(f"model kind {config.model_type!r}: layers whose K and V differ in shape; {_OTHERS}")
    [(num_kv_heads, head_dim)] = heads
    return KVShape(config.num_hidden_layers, num_kv_heads, head_dim, block_size, dtype)


def _heads(config: Any) -> tuple[int, int]:
    """How many heads of K and V a layer's cache has, and of how many dimensions."""
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    if config.model_type == "falcon":  # transformers repeats grouped heads before it caches them
        num_kv_heads = 1 if config.multi_query and not config.new_decoder_architecture else num_heads
    return num_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // num_heads


def identity_of(
    model: "PreTrainedModel", name: str, shape: KVShape, *, hash_scheme: str, epoch: int, exact_rows: int | None = None
) -> ModelIdentity:
    """Everything its KV depends on. Reads all weights. Raises ConfigError if RoPE depends on the length.

    A model that still equals its checkpoint directory is named after that, as by every engine. Any other model is named
    after its own weights. `exact_rows` names the engine's exact mode, whose KV differs in the last bits.
    """
    path = Path(model.name_or_path) if model.name_or_path else None
    if path is not None and path.is_dir() and is_checkpoint(model, path):
        revision, digest = revision_of(path), config_digest_of(path)
    else:
        revision = f"xxh3:{weights_digest(model.state_dict(keep_vars=False).items())}"
        digest = config_digest(model.config.to_dict())
    return ModelIdentity(
        model=name,
        revision=revision,
        config_digest=digest,
        dtype=shape.dtype,
        kv_dtype=shape.dtype,
        compute_dtype=shape.dtype if exact_rows is None else f"{shape.dtype}/exact-{exact_rows}",
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        layers=tuple(range(shape.num_layers)),
        hash_scheme=hash_scheme,
        epoch=epoch,
    )


def is_checkpoint(model: "PreTrainedModel", path: Path) -> bool:
    """Whether the model's configuration and weights are those of a directory of safetensors files."""
    files = weight_files(path)
    if not files or files[0].suffix != ".safetensors":
        return False
    saved: Any = type(model.config).from_pretrained(path)
    if config_digest(saved.to_dict()) != config_digest(model.config.to_dict()):
        return False
    weights = dict(model.state_dict(keep_vars=False))
    found = set[tuple[int, int]]()
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in weights.keys() & set(tensors.keys()):
                    weight, stored = weights[name], tensors.get_tensor(name)
                    if not torch.equal(weight.detach().cpu(), stored.to(weight.dtype)):
                        return False
                    found.add(_place(weight))
    except (OSError, SafetensorError):
        return False
    return all(_place(weight) in found for weight in weights.values())  # tied weights are saved once


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """xxh3-128 (hex) over names, shapes and bytes of the weights; weights that share memory are read once."""
    digest, seen = xxhash.xxh3_128(), set[tuple[int, int]]()
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if (place := _place(tensor)) not in seen:
            seen.add(place)
            digest.update(memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()

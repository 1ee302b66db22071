"""The identity of a transformers model: everything its KV depends on."""

import hashlib
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvtier.connector.models.checkpoint import config_digest_of, file_stamps, revision_of, weight_files
from kvtier.connector.models.computes import LiveModel, base_state
from kvtier.connector.models.hf_versions import SHORT_ROPE, rope_limit
from kvtier.connector.models.ordinary import bytes_of
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import DTYPE_BYTES, KVShape, ModelIdentity, config_digest

_REMOTE: Final = "transformers_modules"  # the package of checkpoints' own code
_UNQUANTISED: Final = "load the model unquantised, or as a checkpoint whose quantised weights are plain tensors"
_UNDIVIDED: Final = "KVTier has no ranks: load the whole model in one process, without tp_plan"
_ALL_IN_MEMORY: Final = 'load the whole model into memory (a device_map without "disk", and no meta device)'

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def identity_of(
    model: "PreTrainedModel | LiveModel",
    name: str,
    shape: KVShape,
    *,
    hash_scheme: str,
    epoch: int,
    exact_rows: int | None = None,
) -> ModelIdentity:
    """Everything a model's KV depends on, for texts within `rope_limit`, except its `variant`. Reads all weights.

    ConfigError for unknown RoPE, and as `weights_of`.

    A model that equals its checkpoint directory is named after that, the same in every engine. Any other is named after
    its own weights. `exact_rows`: the engine's exact mode, whose KV differs in the last bits.
    """
    live = model if isinstance(model, LiveModel) else live_model(model)
    revision, digest = live.weights_name
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
        rope_factor=None if rope_limit(live.model.config) is None else SHORT_ROPE,
        layers=tuple(range(shape.num_layers)),
        hash_scheme=hash_scheme,
        epoch=epoch,
    )


def live_model(model: "PreTrainedModel", label: str | None = None, settled: Collection[str] = ()) -> LiveModel:
    """The model as it computes now, with its weights' name. Reads all weights. Arguments as `LiveModel`."""
    return LiveModel(model, lambda: weights_name(model), label, settled)


def weights_name(model: "PreTrainedModel") -> tuple[str, str]:
    """`revision` and `config_digest` of the model's own weights as they are now, without adapters. Reads all."""
    path, code = Path(model.name_or_path or "/"), _code_of(model)
    names = _names_of_checkpoint(model)
    if names is None:
        names = f"xxh3:{weights_digest(weights_of(model).items())}", config_digest(model.config.to_dict())
    elif code <= {hashlib.sha256(file.read_bytes()).hexdigest() for file in path.glob("*.py")}:
        return names  # which cover that code
    if not code:
        return names
    return f"sha256:{hashlib.sha256(' '.join([names[0], *sorted(code)]).encode()).hexdigest()}", names[1]


def _code_of(model: "PreTrainedModel") -> set[str]:
    """The SHA-256 of each file of a checkpoint's own code that computes in the model (`trust_remote_code`)."""
    packages = {kind.__module__.rpartition(".")[0] for kind in {type(each) for each in model.modules()}}
    ours = tuple(f"{each}." for each in packages if each.partition(".")[0] == _REMOTE)
    files = {vars(each).get("__file__") for name, each in list(sys.modules.items()) if ours and name.startswith(ours)}
    try:
        return {hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file is not None}
    except OSError as error:
        raise ConfigError(f"the model's own code cannot be read ({error}); load the model anew") from None


def _names_of_checkpoint(model: "PreTrainedModel") -> tuple[str, str] | None:
    """Revision and configuration digest of the directory it was loaded from; None if it differs from that, or changes.

    The files must not change between comparison and naming, though nothing prevents other processes from writing.
    """
    path = Path(model.name_or_path) if model.name_or_path else None
    if path is None or not path.is_dir():
        return None
    try:
        stamps = file_stamps(path)
        if not is_checkpoint(model, path):
            return None
        names = revision_of(path), config_digest_of(path)
        return names if file_stamps(path) == stamps else None
    except OSError:
        return None


def is_checkpoint(model: "PreTrainedModel", path: Path) -> bool:
    """Whether the model's configuration and weights are those of a directory of safetensors files."""
    files = weight_files(path)
    if not files or files[0].suffix != ".safetensors":
        return False
    saved: Any = type(model.config).from_pretrained(path)
    if config_digest(saved.to_dict()) != config_digest(model.config.to_dict()):
        return False
    weights = weights_of(model)
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


def dtype_of(config: "PretrainedConfig", dtype: str) -> torch.dtype:
    """What a model computes in; "auto": what its configuration says, else that of its text model, else float32.

    ConfigError for what blocks cannot hold.
    """
    if dtype == "auto":
        own = (config.dtype, config.get_text_config(decoder=True).dtype)
        return next((each for each in own if isinstance(each, torch.dtype)), torch.float32)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r}: use one of auto, {', '.join(DTYPE_BYTES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights and buffers except adapters', by name, each as a plain tensor. Reads none.

    ConfigError names the first without plain bytes: offloaded ones, and a quantiser's replacements of tensors.
    """
    try:
        weights = base_state(model)
    except Exception as error:  # raised by any module's own code
        why = f"state_dict() raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"{why}; {_UNQUANTISED}") from error
    return {name: _readable(name, weight) for name, weight in weights.items()}


def _readable(name: str, weight: object) -> torch.Tensor:
    plain = _plain(weight)
    if plain is None:
        kind = f"{type(weight).__module__}.{type(weight).__qualname__}"
        why, fix = f"a {kind}, of which no bytes are known", _UNDIVIDED if "DTensor" in kind else _UNQUANTISED
    elif plain.is_meta:
        why, fix = "on the meta device, so its bytes are elsewhere", _ALL_IN_MEMORY
    elif plain.layout is not torch.strided or plain.is_quantized:
        why, fix = f"{plain.layout}, {plain.dtype}, of which no plain bytes are there", _UNQUANTISED
    else:
        return plain
    raise ConfigError(f"weight {name!r}: {why}, and weights without bytes cannot name the KV; {fix}")


def _plain(weight: object) -> torch.Tensor | None:
    """The weight as a plain torch.Tensor; None if it is of another class, whose bytes may have another meaning."""
    if not isinstance(weight, torch.Tensor):
        return None
    try:
        plain = weight.detach()
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return plain if type(plain) is torch.Tensor else None


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """xxh3-128 (hex) over names, shapes and bytes of the weights; weights that share memory are read once."""
    digest, seen = xxhash.xxh3_128(), set[tuple[int, int]]()
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if (place := _place(tensor)) not in seen:
            seen.add(place)
            digest.update(bytes_of(tensor))
    return digest.hexdigest()

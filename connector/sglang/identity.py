"""The identity of SGLang's pages: its arguments, pools, ranks and RoPE, and the checkpoints themselves."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache

from kvtier.connector.models import SHORT_ROPE, config_of, name_of, revision_of
from kvtier.connector.sglang.pieces import Piece
from kvtier.connector.sglang.pool import PoolPages
from kvtier.tiers import ConfigError
from kvtier.tiers.config import engine_variables
from kvtier.tiers.naming import ModelIdentity, config_digest

_LENGTH_ROPE: Final = "length-rope:"  # before a configuration's digest
_ORIGINAL: Final = "original_max_position_embeddings"


def rope_factor(configuration: Mapping[str, Any], digest: str, context_length: int | None) -> float | None:
    """`rope_factor` of an identity. With longrope, one long text gives all of its batch the long RoPE.

    So equal tokens have one KV only if no text can be long. ConfigError if the server's `context_length` allows one.
    None for other kinds of RoPE, which a `ModelIdentity` refuses if they depend on the length.
    """
    if not digest.startswith(_LENGTH_ROPE):
        return None
    text = configuration.get("text_config") or configuration
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    lengths = [int(length) for length in (rope.get(_ORIGINAL), text.get(_ORIGINAL)) if length]
    if rope.get("rope_type", rope.get("type")) != "longrope" or not lengths:
        return None
    limit = min(lengths)
    if context_length is None or context_length > limit:
        problem = f"SGLang computes texts beside one of more than {limit} tokens with another RoPE"
        raise ConfigError(f"longrope: {problem}; start with --context-length {limit}")
    return SHORT_ROPE


HASH_SCHEME: Final = "sglang"  # `key_schemes.sglang_hashes`
_OF_ALL_RANKS: Final = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost")  # the same bytes on every rank


_ELSEWHERE: Final = ("ipc_cache", "private", "rdma", "remote", "remote_instance")
_SETTINGS: Final = (  # change what SGLang computes with the same weights
    *("custom_weight_loader", "deepep_dispatcher_output_dtype", "dllm_algorithm", "enable_decoder_swa_bounded_replay"),
    *("enable_encoder_swa_bounded_replay", "enable_quant_communications", "enable_w4a4_mxfp4_megamoe"),
    *("flashinfer_a2a_dispatch_type", "flashinfer_mxfp4_moe_precision", "forward_hooks", "hisparse_config"),
    *("model_config_parser", "modelopt_quant", "prefill_kv_cache_dequant_dtype", "quantize_and_serve"),
)
_FILES: Final = ("dllm_algorithm_config", "kt_weight_path", "modelopt_checkpoint_restore_path", "rl_quant_profile")
_USUAL: Final = (None, False, "auto", "default")


def _computes(args: Any) -> str:
    """What else than the checkpoint and its dtype decides what SGLang computes; empty as it usually is started."""
    given = {name: value for name in _SETTINGS if (value := getattr(args, name, None)) not in _USUAL}
    given |= {name: _content(Path(path)) for name in _FILES if (path := getattr(args, name, None))}
    if "kt_weight_path" in given:
        given |= {name: getattr(args, name, None) for name in ("kt_method", "kt_num_gpu_experts")}
    return engine_variables("SGLANG_") + "".join(f" {name}={value}" for name, value in given.items())


def _content(path: Path) -> str:
    """A digest of weights in a directory, or of a file. ConfigError if there is neither."""
    if path.is_dir():
        return revision_of(path)
    if not path.is_file():
        raise ConfigError(f"SGLang: {str(path)!r}: no such file; give the path of what the server reads")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def configuration_of(args: Any) -> dict[str, Any]:
    """The checkpoint's configuration as SGLang's arguments `args` change it. ConfigError for unnamed weights."""
    if args.load_format == "dummy":
        raise ConfigError("--load-format dummy: random weights have no name to store after; save them, serve those")
    if args.load_format in _ELSEWHERE or getattr(args, "weight_cache_mode", None) == "client":
        fix = "leave --load-format and --weight-cache-mode out"
        raise ConfigError(f"--load-format {args.load_format}: weights from elsewhere than the checkpoint; {fix}")
    directory = _checkpoint(args.model_path, args.revision, args.download_dir)
    file = getattr(args, "decrypted_config_file", None) or "config.json"
    return {**config_of(directory, file.strip()), **json.loads(args.json_model_override_args or "{}")}


def model_identity(args: Any, pool: Any, pages: PoolPages, slot_bytes: int, epoch: int, piece: Piece) -> ModelIdentity:
    """The identity of a piece of the pages of SGLang's first pool; `args`: the server's. As `configuration_of`."""
    configuration = configuration_of(args)
    directory = _checkpoint(args.model_path, args.revision, args.download_dir)
    dtype = str(configuration.get("dtype") or configuration.get("torch_dtype") or pages.dtype)
    digest = config_digest(configuration)
    return ModelIdentity(
        model=name_of(directory),
        revision=revision_of(directory, args.load_format),
        config_digest=digest,
        rope_factor=rope_factor(configuration, digest, args.context_length),
        dtype=dtype,
        kv_dtype=pages.dtype,
        compute_dtype=(dtype if args.dtype == "auto" else args.dtype) + _computes(args),
        quantization=args.quantization,
        num_kv_heads=piece.heads[1] - piece.heads[0],
        head_dim=pool.kv_cache_dim if pages.is_latent else pool.head_dim,
        block_size=pages.page_size,
        layers=tuple(range(*piece.layers)),
        kind="mla" if pages.is_latent else "full",
        layout=_layout(args, pool, pages, slot_bytes) + _adapters(args),
        tp_ranks=piece.tp_ranks,
        tp_size=piece.tp_size,
        pp_stages=(piece.stage, piece.stage + 1),
        pp_size=piece.pp_size,
        hash_scheme=HASH_SCHEME,
        epoch=epoch,
    )


def pool_text(storage: Any, args: Any, name: str, pages: PoolPages) -> str:
    """A further pool's name in the names of its records, with everything that changes its bytes besides the model."""
    text = f"{name} {pages.text}{_kv_format(args)}"
    if name.startswith("draft"):
        text += _draft(args)
    if pages.kind not in _OF_ALL_RANKS and shares_kv(storage):  # a state, or K and V of a draft model
        text += f" rank {storage.tp_rank} of {storage.tp_size}"
    return text


def shares_kv(storage: Any) -> bool:
    """Whether every tensor-parallel rank has the whole KV, so that only the first one stores it."""
    return bool(storage.is_mla_model and storage.tp_size > 1)


def _layout(args: Any, pool: Any, pages: PoolPages, slot_bytes: int) -> str:
    """The canonical block, and how this pool's pages differ from it."""
    text = "block-first" + _kv_format(args)
    if not pages.is_latent and pool.v_head_dim != pool.head_dim:
        text += f" values {pool.v_head_dim}"
    if (num_layers := len(set(pages.layers))) != pool.end_layer - pool.start_layer:
        text += f" layers {num_layers}"
    if getattr(pool, "target_layer_num", num_layers) != num_layers:  # a draft model's layers follow the model's own
        text += _draft(args)
    if slot_bytes != pages.page_bytes:
        text += f" slots {slot_bytes}"
    return text


def _kv_format(args: Any) -> str:
    """SGLang's KV quantisation; empty without it."""
    dtype = getattr(args, "kv_cache_dtype", "auto")
    scales = getattr(args, "quantization_param_path", None)
    text = "" if dtype == "auto" else f" {dtype}"
    return text if scales is None else f"{text} scales {_digest(Path(scales))}"


def _draft(args: Any) -> str:
    """The draft model: its checkpoint, and how it drafts."""
    path = args.speculative_draft_model_path or args.model_path
    directory = _checkpoint(path, args.speculative_draft_model_revision, args.download_dir)
    parts = (args.speculative_algorithm, args.speculative_draft_kv_cache_dtype, revision_of(directory))
    return f" draft {' '.join(map(str, parts))} {config_digest(config_of(directory))}"


def _adapters(args: Any) -> str:
    """The weights of `--lora-paths`: SGLang names the pages of such an adapter by its name and path, at each start.

    Pages of adapters that are loaded later get random names.
    """
    named = sorted(
        f"{each.lora_name} {revision_of(_checkpoint(each.lora_path, None, args.download_dir, '--lora-paths'))}"
        for each in getattr(args, "lora_paths", None) or ()
    )
    return f" adapters {hashlib.sha256(json.dumps(named).encode()).hexdigest()}" if named else ""


def _digest(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"--quantization-param-path {str(path)!r}: no such file; give the scales' JSON file")
    scales: Mapping[str, object] = json.loads(path.read_text())
    return config_digest(scales)


def _checkpoint(name: str, revision: str | None, downloads: str | None, option: str = "--model-path") -> Path:
    """The directory of a checkpoint, or of a hub's snapshot in the local cache; of an adapter for `--lora-paths`."""
    path = Path(name)
    if path.is_dir():
        return path
    file = "config.json" if option == "--model-path" else "adapter_config.json"
    found = try_to_load_from_cache(name, file, cache_dir=downloads, revision=revision)
    if not isinstance(found, str):
        raise ConfigError(f"{option} {name!r}: no checkpoint of that name here; give its directory")
    return Path(found).parent

"""A model's identity, its fingerprint, and the shape of its KV: blocks under different fingerprints never meet."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import msgpack

from kvtier.tiers import LEAST_GROUP, MOST_GROUP, ConfigError, fp8_form

# --- the shape of a block --------------------------------------------------------------------------------------------

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of `block_size` tokens in all layers of one KV group.

    A block is `[num_layers, num_kv, block_size, num_kv_heads, head_dim]` of `dtype`, C-contiguous: the canonical block
    layout, the same in L1, L2 and L3. `num_kv` is 2 (K, V), or 1 if both are read from one latent (MLA).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES
    num_kv: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_kv"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)}: must be at least 1")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, num_kv, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, self.num_kv, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one block."""
        return self.num_kv * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class FlatShape(KVShape):
    """A block that is one row of `num_elements`: its layers differ, and its writer knows the layout."""

    num_elements: int = 0

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (1, 1, 1, 1, self.num_elements)

    @property
    def layer_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where an engine keeps its KV: one base address per layer and the strides, all in bytes.

    Element (block, kv, token, head) of layer i is `head_dim` contiguous elements at
    `bases[i] + block * block_stride + kv * kv_stride + token * token_stride + head * head_stride`.
    """

    bases: Sequence[int]
    block_stride: int
    kv_stride: int
    token_stride: int
    head_stride: int


# --- the identity ----------------------------------------------------------------------------------------------------

FORMAT_VERSION: Final = 2  # of the canonical block layout and of how blocks are named; 1 hashed `model`, too

_FEW: Final = 4  # values of a list that are shown one by one
_SHORT: Final = 80  # characters of a field that are shown
_KINDS: Final = ("full", "sliding", "mla", "state", "encoder")
_REVISION: Final = re.compile(r"([a-z0-9]+:)?[0-9a-f]{16,128}")
_CONFIG_DIGEST: Final = re.compile(r"(length-rope:)?[0-9a-f]{64}")
_LENGTH_ROPE: Final = "length-rope:"

# RoPE whose frequencies are fixed when the model is built. Any other kind ("dynamic", "longrope", one yet unknown) may
# depend on the length of the sequence: then equal tokens don't mean equal KV.
_STATIC_ROPE: Final = frozenset({"axial", "default", "linear", "llama3", "mrope", "proportional", "yarn"})

# Fields of a model's configuration that leave KV alone: names and switches. And the dtype, a field of its own that
# changed its name between transformers 4 and 5.
_NOT_KV: Final = frozenset(
    {"dtype", "name_or_path", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Everything that changes the bytes of one KV group's blocks. ConfigError if a field cannot be right.

    Ranges are half-open. None means "does not apply" and is left out of the fingerprint. So a field added later,
    with None as its default, keeps old fingerprints valid.
    """

    model: str  # its name, for people, and no part of the fingerprint; the next two fields identify it
    revision: str  # commit or digest of the weights, in hex, an "algorithm:" before it allowed; never a branch's name
    config_digest: str  # `config_digest()` of the model's configuration
    dtype: str  # of the weights
    kv_dtype: str  # of the stored KV
    compute_dtype: str
    num_kv_heads: int  # in one block: those of the ranks in `tp_ranks` together
    head_dim: int
    block_size: int  # tokens
    layers: tuple[int, ...]  # global indices of this group's layers, ascending
    kv_scales: tuple[float, ...] | None = None  # of a quantised kv_dtype, K and V per layer
    quantization: str | None = None  # of the weights: method and its settings
    rope_factor: float | None = None  # which one is meant, if RoPE depends on the length: 1.0 is that of short texts
    kind: str = "full"  # or "sliding", "mla", "state", "encoder": outputs of a model's encoders
    window: int | None = None  # tokens, of a sliding group
    tp_ranks: tuple[int, int] = (0, 1)  # the tensor-parallel ranks whose parts make up a block, in this order
    tp_size: int = 1
    pp_stages: tuple[int, int] = (0, 1)  # the pipeline stages that hold `layers`
    pp_size: int = 1
    forms: tuple[str, ...] | None = None  # each layer's data for each token, if not K and V of one shape
    lossy: str | None = None  # how shared tiers keep the KV, if not exactly (`with_lossy`)
    apart: int | None = (
        None  # a namespace beside the first, if models of this name compute other KV there (`kv_probe.py`)
    )
    layout: str = "block-first"  # [layers, 2, block_size, num_kv_heads, head_dim], C-contiguous
    hash_scheme: str = "sha256"  # "xxh3", or a foreign scheme's name (`key_schemes.py`)
    format_version: int = FORMAT_VERSION
    epoch: int = 0  # raise it to invalidate everything stored so far

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        if self.kind not in _KINDS:
            raise _bad("kind", self.kind, f"use one of {', '.join(_KINDS)}")
        if (self.kind == "sliding") != (self.window is not None):
            raise _bad("window", self.window, f"kind {self.kind!r}: only a sliding group has one, and always")
        if not self.layers or self.layers[0] < 0 or any(a >= b for a, b in pairwise(self.layers)):
            raise _bad("layers", self.layers, "name the group's global layer indices in ascending order")
        for field, size in (("tp_ranks", self.tp_size), ("pp_stages", self.pp_size)):
            first, stop = getattr(self, field)
            if not 0 <= first < stop <= size:
                raise _bad(field, (first, stop), f"give a half-open range within the {size} there are")

    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of all fields but `model` as a msgpack map, its keys sorted, None left out, 2.0 as 2."""
        named = asdict(self)
        del named["model"]
        return hashlib.sha256(msgpack.packb(_normal(named, "identity"))).digest()

    def shown(self) -> dict[str, str]:
        """Each field that applies, for people: short, a long list as its length and a digest."""
        return {name: _short(value) for name, value in asdict(self).items() if value is not None}

    def _check_names(self) -> None:
        for field in ("model", "dtype", "kv_dtype", "compute_dtype", "layout", "hash_scheme"):
            if not getattr(self, field):
                raise _bad(field, "", "give its name")
        if not _REVISION.fullmatch(self.revision):
            fix = "give the commit or the digest of the weights in hex (16 digits or more): a branch's name may move"
            raise _bad("revision", self.revision, fix)
        if not _CONFIG_DIGEST.fullmatch(self.config_digest):
            raise _bad("config_digest", self.config_digest, "give the result of config_digest()")
        if self.config_digest.startswith(_LENGTH_ROPE) and self.rope_factor is None:
            fix = "this model's RoPE depends on the text's length in a way unknown here; leave kvtier out for it"
            raise _bad("rope_factor", None, fix)

    def _check_numbers(self) -> None:
        fields = ("num_kv_heads", "head_dim", "block_size", "tp_size", "pp_size", "format_version")
        for field, least in (*((field, 1) for field in fields), ("window", 1), ("epoch", 0)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise _bad(field, value, f"must be at least {least}")


def config_digest(config: Mapping[str, object]) -> str:
    """SHA-256 (hex) of a model's configuration, with "length-rope:" before it if RoPE depends on the length.

    `config` is the content of `config.json` or of `PretrainedConfig.to_dict()`. Order, tuples for lists, 1.0 for 1 and
    None for nothing make no difference, nor do names and switches that leave KV alone. TypeError names a value that it
    cannot digest.
    """
    digest = hashlib.sha256(msgpack.packb(_normal(_kv_part(config), "config"))).hexdigest()
    return f"{_LENGTH_ROPE}{digest}" if any(kind not in _STATIC_ROPE for kind in _rope_kinds(config)) else digest


def _short(value: object) -> str:
    if not isinstance(value, tuple) or len(value) <= _FEW:
        return (", ".join(map(str, value)) if isinstance(value, tuple) else str(value))[:_SHORT]
    if all(isinstance(one, int) and other == one + 1 for one, other in pairwise(value)):
        return f"{value[0]} to {value[-1]}"
    return f"{len(value)} values, {hashlib.sha256(repr(value).encode()).hexdigest()[:8]}"


def _bad(field: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"model identity, {field} {value!r}: {fix}")


def _kv_part(config: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in _NOT_KV and not key.startswith("_")}


def _normal(value: object, path: str) -> object:
    """The value in its normal form, the same for all ways to write it."""
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
        named = _kv_part(named) if "model_type" in named else named  # a model inside a model
        return {key: _normal(named[key], f"{path}.{key}") for key in sorted(named) if named[key] is not None}
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_normal(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 2**63:
        return float(value)  # 64 bits are what msgpack has
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{path}: no way to digest a {type(value).__name__}; convert the configuration to plain values")


def _rope_kinds(config: Mapping[str, object]) -> set[str]:
    """Every kind of RoPE in the configuration, in parts of a composite model and per layer kind too."""
    kinds: set[str] = set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key in ("rope_scaling", "rope_parameters"):
                kinds |= _scaling_kinds(value)
            else:
                kinds |= _rope_kinds(value)
    return kinds


def _scaling_kinds(scaling: Mapping[str, object]) -> set[str]:
    kind = scaling.get("rope_type", scaling.get("type"))
    kinds = {str(kind)} if kind is not None else set()
    for value in scaling.values():
        if isinstance(value, Mapping):  # transformers 5: one for each kind of layer
            kinds |= _scaling_kinds(value)
    return kinds


# --- KV kept as fp8 --------------------------------------------------------------------------------------------------

Lossy = Literal["none", "fp8"]

_EXACT: Final = "/exact-"  # in a compute_dtype: in this mode an answer is the same bits, loaded or computed
_FIX: Final = "leave it out"


def with_lossy(identity: ModelIdentity, chosen: Lossy, block_bytes: int, *, unlike: str | None = None) -> ModelIdentity:
    """The identity under `[cache] lossy`: another one, so that no exact engine ever finds this one's blocks.

    `block_bytes`: a block's, in tiers. `unlike` names what in it is no number of `kv_dtype`, if anything is.
    ConfigError if the model's KV cannot be kept so.
    """
    if chosen == "none":
        return identity
    if identity.kv_dtype not in DTYPE_BYTES:
        raise _cannot(chosen, f"kv_dtype {identity.kv_dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if identity.kind not in ("full", "sliding"):
        raise _cannot(chosen, f"kind {identity.kind!r}: latents and recurrent states bear no such loss")
    if identity.forms is not None:
        raise _cannot(
            chosen, f"forms {identity.forms[0]!r}, …: its layers keep something else than K and V of one shape"
        )
    if _EXACT in identity.compute_dtype:
        raise _cannot(chosen, f"compute_dtype {identity.compute_dtype!r}: exact mode promises the same bits")
    if unlike is not None:
        raise _cannot(chosen, unlike)
    group = identity.head_dim & -identity.head_dim  # the largest power of two that divides it
    group = min(group, MOST_GROUP)
    if group < LEAST_GROUP or block_bytes % (group * DTYPE_BYTES[identity.kv_dtype]):
        raise _cannot(chosen, f"head_dim {identity.head_dim}: no groups of {LEAST_GROUP} numbers or more fill it")
    return replace(identity, lossy=fp8_form(identity.kv_dtype, group))


def _cannot(chosen: Lossy, why: str) -> ConfigError:
    return ConfigError(f'[cache] lossy "{chosen}": {why}; {_FIX}')

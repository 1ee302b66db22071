"""The data that a model's cache has per token and as recurrent states: read from a cache that the model filled."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Self

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers import __version__ as version
from transformers import cache_utils as _cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtier.connector.models import cache_option
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.copies import CudaEvent
from kvtier.tiers.host import cuda_driver
from kvtier.tiers.naming import DTYPE_BYTES, FlatShape, KVProbe, KVShape, ModelIdentity


class HostCopy:
    """A tensor's values at this point of the device's work. For a tensor in host memory it is that tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # torch uses pinned memory for such a copy, and keeps it until the device is done with it.
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event: CudaEvent | None = None
        if is_on_gpu(tensor):
            passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(tensor.device)
            passed.record(stream)
            self._event = CudaEvent(cuda_driver())
            self._event.issued(passed, stream)

    def wait(self, timeout: float) -> torch.Tensor | None:
        """The values; None if the device has not copied them in `timeout` seconds, or has failed."""
        if self._event is not None and (not self._event.wait(timeout) or self._event.error is not None):
            return None
        return self._tensor


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


@dataclass(slots=True)
class PassWatch:
    """Checks the model once per pass, when its first tokens arrive. Copies of a cache have watches of their own."""

    root: ChainHash  # of the names of the cache's blocks
    named: Callable[[], ChainHash | None]  # the root of what the model computes now; None: it has no name
    layer: int  # the first one with per-token data
    is_torn: bool = False  # a pass computed something else

    def look(self) -> bool:
        """Whether the model now, and in every pass, computes what the cache's name says."""
        self.is_torn = self.is_torn or self.named() != self.root
        return not self.is_torn

    def __deepcopy__(self, _: Any) -> "PassWatch":
        return replace(self)

    def __reduce__(self) -> Any:
        return type(None), ()  # another process has another model


class WatchedCache(DynamicCache):
    """A cache with a `PassWatch`, set by `TierBlocks.watch`. Compiled passes are not checked: graphs cannot."""

    watch: PassWatch | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> Any:
        if self.watch is not None and layer_idx == self.watch.layer and not torch.compiler.is_compiling():
            self.watch.look()
        return super().update(key_states, value_states, layer_idx, *args, **options)


@cache
def watched(kind: type[DynamicCache]) -> type[DynamicCache]:
    return type(f"Watched{kind.__name__}", (WatchedCache, kind), {"__module__": __name__})


def is_torn(cache: Any) -> bool:
    """Whether a pass into the cache, or the model now, computes something else than the cache's name says."""
    watch: PassWatch | None = getattr(cache, "watch", None)
    return watch is not None and not watch.look()


_MIXIN: Final[Any] = getattr(_cache_utils, "LinearAttentionCacheLayerMixin", ())  # () in older transformers
_KINDS: Final = ("conv_states", "recurrent_states")  # of such a layer: one tensor per state
_OWN: Final = "linear_cache"  # of MiniMax's cache: one tensor per layer
STATES: Final = (*_KINDS, _OWN)
_PIECE: Final = 4 << 20  # most bytes of a record, if there are no blocks that determine the size of slots


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state, `[rows, *shape]` in the cache."""

    layer: int
    kind: str  # one of STATES
    index: int  # among the layer's states of this kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """For the identity: `0.conv_states.0:float32:256x4`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layer}.{self.kind}.{self.index}:{dtype}:{'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class StateForm:
    """All recurrent states of a model after some token: one row's are `num_bytes`, part after part."""

    parts: tuple[StatePart, ...]

    @classmethod
    def of(cls, cache: DynamicCache) -> Self | None:
        """Read it from a cache with tokens; None if no layer has a state."""
        parts = [
            StatePart(layer, kind, index, tuple(tensor.shape[1:]), tensor.dtype)
            for layer, kind, index, tensor in _states(cache)
        ]
        return cls(tuple(parts)) if parts else None

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def name(self) -> str:
        """For the identity: shapes and dtypes of all states."""
        return ",".join(part.name for part in self.parts)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a record, if there are no blocks: equal pieces of at most 4 MiB."""
        num_pieces = math.ceil(self.num_bytes / _PIECE)
        return math.ceil(self.num_bytes / num_pieces / 64) * 64

    def take(self, cache: DynamicCache) -> list[torch.Tensor]:
        """A copy of the current states: each part's rows, on the model's device."""
        tensors = [tensor for _, _, _, tensor in _states(cache)]
        if [tuple(tensor.shape[1:]) for tensor in tensors] != [part.shape for part in self.parts]:
            raise ValueError("the cache keeps other states than it did")
        return [tensor.detach().clone() for tensor in tensors]

    def rows(self, taken: Sequence[torch.Tensor]) -> HostCopy:
        """The result of `take` as bytes, being copied to host memory, `[rows, num_bytes]`."""
        return HostCopy(self.device_rows(taken))

    def device_rows(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same, on the states' device."""
        rows = [tensor.contiguous().view(len(tensor), -1).view(torch.uint8) for tensor in taken]
        return torch.cat(rows, dim=1)

    def put(self, cache: DynamicCache, rows: torch.Tensor, device: torch.device) -> None:
        """Set an empty cache's states from these rows, `[rows, num_bytes]` of bytes."""
        start = 0
        for part in self.parts:
            values = rows[:, start : start + part.num_bytes].clone().view(part.dtype)
            self._put(cache, part, values.view(len(rows), *part.shape).to(device))
            start += part.num_bytes

    def _put(self, cache: Any, part: StatePart, tensor: torch.Tensor) -> None:
        if part.kind == _OWN:
            cache.set_linear_cache(part.layer, tensor)
            return
        layer = cache.layers[part.layer]
        if part.kind == "conv_states":
            layer.update_conv_state(tensor, state_idx=part.index, conv_kernel_size=part.shape[-1])
        else:
            layer.update_recurrent_state(tensor, state_idx=part.index)
        layer.has_previous_state[part.index] = True


def require_known(cache: DynamicCache) -> None:
    """Raise ConfigError if a layer's states are not where this code expects them."""
    layers: Any = cache.layers
    for layer in layers:
        if isinstance(layer, _MIXIN) and not isinstance(getattr(layer, "conv_states", None), dict):
            raise ConfigError("transformers: this version keeps states in another way; pip install -U transformers")


def _states(cache: Any) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    """Layer, kind, index and tensor of each state. A convolution's is cut to its kernel size."""
    own = getattr(cache, _OWN, None) or []
    for number, tensor in enumerate(own):
        if isinstance(tensor, torch.Tensor):
            yield number, _OWN, 0, tensor
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, _MIXIN):
            continue
        for kind in _KINDS:
            for index, tensor in getattr(layer, kind).items():
                if tensor is not None:
                    width = layer.conv_kernel_size[index] if kind == "conv_states" else None
                    yield number, kind, index, tensor if width is None else tensor[..., -width:]


_OWN_CACHE: Final = "MiniMaxCache"  # the one model-specific class with K and V as in others
_KEYS: Final = ("keys", "values", "indexer_keys")  # tensors of a cache layer with a row per token
_NUM_TOKENS: Final = 7  # of the probe; unlikely to be another dimension of a tensor
_FIRST: Final = 4  # of them, also computed alone
_INDEXED: Final = (5, 19)  # from this transformers on indexers work after a prefix: 5.12's select future tokens
_OTHERS: Final = "docs/models.md lists the models that are kept; leave kvtier out for this one"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a cache layer, `[rows, num_heads, tokens, dim]`; with one head also `[rows, tokens, dim]`."""

    name: str  # the attribute of transformers' cache layer
    dim: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's part of a block: `[block_size, num_heads, dim]`, its tensors side by side in `dim`."""

    num_heads: int
    parts: tuple[Part, ...]

    @property
    def dim(self) -> int:
        return sum(part.dim for part in self.parts)

    @property
    def name(self) -> str:
        """For the identity: `2(keys:16)`, or `1(keys:512+values:64)` if two tensors are side by side."""
        return f"{self.num_heads}({'+'.join(f'{part.name}:{part.dim}' for part in self.parts)})"


Layer = tuple[Plane, ...]
"""The planes of one cache layer, in a block's order. Empty: the layer has no per-token data."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The layout of a block: the planes of each layer with per-token data, one after the other.

    A block in host memory is a flat row of `num_elements` of `dtype`. If all these layers have K and V of one shape, or
    all one latent (MLA), it is the canonical block of `shape`, byte for byte. Recurrent states are in slots of the same
    size, cut into pieces. If no layer has per-token data, such pieces are all there is.
    """

    layers: tuple[Layer, ...]  # by the cache's layer number; the last one has per-token data
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES
    states: StateForm | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> Self:
        """Have the model fill a cache with a few tokens, and read its form.

        Raises ConfigError for what blocks cannot hold: an encoder, an unsupported state, another dtype.
        """
        _require_decoder(model)
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            fix = f"blocks are made of {', '.join(DTYPE_BYTES)}; load the model in one of these"
            raise ConfigError(f"dtype {dtype}: {fix}")
        cache = _probe(model)
        require_known(cache)
        kind = model.config.get_text_config(decoder=True).model_type
        if more := sorted({name for layer in cache.layers for name in _unknown(layer)}):
            problem = f"its layers keep {', '.join(more)} beside or instead of K and V for each token"
            raise ConfigError(f"model kind {kind!r}: {problem}; {_OTHERS}")
        try:
            layers = layers_of(cache, 1, _NUM_TOKENS, model)
        except ValueError as error:
            raise ConfigError(f"model kind {kind!r}: of {_NUM_TOKENS} tokens, {error}; {_OTHERS}") from error
        states = StateForm.of(cache)
        if model._is_stateful and states is None:
            problem = "it keeps a state outside of transformers' cache"
            raise ConfigError(f"model kind {kind!r}: {problem}; {_OTHERS}")
        if not layers and states is None:
            raise ConfigError(f"model kind {kind!r}: its cache has no tensor with a row for each token; {_OTHERS}")
        require_causal(model, cache)
        if any(part.name == "indexer_keys" for layer in layers for plane in layer for part in plane.parts):
            _require_indexers(kind)
        return cls(layers, block_size, dtype, states)

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the layers with per-token data."""
        return tuple(number for number, layer in enumerate(self.layers) if layer)

    @property
    def num_elements(self) -> int:
        """In one block, or in a piece of a state if there are no blocks."""
        if not self.layers:
            assert self.states is not None
            return self.states.piece_bytes // DTYPE_BYTES[self.dtype]
        return self.block_size * sum(plane.num_heads * plane.dim for layer in self.layers for plane in layer)

    @property
    def block_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def outline(self) -> KVShape:
        if not self.layers:
            return KVShape(1, 1, 1, self.block_size, self.dtype, 1)
        first = self.layers[self.kept[0]]
        num_kv = 1 if _is_latent(first) else 2
        return KVShape(len(self.kept), first[0].num_heads, first[0].dim, self.block_size, self.dtype, num_kv)

    @property
    def shape(self) -> KVShape | None:
        """The shape of the canonical block, if layers are alike: plain K and V, or one latent each. Else None."""
        if not self.layers:
            return None
        first, *others = [self.layers[number] for number in self.kept]
        alike = all(layer == first for layer in others)
        return self.outline if alike and (_is_plain(first) or _is_latent(first)) else None

    @property
    def pool_shape(self) -> KVShape:
        """The shape of a pool of such blocks: canonical, or of flat rows. A row may be a piece of a state."""
        if (shape := self.shape) is not None:
            return shape
        return FlatShape(1, 1, 1, self.block_size, self.dtype, 1, num_elements=self.num_elements)

    def planes(self, blocks: torch.Tensor) -> Iterator[tuple[int, Plane, torch.Tensor]]:
        """Each plane of flat blocks: its layer's number, and its view `[num_blocks, block_size, num_heads, dim]`."""
        offset = 0
        for number, layer in enumerate(self.layers):
            for plane in layer:
                end = offset + self.block_size * plane.num_heads * plane.dim
                size = (self.block_size, plane.num_heads, plane.dim)
                yield number, plane, blocks[:, offset:end].view(len(blocks), *size)
                offset = end

    def named(self, identity: ModelIdentity) -> ModelIdentity:
        """The identity with every layer's form. That of a model with plain K and V in all layers is unchanged."""
        if self.states is not None:
            layout = f"{identity.layout}/{self.states.name}"
            if not self.layers:
                return replace(identity, kind="state", layout=layout)
            return replace(self._named(identity), kind="state", layout=layout)
        return self._named(identity)

    def _named(self, identity: ModelIdentity) -> ModelIdentity:
        kept = [self.layers[number] for number in self.kept]
        kind = "mla" if all(_is_latent(layer[:1]) for layer in kept) else identity.kind
        if self.shape is not None and _is_plain(kept[0]):
            return replace(identity, layers=self.kept)
        forms = tuple("/".join(plane.name for plane in layer) for layer in kept)
        return replace(identity, layers=self.kept, kind=kind, forms=forms)


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache in which every layer keeps every token; sliding layers too, since their masks slide."""
    own = getattr(sys.modules[type(model).__module__], _OWN_CACHE, None)
    if own is not None:
        return watched(own)()
    cache = WatchedCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[number] = DynamicLayer()  # type: ignore[no-untyped-call]
        elif type(layer) is getattr(_cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None):
            states: Any = layer
            cache.layers[number] = _cache_utils.LinearAttentionAndFullAttentionLayer(states.number_of_states)
    return cache


def probe_of(model: PreTrainedModel, form: CacheForm) -> KVProbe:
    """The KV that the model computes now for a few tokens. ConfigError as `CacheForm.of`."""
    cache = _probe(model)
    layers: Any = cache.layers
    rows = [
        tensor
        for layer, planes in zip(layers, form.layers, strict=False)
        for plane in planes
        for part in plane.parts
        if (tensor := per_token(layer, part.name)) is not None
    ]
    states = form.states.take(cache) if form.states is not None else []
    return KVProbe.of([each.detach().float().cpu().numpy() for each in (*rows, *states)], form.dtype)


def tolerance_of(model: PreTrainedModel) -> float:
    """The relative distance that rounding alone may cause in a token's KV; another computation is off by far more."""
    return 5e-3 if model.dtype is torch.float32 else 0.1


def require_causal(model: PreTrainedModel, known: DynamicCache | None = None) -> None:
    """ConfigError if a token's KV depends on later tokens: then two texts with one beginning have other KV of it.

    Tests it: a few tokens (`known`: their cache) and the first of them alone. Weights on the meta device compute none.
    """
    whole, alone = known or _probe(model), _probe(model, _FIRST)
    for layer, first in zip(whole.layers, alone.layers, strict=True):
        for name in _KEYS:
            wanted, found = per_token(first, name), per_token(layer, name)
            if wanted is None or found is None or wanted.is_meta:
                continue
            expected = wanted[0].float()  # [heads, tokens, dim]
            off = (found[0, :, :_FIRST].float() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
            if float(off.median()) > tolerance_of(model):  # NaN is compared with nothing
                kind = model.config.get_text_config(decoder=True).model_type
                problem = "a token's KV depends on later tokens (attention that is not causal)"
                raise ConfigError(f"model kind {kind!r}: {problem}; leave kvtier out for this one")


def layers_of(cache: DynamicCache, num_rows: int, num_tokens: int, model: PreTrainedModel) -> tuple[Layer, ...]:
    """Each cache layer's planes for these tokens, without trailing layers that have none.

    ValueError if a tensor lacks tokens or rows, or has another dtype than the model.
    """
    config: Any = model.config.get_text_config(decoder=True)
    # MLA: transformers keeps the latent as keys, and the part with RoPE as values. Attention uses them as one.
    latent = [(1, getattr(config, "kv_lora_rank", None)), (1, getattr(config, "qk_rope_head_dim", None))]
    layers: list[Layer] = []
    cached: Any = cache.layers
    for layer in cached:
        tensors = {name: tensor for name in _KEYS if (tensor := per_token(layer, name)) is not None}
        for name, tensor in tensors.items():
            if tensor.shape[0] != num_rows or tensor.shape[2] != num_tokens or tensor.dtype != model.dtype:
                raise ValueError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}")
        planes = [Plane(tensor.shape[1], (Part(name, tensor.shape[3]),)) for name, tensor in tensors.items()]
        if [(plane.num_heads, plane.dim) for plane in planes[:2]] == latent:
            planes[:2] = [Plane(1, planes[0].parts + planes[1].parts)]
        layers.append(tuple(planes))
    while layers and not layers[-1]:
        layers.pop()
    return tuple(layers)


def per_token(layer: Any, name: str) -> torch.Tensor | None:
    """A tensor of a cache layer as `[rows, heads, tokens, dim]`; None if the layer has none."""
    tensor: torch.Tensor | None = getattr(layer, name, None)
    if tensor is None or not tensor.numel():
        return None
    return tensor if tensor.ndim == 4 else tensor.unsqueeze(1)


def _unknown(layer: Any) -> Sequence[str]:
    """Names of a layer's tensors other than the known ones."""
    found = []
    for name, value in vars(layer).items():
        tensors = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if name not in (*_KEYS, *STATES) and any(isinstance(each, torch.Tensor) and each.ndim for each in tensors):
            found.append(name)
    return found


def _kind_of(device: torch.device) -> str:
    return "cpu" if device.type == "meta" else device.type


def _is_plain(layer: Layer) -> bool:
    """Whether it has only K and V of one shape."""
    heads, dim = layer[0].num_heads, layer[0].dim
    return layer == (Plane(heads, (Part("keys", dim),)), Plane(heads, (Part("values", dim),)))


def _is_latent(layer: Layer) -> bool:
    """Whether it has only what attention reads as one latent."""
    return len(layer) == 1 and len(layer[0].parts) == 2


def _require_decoder(model: PreTrainedModel) -> None:
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model kind {config.model_type!r}: K and V also depend on the encoder's text; {_OTHERS}")


def plain_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Token ids that stand for text: images and other inputs have tokens of their own."""
    whole: Any = model.config
    config = whole.get_text_config(decoder=True)
    special = {str(value) for each in (whole, config) for name, value in vars(each).items() if "token_i" in name}
    return [number for number in range(config.vocab_size) if str(number) not in special][:count]


def _require_indexers(kind: str) -> None:
    if tuple(int(number) for number in version.split(".")[:2]) < _INDEXED:
        problem = f"transformers {version} selects wrong tokens behind a prefix"
        raise ConfigError(f"model kind {kind!r}: {problem}; install {'.'.join(map(str, _INDEXED))} or newer")


def _probe(model: PreTrainedModel, num_tokens: int = _NUM_TOKENS) -> DynamicCache:
    """A cache that the model filled with a few plain tokens."""
    module: Any = model
    ids = torch.tensor([plain_tokens(model, num_tokens)], device=model.device)
    kind = model.config.get_text_config(decoder=True).model_type
    before = _beside(model)
    try:
        cache = empty_cache(model)
        with torch.no_grad(), torch.autocast(_kind_of(model.device), enabled=False):
            module(input_ids=ids, use_cache=True, **cache_option(model, cache))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        problem = f"{num_tokens} tokens could not be put into its cache ({reason})"
        raise ConfigError(f"model kind {kind!r}: {problem}; {_OTHERS}") from error
    after = _beside(model)
    if beside := {name for (module, name), tensor in after.items() if tensor is not before.get((module, name))}:
        problem = f"its layers keep {', '.join(sorted(beside))} beside its cache"
        raise ConfigError(f"model kind {kind!r}: {problem}; install a newer transformers, or leave kvtier out")
    return cache


def _beside(model: PreTrainedModel) -> dict[tuple[str, str], torch.Tensor]:
    """Modules' tensors that could be state of the probe's tokens, by module and name."""
    found = {}
    for path, module in model.named_modules():
        for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if isinstance(value, torch.Tensor) and value.ndim > 1 and _NUM_TOKENS in value.shape:
                found[path, name] = value
    return found

"""Names what a live model computes beside its checkpoint: adapters, weights changed in place, foreign code."""

import functools
import hashlib
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules import module as _torch_modules

from kvtier.connector.models import model_watch
from kvtier.connector.models.ordinary import OrdinaryModel, bytes_of
from kvtier.tiers import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Packages whose code computes only what a checkpoint's weights and configuration define, or what is named here (PEFT).
# A checkpoint's own code (`transformers_modules`) is part of its revision.
_KNOWN: Final = frozenset(
    {"torch", "transformers", "transformers_modules", "kvtier", "peft", "accelerate"}
    | {"aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel", "hqq"}
    | {"kernels", "optimum", "quark", "spqr_quant", "torchao", "vptq"}
    | {"causal_conv1d", "fla", "flash_attn", "mamba_ssm"}
    | {"einops", "huggingface_hub", "numpy", "safetensors", "scipy", "timm"}  # imported by their files
    | sys.stdlib_module_names - {"unittest"}  # … which also wraps functions; but a mock is not known code
)
# Adapters with which a token's KV depends only on the tokens up to it and the adapter's weights and settings.
_TUNERS: Final = frozenset(
    {"adalora", "boft", "c3a", "fourierft", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "mixed", "oft"}
    | {"randlora", "road", "shira", "trainable_tokens", "vblora", "vera", "waveft"}
    | {"tuners_utils", "_buffer_dict", "lycoris_utils"}
)
_THROUGH: Final = ("base_layer", "original_module", "token_adapter")  # where an adapter layer has the wrapped layer
_INTO: Final = ("base_model", "model")  # … and where PEFT's models have the wrapped model
_MAKE_OUTSIDE: Final = 'load it outside of that, or name each state of the weights: KVTier(model, variant="…")'
_NOT_SETTINGS: Final = frozenset({*vars(torch.nn.Module()), "kwargs", "merged_adapters"})
_DROPOUT: Final = torch.nn.modules.dropout._DropoutNd
_BATCH_NORM: Final = torch.nn.modules.batchnorm._BatchNorm
_Plain = bool | int | float | str | None


class UnnamedModelError(Exception):
    """The model's KV has no name: the reason, and the fix."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One module of a model."""

    path: str  # as in the checkpoint, without adapters' levels; "" or ending in "."
    module: torch.nn.Module
    adapter: torch.nn.Module | None  # its adapter layer or PEFT model. None: the model's own


class LiveModel:
    """A model as it computes now, compared with its state when this was made. One thread at a time.

    `refusal` is why its KV has no name now, with the fix; None if it has one. `variant`: 32 bytes that distinguish it
    from the model it was named as. None: it computes the same.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        named: Callable[[], tuple[str, str]],
        label: str | None = None,
        settled: Collection[str] = (),
    ) -> None:
        """`named` reads and names the model's own weights. It is called now, and whenever they may have changed.

        `label`: the caller's name for what foreign code in the model computes. Without one such a model is refused.
        `settled`: settings of modules that the caller changed without an effect on KV.
        """
        self.model: Any = model
        self._named = named
        self._label = label
        self._kind = (model.dtype, model.device)
        parts = list(parts_of(model))
        self._ordinary = OrdinaryModel(_own_modules(parts), settled)
        self._weights, self._modules = named(), self._ordinary.difference(_own_modules(parts))
        self._named_as = self._weights, self._modules
        revision, digest = self._weights
        if self._modules is not None:
            revision = f"sha256:{hashlib.sha256(f'{revision} {self._modules}'.encode()).hexdigest()}"
        self.weights_name = revision, digest
        """`revision` and `config_digest` of its own weights at creation, including deviations in its modules."""
        self._merged = _merged(parts)
        self._own: bytes | None = None  # a random name for these weights, until they change
        self.refusal: str | None = None
        self.variant: bytes | None = None
        self._look(parts)

    def holds(self, *, in_pass: bool = False) -> bool:
        """Whether nothing shows that the model computes anything else than at the last check.

        Checks only structure, in microseconds; see `ModelWatch`. `in_pass`: does not wait for a device.
        """
        return self.watch.holds(in_pass=in_pass)

    def look(self) -> None:
        """Determine what the model computes now. Reads its weights if they may have changed."""
        parts = list(parts_of(self.model))
        base, merged = base_tensors(parts), _merged(parts)
        watch = self.watch.base
        try:
            is_same = merged == self._merged and watch.same_tensors(base) and watch.holds()
        except RuntimeError:
            is_same = False
        unreadable: str | None = None
        if not is_same:
            self._merged, self._own = merged, None
            try:
                self._weights = self._named()
            except ConfigError as error:
                unreadable, self._weights = str(error), ("", "")
        self._look(parts)
        self.refusal = self.refusal or unreadable

    @property
    def own(self) -> tuple[object, ...]:
        """What names it beside adapters. It changes with the model's weights, settings and modules."""
        return self._own, self._weights, self._modules

    def refuse(self, why: str) -> None:
        """Refuse the model until the next `look`."""
        self.refusal = why

    def renew(self) -> None:
        """Give the weights a new random name, since they may have changed unnoticed. Reads none."""
        self._own = secrets.token_bytes(32)
        parts = list(parts_of(self.model))
        self._merged = _merged(parts)
        self._look(parts)

    def _look(self, parts: list[ModelPart]) -> None:
        self.watch = model_watch.ModelWatch(self.model, base_tensors(parts))
        self.refusal = self.variant = None
        try:
            if self._label is None:
                require_known_code(self.model, parts)
                _require_counted(parts)
            adapters = adapters_of(parts)
            _require_alike(self.model.device, parts)
            if self._kind != (kind := (self.model.dtype, self.model.device)):
                was, now = (f"{dtype} on {device}" for dtype, device in (self._kind, kind))
                raise UnnamedModelError(f"the model was {was}, and is {now} now; make another KVTier")
        except UnnamedModelError as error:
            self.refusal = str(error)
            return
        self._modules = self._ordinary.difference(_own_modules(parts))
        weights, modules = (
            None if now == was else repr(now).encode()
            for now, was in zip((self._weights, self._modules), self._named_as, strict=True)
        )
        label = None if self._label is None else self._label.encode()
        named = (self._own or weights, modules, adapters, label)
        if any(each is not None for each in named):
            self.variant = hashlib.sha256(b"kvtier-variant-v1" + repr(named).encode()).digest()


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context, the model computes without adapters. Merged ones stay.

    State that its modules change meanwhile is restored.
    """
    modules: list[Any] = list(model.modules())
    states: list[Any] = list(map(vars, modules))
    were = list(map(dict, states))
    try:
        for each in modules:
            if "_active_adapter" in vars(each) and not each.merged_adapters:
                each._disable_adapters = True
        yield
    finally:
        for now, was in zip(states, were, strict=True):
            now.update(was)


def parts_of(model: torch.nn.Module) -> Iterator[ModelPart]:
    """Every module of a model, by its checkpoint path. Adapters' own modules have their layer's path."""
    yield from _parts(model, "", None)


def _parts(module: torch.nn.Module, path: str, adapter: torch.nn.Module | None) -> Iterator[ModelPart]:
    is_adapter = adapter is None and _package(type(module)) == "peft"
    owner = module if is_adapter else adapter
    yield ModelPart(path, module, owner)
    through = _THROUGH if hasattr(module, "adapter_layer_names") else _INTO
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_adapter and name in through:
            yield from _parts(child, path, None)
        else:
            yield from _parts(child, path if name == "_orig_mod" else f"{path}{name}.", owner)


def _own_modules(parts: Iterable[ModelPart]) -> dict[str, torch.nn.Module]:
    """The model's own modules by path, without adapters'."""
    return {part.path[:-1]: part.module for part in parts if part.adapter is None}


def base_tensors(parts: Iterable[ModelPart]) -> dict[str, torch.Tensor]:
    """The model's own parameters and persistent buffers, without adapters', by their names in the checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        if part.adapter is None:
            unsaved = part.module._non_persistent_buffers_set
            for name, each in (*part.module._parameters.items(), *part.module._buffers.items()):
                if each is not None and name not in unsaved:
                    tensors[f"{part.path}{name}"] = each
    return tensors


def base_state(model: torch.nn.Module) -> dict[str, Any]:
    """`state_dict(keep_vars=True)` of the model without its adapters."""
    state: dict[str, Any] = {}
    for part in parts_of(model):
        if part.adapter is None:
            part.module._save_to_state_dict(state, part.path, True)
    return state


# adapters


def adapters_of(parts: Iterable[ModelPart]) -> bytes | None:
    """32 bytes over everything that active adapters compute with: weights, scaling, settings, order. None: none active.

    Their names are labels, and left out. UnnamedModelError for a kind whose KV may depend on later tokens, and if
    PEFT's next pass will change the model's weights.
    """
    owned: dict[int, list[ModelPart]] = {}
    for part in parts:
        if part.adapter is not None:
            _require_known_tuner(part)
            owned.setdefault(id(part.adapter), []).append(part)
    layers = [own for own in owned.values() if hasattr(own[0].module, "adapter_layer_names")]
    models = [own for own in owned.values() if not hasattr(own[0].module, "adapter_layer_names")]
    digest, everywhere = hashlib.sha256(), dict[str, None]()
    for own in layers:
        if active := _active(own[0]):
            everywhere.update(dict.fromkeys(active))
            _digest_layer(digest, own, active, _names_in(own[0].module), settings=True)
    if not everywhere:
        return None
    for own in models:  # weights shared by several layers
        names = {name for layer in layers for name in _names_in(layer[0].module)}
        _digest_layer(digest, own, list(everywhere), names, settings=False)
    return digest.digest()


def _active(part: ModelPart) -> list[str]:
    """The adapters that an adapter layer applies, in order. Merged ones are not applied."""
    layer: Any = part.module
    is_merged = bool(layer.merged_adapters)
    if layer._disable_adapters:
        if is_merged:
            problem = f"{part.path[:-1]}: an adapter is merged and disabled, so PEFT's next pass changes the weights"
            raise UnnamedModelError(f"{problem}; call unmerge_adapter() first")
        return []
    active = [layer._active_adapter] if isinstance(layer._active_adapter, str) else list(layer._active_adapter)
    names = _names_in(layer)
    return [] if is_merged else [name for name in active if name in names]


def _names_in(layer: Any) -> set[str]:
    """All adapters of a layer."""
    names = set[str]()
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        try:
            found = functools.reduce(getattr, attribute.split("."), layer)
        except AttributeError:
            continue
        if isinstance(found, Mapping | torch.nn.ModuleDict | torch.nn.ParameterDict):
            names.update(found.keys())
    return names


def _digest_layer(digest: Any, own: list[ModelPart], active: list[str], names: set[str], *, settings: bool) -> None:
    """Digest the weights and settings of the active ones of the adapters `names`, whatever their names."""
    start = own[0].path
    digest.update(f"layer {start} {len(active)}".encode())
    numbers = {name: f"#{number}" for number, name in enumerate(active)}

    def renamed(steps: str) -> str | None:
        each = [step for step in steps.split(".") if step]
        if any(step in names and step not in numbers for step in each):
            return None
        return ".".join(numbers.get(step, step) for step in each)

    for part in own:
        place = renamed(part.path[len(start) :])
        if place is None:
            continue
        kind = type(part.module)
        digest.update(f"{place} {kind.__module__}.{kind.__qualname__}".encode())
        for name, tensor in [*part.module._parameters.items(), *part.module._buffers.items()]:
            if tensor is not None and (label := renamed(name)) is not None:
                digest.update(f"{label} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(bytes_of(tensor))
        if settings:
            for name, value in sorted(vars(part.module).items()):
                if name not in _NOT_SETTINGS and not name.startswith("_"):
                    digest.update(f"{name}={_setting(value, names, numbers)}".encode())


def _setting(value: Any, names: set[str], numbers: Mapping[str, str]) -> str:
    """A value as text: of a mapping by adapters only the active ones; of anything but plain values the class."""
    if isinstance(value, Mapping):
        chosen = {numbers.get(key, key): each for key, each in value.items() if key not in names or key in numbers}
        return repr(sorted((str(key), _setting(each, names, numbers)) for key, each in chosen.items()))
    if isinstance(value, list | tuple | set | frozenset):
        items = [_setting(each, names, numbers) for each in value]
        return repr(sorted(items) if isinstance(value, set | frozenset) else items)
    if isinstance(value, _Plain):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {bytes(bytes_of(value)).hex()}"
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _merged(parts: Iterable[ModelPart]) -> list[list[str]]:
    """The merged adapters of each adapter layer."""
    return [list(part.module.merged_adapters) for part in parts if hasattr(part.module, "merged_adapters")]  # type: ignore[arg-type]


def _require_known_tuner(part: ModelPart) -> None:
    kind = type(part.module)
    where = kind.__module__.split(".")
    if where[:2] == ["peft", "tuners"] and where[2] not in _TUNERS:
        problem = f"adapter of kind {where[2]!r}: a token's KV may depend on more than the tokens before it"
        raise UnnamedModelError(f"{problem}; merge or unload it, or leave kvtier out")
    variants: Any = getattr(part.module, "lora_variant", None)
    if isinstance(variants, Mapping) and any(type(each).__name__.startswith("ALora") for each in variants.values()):
        problem = "adapter of kind 'alora': a token's KV depends on where a later token switches it on"
        raise UnnamedModelError(f"{problem}; unload it, or leave kvtier out")


# code


def _require_alike(device: torch.device, parts: Iterable[ModelPart]) -> None:
    """UnnamedModelError if two passes over one text may differ: in dtype, or by dropout."""
    if (cast := model_watch.cast_to(device.type)) is not None:
        problem = f"torch.autocast computes in {cast} what the model has in another dtype"
        raise UnnamedModelError(f"{problem}; leave it off, or load the model in the dtype that you want")
    for part in parts:
        if part.module.training and (why := _varies(part.module)) is not None:
            place = part.path[:-1] or type(part.module).__name__
            raise UnnamedModelError(f"{place} is in training mode with {why}, so no two passes agree; call eval()")


def _require_counted(parts: Iterable[ModelPart]) -> None:
    """UnnamedModelError if a weight was made in inference mode: torch counts none of its changes in place."""
    for part in parts:
        for name, each in part.module._parameters.items():
            if each is not None and each.is_inference():
                problem = f"{part.path}{name} was made in torch.inference_mode(), where torch notes no change of it"
                raise UnnamedModelError(f"{problem}; {_MAKE_OUTSIDE}")


def _varies(module: torch.nn.Module) -> str | None:
    """What in a module in training mode varies between passes, or with the rest of the batch."""
    if isinstance(module, _BATCH_NORM):
        return "batch norm"
    for name, value in vars(module).items():
        is_share = name == "p" and isinstance(module, _DROPOUT)
        if (is_share or "drop" in name or "jitter" in name) and isinstance(value, float) and value > 0.0:
            return f"{name}={value}"
    return None


def require_known_code(model: torch.nn.Module, parts: Iterable[ModelPart]) -> None:
    """UnnamedModelError, with the first place, if code of other than known packages computes in the model.

    Foreign hooks and functions may compute something else at the next call, without any trace in the model.
    """
    for table in (_torch_modules._global_forward_hooks, _torch_modules._global_forward_pre_hooks):
        for hook in table.values():
            if not is_known(hook):
                raise _unnamed("every module", "a global forward hook", hook)
    kinds = dict[type, str]()
    for part in parts:
        place = part.path[:-1] or type(part.module).__name__
        kinds.setdefault(type(part.module), place)
        for hook in (*part.module._forward_hooks.values(), *part.module._forward_pre_hooks.values()):
            if not is_known(hook):
                raise _unnamed(place, "a forward hook", hook)
        _require_own_methods(place, part.module)
    for kind, place in kinds.items():
        if _package(kind) not in _KNOWN:
            raise _unnamed(place, "a class", kind)
        own = {name: value for name, value in vars(kind).items() if name != "generate"}
        for name, value in {**own, **{name: getattr(kind, name) for name in model_watch.PASSES}}.items():
            if callable(value) and not is_known(value):
                raise _unnamed(place, f"another {name} in class {kind.__name__}", value)
    _require_known_functions(model, kinds)


def _require_own_methods(place: str, module: torch.nn.Module) -> None:
    """Check methods that a module has as its own attributes, in place of its class's."""
    own = vars(module)
    for name, value in own.items():
        if name == "generate" or not isinstance(value, FunctionType | MethodType | functools.partial):
            continue  # `generate` computes nothing itself
        if hasattr(type(module), name) and not (is_known(value) and is_known(own.get("_old_forward", value))):
            raise _unnamed(place, f"a {name} of its own", value)


def _require_known_functions(model: torch.nn.Module, kinds: Iterable[type]) -> None:
    """Check functions that the modules' code finds by name: in its file, in torch, in transformers' interfaces."""
    names = model_watch.code_files(kinds)
    for name in names:
        for label, value in vars(sys.modules[name]).items():
            if callable(value) and not is_known(value):
                raise _unnamed(name, f"a {label} that was put there", value)
    for label, value in zip(model_watch.TORCH, model_watch.OF_TORCH(torch), strict=True):
        if not is_known(value):
            raise _unnamed("torch", f"a {label} that was put there", value)
    kinds_of_way = ("_attn_implementation", "_experts_implementation")
    ways = {getattr(each, kind, None) for each in model_watch.configs_of(model) for kind in kinds_of_way} - {None}
    for table in model_watch.interfaces(names):
        for way in ways & set(table):
            if not is_known(table[way]):
                raise _unnamed("every layer", f"a way {way!r} to compute", table[way])


def is_known(value: Any) -> bool:
    """Whether a function with all its wrapped functions, a class or a callable is from a known package."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        elif isinstance(value, FunctionType):
            if value.__globals__.get("__name__", "").partition(".")[0] not in _KNOWN:
                return False
            inner = value.__dict__.get("_torchdynamo_orig_callable", value.__dict__.get("__wrapped__"))
            if inner is None:
                return True
            value = inner
        else:
            return _package(value if isinstance(value, type) or _is_built_in(value) else type(value)) in _KNOWN


def _is_built_in(value: Any) -> bool:
    return type(value).__module__ == "builtins"


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "builtins").partition(".")[0]


def _unnamed(place: str, what: str, value: Any) -> UnnamedModelError:
    inner = value.func if isinstance(value, functools.partial) else value
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    source = getattr(inner, "__module__", None) or type(inner).__module__
    way = 'take it away, or name what it computes: KVTier(model, variant="…")'
    return UnnamedModelError(f"{place} has {what} ({name} of {source}): what it computes has no name; {way}")

"""What a model's class makes of its configuration beside weights, and how a live model differs from that."""

import functools
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
import xxhash

from kvtier.tiers.naming import config_digest

_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})  # kinds of RoPE
# Attributes without an effect on KV: labels, switches of training, the number of tokens RoPE was computed for.
_NO_SETTINGS: Final = frozenset(vars(torch.nn.Module())) | frozenset(
    {"generation_config", "gradient_checkpointing", "max_seq_len_cached", "name_or_path", "warnings_issued"}
)
_ROUNDING: Final = 1e-6  # relative: devices agree to a few units in float32's last place


@dataclass(frozen=True, slots=True)
class _Made:
    """A module as its class makes it."""

    kind: type
    settings: Mapping[str, str]
    hidden: Mapping[str, torch.Tensor] = field(default_factory=dict)


class OrdinaryModel:
    """The modules that a class makes of a configuration: their settings, and buffers that are not in checkpoints."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], settled: Collection[str] = ()) -> None:
        """`modules` of a model by path, with itself as "". Settings named in `settled` make no difference.

        If it cannot be rebuilt, its modules' current settings count as ordinary; their buffers do not.
        """
        self._settled = settled
        model, configs = modules[""], _Configs()
        try:
            made = {path: self._made(each, configs) for path, each in _made_anew(model).named_modules()}
        except Exception:  # raised by any class's own code
            made = {}
        # a quantiser replaces modules by its own
        if not made or getattr(model, "hf_quantizer", None) is not None:
            for path, module in modules.items():
                if path not in made or made[path].kind is not type(module):
                    made[path] = _Made(type(module), self._settings(module, configs))
        self._modules = made

    def difference(self, modules: Mapping[str, torch.nn.Module]) -> str | None:
        """xxh3-128 (hex) over all differences of these modules from the ordinary ones. None: no difference."""
        configs, differences = _Configs(), [f"no {path}" for path in self._modules.keys() - modules.keys()]
        for path, module in modules.items():
            made = self._modules.get(path)
            if made is None or made.kind is not type(module):
                differences.append(f"{path} is {_named(type(module))}")
                made = _Made(type(None), dict.fromkeys(self._settings(module, configs), ""))
            now = vars(module)
            for name, value in made.settings.items():
                if (is_now := _text_of(now.get(name), configs)) != value:
                    differences.append(f"{path}.{name} {is_now}")
            hidden = _hidden(module)
            differences += [f"no {path}.{name}" for name in made.hidden.keys() - hidden.keys()]
            for name, buffer in hidden.items():
                if name not in made.hidden or not _same(buffer, made.hidden[name]):
                    differences.append(f"{path}.{name} {buffer.dtype} {xxhash.xxh3_128_hexdigest(bytes_of(buffer))}")
        return xxhash.xxh3_128_hexdigest("\n".join(sorted(differences)).encode()) if differences else None

    def _made(self, module: torch.nn.Module, configs: "_Configs") -> _Made:
        return _Made(type(module), self._settings(module, configs), _hidden(module))

    def _settings(self, module: torch.nn.Module, configs: "_Configs") -> dict[str, str]:
        names = vars(module).keys() - _NO_SETTINGS - frozenset(self._settled)
        return {name: _text_of(vars(module)[name], configs) for name in names if not name.startswith("_")}


class _Configs:
    """Digests of configurations, each computed once, since modules share theirs."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, str]] = {}

    def digest(self, config: Any) -> str:
        if id(config) not in self._digests:
            fields = {**config.to_dict(), "architectures": None}  # only set when the model is saved
            self._digests[id(config)] = config, config_digest(fields)
        return self._digests[id(config)][1]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """All of a tensor's bytes, in order."""
    return memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())


def _made_anew(model: Any) -> torch.nn.Module:
    """The model without weights, as `from_pretrained` makes it: on the meta device, except non-persistent buffers."""
    with torch.device("meta"):
        made: Any = type(model)._from_config(deepcopy(model.config), dtype=model.dtype)
    for module in made.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        module._is_hf_initialized = False
    made.initialize_weights()
    anew: torch.nn.Module = made
    return anew


def is_by_length(module: torch.nn.Module) -> bool:
    """Whether it computes RoPE whose buffers the model recomputes by a text's length."""
    kinds = vars(module).get("rope_type")
    return not _BY_LENGTH.isdisjoint(kinds.values() if isinstance(kinds, Mapping) else [kinds])


def _hidden(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The non-persistent buffers, except those that the model itself recomputes."""
    names = sorted(module._non_persistent_buffers_set)
    if is_by_length(module):
        names = [name for name in names if "original" in name]
    return {name: each for name in names if (each := module._buffers.get(name)) is not None}


def _same(buffer: torch.Tensor, made: torch.Tensor) -> bool:
    if buffer.dtype != made.dtype or buffer.shape != made.shape:
        return False
    here = buffer.detach().cpu()
    return (
        torch.allclose(here, made, _ROUNDING, 0.0, equal_nan=True)
        if here.is_floating_point()
        else torch.equal(here, made)
    )


def _text_of(value: Any, configs: _Configs) -> str:
    """A value as text; of anything but plain values the class. A tensor is ignored: some are state of the last text."""
    if value is None or isinstance(value, torch.Tensor):
        return ""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, Mapping):
        return repr([(str(key), _text_of(each, configs)) for key, each in value.items()])
    if isinstance(value, list | tuple | set | frozenset):
        items = [_text_of(each, configs) for each in value]
        return repr(sorted(items) if isinstance(value, set | frozenset) else items)
    if isinstance(value, functools.partial):
        return f"{_text_of(value.func, configs)} of {_text_of([value.args, value.keywords], configs)}"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
        return _named(value)
    return configs.digest(value) if hasattr(value, "to_dict") and hasattr(value, "model_type") else _named(type(value))


def _named(value: Any) -> str:
    return f"<{value.__module__}.{value.__qualname__}>"

"""Notices from a model's structure alone that it may not compute what it did, in microseconds: asked at every call."""

import ctypes
import gc
import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from operator import attrgetter, itemgetter
from typing import Any, Final

import torch
from torch.nn.modules import module as _torch_modules

_SAMPLED: Final = 32  # tensors whose place and one element are looked at: of each kind of weight, in all of the depth
_FAR: Final = 8  # of them on other devices
_STATE: Final = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of an adapter layer of PEFT
_VERSION: Final = attrgetter("_version")
_FORWARD: Final = attrgetter("forward")
_PLACE: Final = torch.Tensor.data_ptr
_VALUE: Final = attrgetter("value")
_NUMBER: Final = re.compile(r"\d+")


class TensorWatch:
    """Whether tensors may have other values than when this was made. It keeps the tensors, not memory they gave up.

    Version counters count every change in place, of every tensor. What goes past them through `.data` is looked for in
    up to 32 tensors: whether their memory is another, and whether one element each has another value. On a GPU that
    waits for the device, and takes up to 8.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` by their names."""
        self.tensors = dict(tensors)
        self._counted = [
            each for each in tensors.values() if not each.is_inference()
        ]  # inference tensors count nothing
        self._num_changes = sum(map(_VERSION, self._counted))
        self._placed = [each for each in _spread(self.tensors) if _has_memory(each)]
        self._places = list(map(_PLACE, self._placed))
        self._values = [_element(each) for each in self._placed if each.device.type == "cpu"]
        self._found = list(map(_VALUE, self._values))
        far = [each for each in self._placed if each.device.type != "cpu"]
        self._far = far[:: max(1, len(far) // _FAR)][:_FAR]
        self._far_found = self._far_values()

    def holds(self) -> bool:
        """Whether nothing shows a change. RuntimeError if a tensor has lost its memory."""
        return (
            sum(map(_VERSION, self._counted)) == self._num_changes
            and list(map(_PLACE, self._placed)) == self._places  # so the elements are where they were
            and list(map(_VALUE, self._values)) == self._found
            and (not self._far or self._far_values() == self._far_found)
        )

    def same_tensors(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very tensors watched, under the same names."""
        return tensors.keys() == self.tensors.keys() and all(
            self.tensors[name] is each for name, each in tensors.items()
        )

    def _far_values(self) -> list[int]:
        parts = [each.detach()[_middle(each)].reshape(1).view(torch.uint8) for each in self._far]
        return torch.cat(parts).tolist() if parts else []


class ModelWatch:
    """Whether a model's modules, classes, hooks, methods, tensors and adapters are those it had when this was made."""

    def __init__(self, model: torch.nn.Module, base: Mapping[str, torch.Tensor]) -> None:
        """`base`: the model's own weights by name; all other tensors in it are adapters'."""
        modules = list(model.modules())
        self._modules, self._classes = modules, list(map(type, modules))
        self._attributes = list(map(vars, modules))
        self._num_attributes = sum(map(len, self._attributes))
        self._kinds = list(dict.fromkeys(self._classes))
        self._forwards = list(map(_FORWARD, self._kinds))
        self._tables = tuple(_tables(modules, self._kinds))
        self._entries = gc.get_referents(*self._tables)
        # a tensor of one element is compared by value where it lies in a list, and must be the very same one
        self._single = [i for i, each in enumerate(self._entries) if torch.is_tensor(each) and each.numel() == 1]
        config: Any = getattr(model, "config", None)
        self._config = config
        self._attention = getattr(config, "_attn_implementation", None)
        self.base = TensorWatch(base)
        own = {id(each) for each in base.values()}
        tensors = {name: each for name, each in _all_tensors(model) if id(each) not in own}
        self.others = TensorWatch(tensors)
        layers = [vars(each) for each in modules if "_active_adapter" in vars(each)]
        self._states = [(itemgetter(*[name for name in _STATE if name in layer]), layer) for layer in layers]
        self._found = [deepcopy(get(layer)) for get, layer in self._states]

    def holds(self) -> bool:
        """Whether nothing shows a change. Values of tensors are hardly looked at: see `TensorWatch`."""
        try:
            entries = gc.get_referents(*self._tables)
            return (
                sum(map(len, self._attributes)) == self._num_attributes
                and list(map(type, self._modules)) == self._classes
                and list(map(_FORWARD, self._kinds)) == self._forwards
                and entries == self._entries
                and all(entries[i] is self._entries[i] for i in self._single)
                and getattr(self._config, "_attn_implementation", None) == self._attention
                and [get(layer) for get, layer in self._states] == self._found
                and self.base.holds()
                and self.others.holds()
            )
        except (
            RuntimeError,
            TypeError,
            ValueError,
            LookupError,
        ):  # e.g. two tensors compared: one took another's place
            return False


def _tables(modules: Iterable[torch.nn.Module], kinds: Iterable[type]) -> Iterable[Mapping[Any, Any]]:
    """Where a model's hooks, tensors and modules stand, and the functions that its code calls by name."""
    for module in modules:
        yield module._forward_hooks
        yield module._forward_pre_hooks
        yield from filter(None, (module._parameters, module._buffers, module._modules))
    yield _torch_modules._global_forward_hooks
    yield _torch_modules._global_forward_pre_hooks
    for name in dict.fromkeys(kind.__module__ for kind in kinds):
        if name.startswith("transformers.models.") and name in sys.modules:
            yield vars(sys.modules[name])


def _all_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _spread(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Up to 32 tensors: of each kind (one name but for its numbers) as many, from the first layer to the last."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(_NUMBER.sub("#", name), []).append(tensor)
    if len(tensors) <= _SAMPLED:
        return list(tensors.values())
    each = max(1, _SAMPLED // len(kinds))
    chosen = [
        kind[i * (len(kind) - 1) // max(1, each - 1)] for kind in kinds.values() for i in range(min(each, len(kind)))
    ]
    return chosen[:_SAMPLED]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has numbers of its own that can be looked at."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and tensor.numel() > 0 and tensor.device.type != "meta"


def _middle(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where its element in the middle is."""
    return tuple(size // 2 for size in tensor.shape)


def _element(tensor: torch.Tensor) -> Any:
    """The bytes of that element where they lie, as a whole number of ctypes. Good while the tensor has this memory."""
    offset = sum(index * step for index, step in zip(_middle(tensor), tensor.stride(), strict=True))
    kind = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32}.get(tensor.element_size(), ctypes.c_int64)
    return kind.from_address(tensor.data_ptr() + offset * tensor.element_size())

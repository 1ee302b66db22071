"""Notices from a model's structure alone that it may not compute what it did, in microseconds: asked at every call."""

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

import torch
from torch.nn.modules import module as _torch_modules

from kvtier.connector.models.ordinary import is_by_length

PASSES: Final = ("forward", "__call__", "_call_impl")  # what a module's class is run by
TORCH: Final = ("addmm", "baddbmm", "bmm", "cat", "einsum", "matmul", "mm", "rsqrt", "softmax", "where")
OF_TORCH: Final = attrgetter(*TORCH)
"""Functions that models call by torch's own name; those of `torch.nn.functional` are all looked at."""
_VERSION: Final = attrgetter("_version")
_OF_CLASS: Final = attrgetter(*PASSES)
_PLACE: Final = torch.Tensor.data_ptr
_VALUE: Final = attrgetter("value")
_INTERFACES: Final = ("transformers.modeling_utils", "transformers.masking_utils")
_KEPT: Final = frozenset(vars(torch.nn.Module()))  # dicts of every module


class TensorWatch:
    """Whether tensors may have other values than when this was made. It keeps the tensors, not memory they gave up.

    Version counters count every change in place. What goes past them through `.data` is looked for in each tensor:
    whether its memory is another, and whether the element in its middle has another value. On other devices than the
    CPU that waits for the device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, with_first: bool = False) -> None:
        """`tensors` by their names. `with_first`: look at their first elements, too, on the CPU."""
        self.tensors = dict(tensors)
        each_once = list({id(each): each for each in tensors.values()}.values())
        self._counted = [each for each in each_once if not each.is_inference()]  # inference tensors count nothing
        self._num_changes = sum(map(_VERSION, self._counted))
        self._placed = [each for each in each_once if _has_memory(each)]
        self._places = list(map(_PLACE, self._placed))
        near = [each for each in self._placed if each.device.type == "cpu"]
        self._values = [_element(each, at) for each in near for at in {_middle(each)} | ({0} if with_first else set())]
        self._found = list(map(_VALUE, self._values))
        self._far = list(_alike(each for each in self._placed if each.device.type != "cpu"))
        self._far_found = self._far_values()

    def holds(self, *, in_pass: bool = False) -> bool:
        """Whether nothing shows a change. RuntimeError if a tensor has lost its memory.

        `in_pass`: wait for no device.
        """
        return (
            sum(map(_VERSION, self._counted)) == self._num_changes
            and list(map(_PLACE, self._placed)) == self._places  # so the elements are where they were
            and list(map(_VALUE, self._values)) == self._found
            and (in_pass or not self._far or self._far_values() == self._far_found)
        )

    def same_tensors(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very tensors watched, under the same names."""
        return tensors.keys() == self.tensors.keys() and all(
            self.tensors[name] is each for name, each in tensors.items()
        )

    def _far_values(self) -> list[list[int]]:
        with torch.no_grad():
            return [torch.cat(_single(group, places)).view(torch.uint8).tolist() for group, places in self._far]


class ModelWatch:
    """Whether all that a model computes by is what it was when this was made.

    That is: modules, classes, hooks, tensors, adapters, attributes of modules and configurations, functions in the
    files of its code and in torch, transformers' ways of attention, autocast.
    """

    def __init__(self, model: torch.nn.Module, base: Mapping[str, torch.Tensor]) -> None:
        """`base`: the model's own weights by name; all other tensors in it are adapters'."""
        modules = list(model.modules())
        self._modules, self._classes = modules, list(map(type, modules))
        self._kinds = list(dict.fromkeys(self._classes))
        self._device = next((each.device.type for each in base.values()), "cpu")
        self._around = [cast_to(self._device), OF_TORCH(torch), *map(_OF_CLASS, self._kinds)]
        self._tables = tuple(_tables(modules, self._kinds))
        self._entries = gc.get_referents(*self._tables)
        # a tensor of one element is compared by value where it lies in a list, and must be the very same one
        self._single = [i for i, each in enumerate(self._entries) if torch.is_tensor(each) and each.numel() == 1]
        self._attributes = tuple(_attributes(model, modules))
        self._values = gc.get_referents(*self._attributes)
        self.base = TensorWatch(base)
        own = {id(each) for each in base.values()}
        kept = [each for each in self._entries if torch.is_tensor(each) and id(each) not in own]  # settings of adapters
        # an adapter may be put into larger tensors, which have zeros in the middle
        self.others = TensorWatch({str(number): each for number, each in enumerate(kept)}, with_first=True)

    def holds(self, *, in_pass: bool = False) -> bool:
        """Whether nothing shows a change. Values of tensors are hardly looked at: see `TensorWatch`."""
        try:
            entries = gc.get_referents(*self._tables)
            return (
                list(map(type, self._modules)) == self._classes
                and entries == self._entries
                and all(entries[i] is self._entries[i] for i in self._single)
                and [cast_to(self._device), OF_TORCH(torch), *map(_OF_CLASS, self._kinds)] == self._around
                and self._same_attributes()
                and self.base.holds(in_pass=in_pass)
                and (not self.others.tensors or self.others.holds(in_pass=in_pass))
            )
        except (RuntimeError, TypeError, ValueError, LookupError):  # two tensors compared: one took another's place
            return False

    def _same_attributes(self) -> bool:
        """Whether they are. Tensors in them that no table has count for nothing: some hold what a text left there."""
        values = gc.get_referents(*self._attributes)
        try:
            if values == self._values:
                return True
        except RuntimeError:  # tensors compared
            pass
        if list(filter(_counts, values)) != list(filter(_counts, self._values)):
            return False
        self._values = values
        return True


def _tables(modules: Iterable[torch.nn.Module], kinds: list[type]) -> Iterator[Mapping[Any, Any]]:
    """Where a model's hooks, tensors, modules and adapters stand, and the functions that its code calls by name."""
    for module in modules:
        yield module._forward_hooks
        yield module._forward_pre_hooks
        buffers = None if is_by_length(module) else module._buffers
        yield from filter(None, (module._parameters, buffers, module._modules))
        if "_active_adapter" in (held := vars(module)):
            yield from _containers(held)
    yield _torch_modules._global_forward_hooks
    yield _torch_modules._global_forward_pre_hooks
    for kind in kinds:
        yield from gc.get_referents(vars(kind))  # the dict behind the proxy
    files = code_files(kinds)
    for name in files:
        yield vars(sys.modules[name])
    for table in interfaces(files):
        yield from (table._local_mapping, table._global_mapping)


def _attributes(model: Any, modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The attributes of modules and of configurations, and what they hold in lists and dicts."""
    for each in (*modules, *configs_of(model)):
        yield vars(each)
        yield from _containers(vars(each))


def _containers(held: Mapping[str, Any]) -> Iterator[Any]:
    return (each for name, each in held.items() if name not in _KEPT and isinstance(each, dict | list | set))


def _counts(value: object) -> bool:
    return value is not None and not isinstance(value, torch.Tensor)


def cast_to(device_type: str) -> torch.dtype | None:
    """The dtype in which torch.autocast has this thread compute; None without it."""
    kind = device_type if torch.amp.is_autocast_available(device_type) else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def code_files(kinds: Iterable[type]) -> list[str]:
    """The Python modules in whose namespaces the code of these classes finds what it calls."""
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    ours = [name for name in names if name.startswith("transformers.") and name in sys.modules]
    return [*ours, "torch.nn.functional"]


def interfaces(files: Iterable[str]) -> list[Any]:
    """transformers' tables of ways to compute attention, masks and the like that these files use, by name."""
    found = [each for name in (*files, *_INTERFACES) for each in vars(sys.modules.get(name, sys)).values()]
    tables = {id(each): each for each in found if isinstance(each, Mapping) and hasattr(each, "_global_mapping")}
    return list(tables.values())


def configs_of(model: Any) -> list[Any]:
    """A model's configuration, and those inside it."""
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [each for each in (config, *inner) if each is not None]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has numbers of its own that can be looked at."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and tensor.numel() > 0 and tensor.device.type != "meta"


def _middle(tensor: torch.Tensor) -> int:
    """How many elements behind its first one, in memory, the one in its middle lies."""
    return sum(size // 2 * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _alike(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[int]]]:
    """Those of one device and dtype together, and where in its memory each has its middle."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in tensors:
        groups.setdefault((each.device, each.dtype), []).append(each)
    for group in groups.values():
        yield group, [int(each.storage_offset()) + _middle(each) for each in group]


def _single(tensors: list[torch.Tensor], places: list[int]) -> list[torch.Tensor]:
    """Of each tensor the element at this place of its memory."""
    taken = list(map(torch.Tensor.as_strided, tensors, repeat((1,)), repeat((1,)), places))
    return [each.view(torch.uint8) for each in taken] if tensors[0].element_size() == 1 else taken


def _element(tensor: torch.Tensor, at: int) -> Any:
    """The bytes of an element where they lie, as a whole number of ctypes. Good while the tensor has this memory."""
    kind = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32}.get(tensor.element_size(), ctypes.c_int64)
    return kind.from_address(tensor.data_ptr() + at * tensor.element_size())

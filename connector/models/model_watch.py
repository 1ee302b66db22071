"""Detects from a model's structure that it may compute something else than before; microseconds, at every call."""

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

import torch
from torch.nn.modules import module as _torch_modules

from kvtier.connector.models.ordinary import is_by_length

PASSES: Final = ("forward", "__call__", "_call_impl")  # the methods that run a module
TORCH: Final = ("addmm", "baddbmm", "bmm", "cat", "einsum", "matmul", "mm", "rsqrt", "softmax", "where")
OF_TORCH: Final = attrgetter(*TORCH)
"""Functions that models call by torch's own name; those of `torch.nn.functional` are all checked."""
_VERSION: Final = attrgetter("_version")
_OF_CLASS: Final = attrgetter(*PASSES)
_PLACE: Final = torch.Tensor.data_ptr
_VALUE: Final = attrgetter("value")
_INTERFACES: Final = ("transformers.modeling_utils", "transformers.masking_utils")
_KEPT: Final = frozenset(vars(torch.nn.Module()))  # dicts of every module


class TensorWatch:
    """Detects whether tensors may have changed since this was made. Keeps the tensors, not memory they gave up.

    Version counters count every change in place. Changes through `.data` bypass them: for those this compares each
    tensor's address and the value of its middle element. On other devices than the CPU that waits for the device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """`tensors` by name. Of `others` it compares the first elements, too, on the CPU."""
        self.tensors = dict(tensors)
        with_first = {id(each) for each in others}
        each_once = list({id(each): each for each in (*tensors.values(), *others)}.values())
        self._counted = [each for each in each_once if not each.is_inference()]  # inference tensors have no counters
        self._num_changes = sum(map(_VERSION, self._counted))
        self._placed = [each for each in each_once if _has_memory(each)]
        self._places = list(map(_PLACE, self._placed))
        near = [each for each in self._placed if each.device.type == "cpu"]
        self._values = [
            _element(each, at) for each in near for at in {_middle(each)} | ({0} if id(each) in with_first else set())
        ]
        self._found = list(map(_VALUE, self._values))
        self._far = list(_alike(each for each in self._placed if each.device.type != "cpu"))
        self._far_found = self._far_values()

    def holds(self, *, in_pass: bool = False) -> bool:
        """Whether no change is visible. RuntimeError if a tensor has lost its memory.

        `in_pass`: do not wait for a device.
        """
        return (
            sum(map(_VERSION, self._counted)) == self._num_changes
            and list(map(_PLACE, self._placed)) == self._places  # so the elements are still at their addresses
            and list(map(_VALUE, self._values)) == self._found
            and (in_pass or not self._far or self._far_values() == self._far_found)
        )

    def same_tensors(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the watched tensors themselves, under the same names."""
        return tensors.keys() == self.tensors.keys() and all(
            self.tensors[name] is each for name, each in tensors.items()
        )

    def _far_values(self) -> list[list[int]]:
        with torch.no_grad():
            return [torch.cat(_single(group, places)).view(torch.uint8).tolist() for group, places in self._far]


class ModelWatch:
    """Detects whether everything that determines a model's computation is as it was when this was made.

    That is: modules, classes, hooks, tensors, adapters, attributes of modules and configurations, functions in the
    files of its code and in torch, transformers' attention functions, autocast.
    """

    def __init__(self, model: torch.nn.Module, base: Mapping[str, torch.Tensor]) -> None:
        """`base`: the model's own weights by name; all others are adapters'."""
        modules = list(model.modules())
        self._modules, self._classes = modules, list(map(type, modules))
        self._kinds = list(dict.fromkeys(self._classes))
        self._casts = _autocast_of(next((each.device.type for each in base.values()), "cpu"))
        casts = torch.is_autocast_enabled(self._casts) and torch.get_autocast_dtype(self._casts)
        self._around = [casts, OF_TORCH(torch), *map(_OF_CLASS, self._kinds)]
        self._tables = tuple(_tables(modules, self._kinds))
        self._entries = gc.get_referents(*self._tables)
        # lists compare one-element tensors by value, but they must be identical
        self._single = [i for i, each in enumerate(self._entries) if torch.is_tensor(each) and each.numel() == 1]
        self._attributes = tuple(_attributes(model, modules))
        self._values = gc.get_referents(*self._attributes)
        self.base = TensorWatch(base)
        own = {id(each) for each in base.values()}
        kept = [each for each in self._entries if torch.is_tensor(each) and id(each) not in own]  # settings of adapters
        # an adapter may be part of a larger tensor with zeros in the middle
        self._tensors = TensorWatch(base, kept) if kept else self.base

    def holds(self, *, in_pass: bool = False) -> bool:
        """Whether no change is visible. Tensors' values are only sampled: see `TensorWatch`."""
        try:
            entries = gc.get_referents(*self._tables)
            casts = torch.is_autocast_enabled(self._casts) and torch.get_autocast_dtype(self._casts)
            return (
                list(map(type, self._modules)) == self._classes
                and entries == self._entries
                and all(entries[i] is self._entries[i] for i in self._single)
                and [casts, OF_TORCH(torch), *map(_OF_CLASS, self._kinds)] == self._around
                and self._same_attributes()
                and self._tensors.holds(in_pass=in_pass)
            )
        except (RuntimeError, TypeError, ValueError, LookupError):  # two tensors were compared, so one replaced another
            return False

    @contextmanager
    def expecting(self, owner: torch.nn.Module, name: str, value: object) -> Iterator[None]:
        """Inside the context a module of the model has this attribute, and afterwards what it had.

        Passes notice every other change, also of this attribute.
        """
        own, was_same = vars(owner), self._same_attributes()
        before = own.get(name, own)
        own[name] = value
        if was_same:
            self._values = gc.get_referents(*self._attributes)
        try:
            yield
        finally:
            own[name] = value
            is_same = self._same_attributes()
            if before is own:
                del own[name]
            else:
                own[name] = before
            if was_same and is_same:
                self._values = gc.get_referents(*self._attributes)

    def _same_attributes(self) -> bool:
        """Whether attributes are unchanged. Tensors in no table are ignored: some hold state of the last text."""
        values = gc.get_referents(*self._attributes)
        try:
            if values == self._values:
                return True
        except RuntimeError:  # tensors were compared
            pass
        if list(filter(_counts, values)) != list(filter(_counts, self._values)):
            return False
        self._values = values
        return True


def _tables(modules: Iterable[torch.nn.Module], kinds: list[type]) -> Iterator[Mapping[Any, Any]]:
    """The dicts of a model's hooks, tensors, modules and adapters, and of the functions that its code calls by name."""
    for module in modules:
        yield module._forward_hooks
        yield module._forward_pre_hooks
        buffers = None if is_by_length(module) else module._buffers
        yield from filter(None, (module._parameters, buffers, module._modules))
        if "_active_adapter" in (own := vars(module)):
            yield from _containers(own)
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
    """The attributes of modules and of configurations, and the lists and dicts in them."""
    for each in (*modules, *configs_of(model)):
        yield vars(each)
        yield from _containers(vars(each))


def _containers(attributes: Mapping[str, Any]) -> Iterator[Any]:
    return (each for name, each in attributes.items() if name not in _KEPT and isinstance(each, dict | list | set))


def _counts(value: object) -> bool:
    return value is not None and not isinstance(value, torch.Tensor)


def cast_to(device_type: str) -> torch.dtype | None:
    """The dtype to which torch.autocast casts in this thread; None without it."""
    kind = _autocast_of(device_type)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _autocast_of(device_type: str) -> str:
    return device_type if torch.amp.is_autocast_available(device_type) else "cpu"


def code_files(kinds: Iterable[type]) -> list[str]:
    """The Python modules in whose namespaces the code of these classes looks up functions."""
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    ours = [name for name in names if name.startswith("transformers.") and name in sys.modules]
    return [*ours, "torch.nn.functional"]


def interfaces(files: Iterable[str]) -> list[Any]:
    """transformers' tables of attention functions, masks and the like that these files use."""
    found = [each for name in (*files, *_INTERFACES) for each in vars(sys.modules.get(name, sys)).values()]
    tables = {id(each): each for each in found if isinstance(each, Mapping) and hasattr(each, "_global_mapping")}
    return list(tables.values())


def configs_of(model: Any) -> list[Any]:
    """A model's configuration, and those inside it."""
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [each for each in (config, *inner) if each is not None]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has plain numbers of its own."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and tensor.numel() > 0 and tensor.device.type != "meta"


def _middle(tensor: torch.Tensor) -> int:
    """The offset of its middle element from its first one, in elements."""
    return sum(size // 2 * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _alike(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[int]]]:
    """Tensors grouped by device and dtype, with the storage offset of each one's middle."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in tensors:
        groups.setdefault((each.device, each.dtype), []).append(each)
    for group in groups.values():
        yield group, [int(each.storage_offset()) + _middle(each) for each in group]


def _single(tensors: list[torch.Tensor], places: list[int]) -> list[torch.Tensor]:
    """Each tensor's element at this storage offset."""
    taken = list(map(torch.Tensor.as_strided, tensors, repeat((1,)), repeat((1,)), places))
    return [each.view(torch.uint8) for each in taken] if tensors[0].element_size() == 1 else taken


def _element(tensor: torch.Tensor, at: int) -> Any:
    """An element's bytes in place, as a ctypes integer. Valid while the tensor has this memory."""
    kind = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32}.get(tensor.element_size(), ctypes.c_int64)
    return kind.from_address(tensor.data_ptr() + at * tensor.element_size())

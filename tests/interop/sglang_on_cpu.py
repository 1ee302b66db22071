"""What SGLang lacks on a CPU: importing this, before SGLang and in each of its processes, stands in for CUDA packages.

torchvision and sgl_kernel become modules whose names exist and do nothing; HiCache's copies between its device pool and
its host pool, CUDA kernels in SGLang, become indexing. Used by tests alone; it makes nothing fast.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

import sglang_recurrent
import torch
from transformers.utils.import_utils import is_torchvision_available

Tensors = Sequence[torch.Tensor]

MISSING: Final = ("torchvision", "torchaudio", "sgl_kernel")
POOLS: Final = "sglang.srt.mem_cache.pool_host"
MLA_HANDLERS: Final = "sglang.srt.models.deepseek_common.attention_backend_handler"


class Nothing(type):
    """A class with any attribute, each another such class: enough for `import`, annotations and enumerations."""

    def __getattr__(cls, name: str) -> Any:
        return _nothing(name)


class Empty(ModuleType):
    """A module in which every name is a `Nothing`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, whatever is imported from it

    def __getattr__(self, name: str) -> Any:
        return _nothing(name)


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing(name, (), {})


class Event:
    """torch.cpu.Event, with the arguments of torch.cuda's: on a CPU everything enqueued has happened."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def host_memory(shape: Sequence[int], dtype: torch.dtype, **_: object) -> torch.Tensor:
    """Plain memory for a host pool: there is no CUDA to register it with."""
    return torch.empty(*shape, dtype=dtype)


def unpinned_zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """torch.zeros where nothing can be pinned: what SGLang's file backend reads a page into is pinned always."""
    return _zeros(*size, **options)


def copy_layers(
    src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Layer-first host pool, both ways."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_pages(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer, from a host pool `[pages, layers, tokens, …]`."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def store_pages(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """All layers (K of all, then V of all) into a host pool `[pages, layers, tokens, …]`."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        target = dst_ptrs[i // num_layers]
        target[dst_indices // page_size, i % num_layers, dst_indices % page_size] = source[src_indices]


def use_host_memory(module: Any) -> None:
    module.ALLOC_MEMORY_FUNCS["cpu"] = host_memory


def use_copies(module: Any) -> None:
    module.transfer_kv_direct = copy_layers
    module.transfer_kv_per_layer_direct_pf_lf = load_pages
    module.transfer_kv_all_layer_direct_lf_pf = store_pages


def attend_to_latents(module: Any) -> None:
    """The CPU's attention over MLA's pool knows this method alone."""
    module.AttentionBackendRegistry.register("torch_native", lambda *_: module.AttnForwardMethod.MLA)


def read_windows(module: Any) -> None:
    """Its backend writes K and V of sliding layers where their own pool has them, and reads them elsewhere."""

    def reading(run: Callable[..., Any]) -> Callable[..., Any]:
        def translated(
            backend: Any,
            q: Any,
            o: Any,
            k: Any,
            v: Any,
            tokens: torch.Tensor,
            rows: torch.Tensor,
            *rest: Any,
            **more: Any,
        ) -> Any:
            if backend.use_sliding_window_kv_pool and more.get("sliding_window_size") is not None:
                tokens = backend.token_to_kv_pool.translate_loc_from_full_to_swa(tokens[rows])
                rows = torch.arange(len(rows))
            return run(backend, q, o, k, v, tokens, rows, *rest, **more)

        return translated

    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, reading(getattr(backend, name)))


PATCHES: Final[dict[str, Callable[[Any], None]]] = {
    f"{POOLS}.common": use_host_memory,
    f"{POOLS}.mha": use_copies,
    f"{POOLS}.mla": use_copies,
    f"{POOLS}.mamba": use_copies,
    f"{POOLS}.dsa": use_copies,
    "sglang.srt.layers.attention.torch_native_backend": read_windows,
    MLA_HANDLERS: attend_to_latents,
    "sglang.srt.layers.attention.mamba.causal_conv1d": sglang_recurrent.use_convolutions,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": sglang_recurrent.use_gated_norm,
    "sglang.kernels.ops.elementwise.elementwise": sglang_recurrent.use_gated_experts,
}


class StandIns(MetaPathFinder, Loader):
    """Finds the missing packages, and puts the functions above into SGLang's modules as these are imported."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] in MISSING:
            return ModuleSpec(name, self)
        patch = PATCHES.get(name)
        if patch is None or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        load: Callable[[ModuleType], None] = spec.loader.exec_module

        def load_and_patch(module: Any) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "sgl_kernel.mamba":
            module.__dict__.update(sglang_recurrent.KERNELS)


_zeros: Final = torch.zeros
torch.zeros = unpinned_zeros
is_torchvision_available()  # asks before there is one, and remembers: transformers goes without
sys.meta_path.insert(0, StandIns())
for name, operation in sglang_recurrent.OPERATIONS.items():
    setattr(torch.ops.sgl_kernel, name, operation)
torch.cpu.Stream.synchronize = lambda *_: None  # type: ignore[attr-defined]
torch.cpu.Event = Event  # type: ignore[attr-defined, assignment, misc, unused-ignore]
torch.cpu._is_amx_tile_supported = lambda: False  # its kernels are in sgl_kernel

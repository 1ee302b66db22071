"""The kernels' source itself: NVIDIA's compiler takes it for every device, and sanitizers find nothing on a CPU.

The launches are those of `LayoutKernels`, for random geometries. They run on memory of exactly the size they need,
under g++'s address and undefined-behaviour sanitizers.
"""

import ctypes
import importlib.util
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from extent import brief
from layout_reference import gather_reference, geometry_of, scatter_reference

from kvtier.tiers.copies.copy_ways import MAX_GRID
from kvtier.tiers.copies.kernels import SOURCE, UNIT_TYPES, Canonical, LayoutKernels
from kvtier.tiers.naming.identity import KVLayout, KVShape

RIG: Final = Path(__file__).parents[2] / "rigs" / "sanitized_kernels.cpp"
CASES: Final = 400
ALIGNED: Final = 16  # bytes: what malloc gives


@cache
def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's compiler as PyPI has it; it needs no device."""
    found = importlib.util.find_spec("nvidia")
    places = () if found is None else (found.submodule_search_locations or ())
    libraries = [library for place in places for library in sorted(Path(place).glob("**/libnvrtc.so.*"))]
    return ctypes.CDLL(str(libraries[-1])) if libraries else None


@pytest.mark.parametrize("unit", UNIT_TYPES)
@pytest.mark.parametrize("architecture", brief(["90"], ["80", "90", "100", "120"]))
def test_the_source_compiles_for_real_devices(architecture: str, unit: int) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("no nvidia-cuda-nvrtc here: pip install nvidia-cuda-nvrtc")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"kernels.cu", 0, None, None)
    assert made == 0
    options = [f"--gpu-architecture=sm_{architecture}".encode(), f"-DUNIT={UNIT_TYPES[unit]}".encode()]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert (status, log.value) == (0, b"")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    assert b"kv_gather" in code.raw
    assert b"kv_scatter" in code.raw
    library.nvrtcDestroyProgram(ctypes.byref(program))


class Launch:
    """One random geometry: what `LayoutKernels` launches for it, the memory before, and after it by the reference."""

    def __init__(self, rng: np.random.Generator) -> None:
        order = list(rng.permutation(list("bkth")))
        layers, heads, tokens, kv = (int(rng.integers(1, most)) for most in (5, 5, 18, 3))
        dtype = str(rng.choice(["bfloat16", "float32", "float16"]))
        self.shape = shape = KVShape(layers, heads, int(rng.choice([1, 3, 4, 7, 8, 16, 24, 40])), tokens, dtype, kv)
        item = 4 if dtype == "float32" else 2
        run = shape.head_dim * item
        sizes = {"b": int(rng.integers(1, 9)), "k": kv, "t": tokens, "h": heads}
        strides, stride = dict[str, int](), run + int(rng.choice([0, 0, item, 16]))
        for dim in reversed(order):
            strides[dim] = stride
            stride = stride * sizes[dim] + int(rng.choice([0, 0, item, 16]))
        layer_bytes = sum((sizes[dim] - 1) * strides[dim] for dim in order) + run
        num_slots = int(rng.integers(1, 9))
        slot_stride = shape.block_bytes + int(rng.choice([0, item, 16]))
        self.askew = [int(rng.choice([0, 0, item, 8, 1])) for _ in range(2)]  # of L1 and of the slots
        self.layers = [rng.integers(0, 256, layer_bytes, np.uint8) for _ in range(layers)]
        self.slots = rng.integers(0, 256, (num_slots - 1) * slot_stride + shape.block_bytes, np.uint8)
        count = int(rng.integers(1, min(sizes["b"], num_slots) + 1))
        self.blocks, self.numbers = (rng.permutation(most)[:count].astype(np.int64) for most in (sizes["b"], num_slots))
        self.is_gather = bool(rng.integers(2))
        self.call = self._launched(strides, slot_stride, int(rng.integers(1, MAX_GRID + 1)))
        self.before = [*(layer.tobytes() for layer in self.layers), self.slots.tobytes()]
        layout = KVLayout(
            [layer.ctypes.data for layer in self.layers], strides["b"], strides["k"], strides["t"], strides["h"]
        )
        padded = np.zeros((num_slots, slot_stride), np.uint8)
        padded.reshape(-1)[: len(self.slots)] = self.slots
        chosen = padded[self.numbers][:, : shape.block_bytes].copy()
        if self.is_gather:
            gather_reference(layout, shape, self.blocks.tolist(), chosen)
            padded[self.numbers, : shape.block_bytes] = chosen
        else:
            scatter_reference(layout, shape, self.blocks.tolist(), chosen)
        after = padded.reshape(-1)[: len(self.slots)]
        self.after = [*(layer.tobytes() for layer in self.layers), after.tobytes()]

    def _launched(
        self, strides: dict[str, int], slot_stride: int, grid: int
    ) -> tuple[int, tuple[int, int], int, Sequence[Any]]:
        """Unit, grid, threads and arguments; addresses count only by how they are aligned."""
        bases = tuple((layer + 1 << 24) + self.askew[0] for layer in range(self.shape.num_layers))
        layout = KVLayout(bases, strides["b"], strides["k"], strides["t"], strides["h"])
        calls: list[tuple[int, tuple[int, int], int, Sequence[Any]]] = []

        def kernel(source: str, name: str, options: tuple[str, ...]) -> Any:
            [unit] = [size for size, kind in UNIT_TYPES.items() if options == (f"-DUNIT={kind}",)]
            return lambda grid, block, arguments: calls.append((unit, grid, block[0], arguments))

        stream = SimpleNamespace(from_external=lambda _: nullcontext())
        upload = SimpleNamespace(data=SimpleNamespace(ptr=0))
        cupy = SimpleNamespace(
            cuda=SimpleNamespace(Stream=stream), asarray=lambda array, blocking: upload, RawKernel=kernel
        )
        kernels = LayoutKernels(geometry_of(layout, self.shape), cupy)
        kernels.grid = grid
        launch = kernels.gather if self.is_gather else kernels.scatter
        launch(0, 0, len(self.blocks), Canonical((1 << 40) + self.askew[1], slot_stride), 0)
        [call] = calls
        return call

    def encoded(self) -> bytes:
        """What the rig reads: `sanitized_kernels.cpp` says in which order."""
        unit, grid, threads, arguments = self.call
        numbers = (0 if self.is_gather else 1, unit, *grid, threads, len(self.layers), len(self.blocks))
        sizes = (len(self.layers[0]), len(self.slots), *self.askew)
        head = struct.pack("<11q", *numbers, *sizes)
        strides = struct.pack("<5q", *(int(each) for each in arguments[4:9]))
        counts = struct.pack("<7I", *(int(each) for each in arguments[9:16]))
        return b"".join([head, strides, counts, *self.before, self.blocks.tobytes(), self.numbers.tobytes()])


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source with both kernels for every unit, under both sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernels' source on this CPU")
    folder = tmp_path_factory.mktemp("sanitized")
    units = []
    for unit, kind in UNIT_TYPES.items():
        source = SOURCE.replace('extern "C" __global__ void NAME(', "static void NAME(")
        for name in ("kv_gather", "kv_scatter"):
            source = source.replace(f"KV_KERNEL({name},", f"KV_KERNEL({name}_{unit},")
        for name in ("KV_KERNEL", "KV_TAKE", "KV_GIVE"):
            source = source.replace(f"#define {name}", f"#undef {name}\n#define {name}")
        units.append(f"#undef UNIT\n#define UNIT {kind}\n{source}")
    (folder / "kernels.inc").write_text("\n".join(units))
    options = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=undefined", f"-I{folder}"]
    subprocess.run(["g++", *options, "-o", str(folder / "kernels"), str(RIG)], check=True, timeout=100)
    return folder / "kernels"


@pytest.mark.exhaustive  # tests/tiers/copies/test_kernels.py runs the source without them
def test_sanitizers_find_nothing_and_every_byte_is_the_references(sanitized: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    launches = [Launch(rng) for _ in range(CASES)]
    assert {launch.call[0] for launch in launches} == set(UNIT_TYPES)
    assert all(1 <= launch.call[1][0] * launch.call[1][1] <= MAX_GRID for launch in launches)
    (tmp_path / "in").write_bytes(b"".join(launch.encoded() for launch in launches))
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(sanitized), str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_bytes() == b"".join(part for launch in launches for part in launch.after)

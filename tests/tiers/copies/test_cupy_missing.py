"""Without CuPy, or with one that does not fit, copies go on without its kernels, and one line says what is lost."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lazy_cuda import LazyCuda, pin

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.block_copier import BlockCopies
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.host.host import HostRegion

OLD_DRIVER = "CUDA driver version is insufficient for CUDA runtime version"
CUPIES = {  # what its file holds, and what the log says
    "missing": (None, "ModuleNotFoundError: "),
    "without its libraries": (
        "raise ImportError('''\n=====\nFailed to import CuPy.\nOriginal error: libcublas.so.13\n''')",
        "ImportError: =====",
    ),
    "of another NumPy": ("raise AttributeError('numpy.core')", "AttributeError: numpy.core"),
    "of a newer driver": (
        f"class CUDARuntimeError(RuntimeError): ...\ndef asarray(*_, **__): raise CUDARuntimeError('{OLD_DRIVER}')",
        f"CUDARuntimeError: {OLD_DRIVER}",
    ),
    "too old": ("def asarray(array): return array", "TypeError: "),
    "without a compiler": (
        """
class asarray:
    def __init__(self, array, blocking): pass
class CompileException(Exception): ...
class cuda:
    class compiler: CompileException = CompileException
class RawKernel:
    def __init__(self, *_, **__): pass
    def compile(self): raise CompileException('nvrtc: invalid value for --gpu-architecture')
""",
        "RuntimeError: nvrtc: invalid value",
    ),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packer._say_once.cache_clear()
    yield
    packer._say_once.cache_clear()


@pytest.mark.parametrize("case", CUPIES)
def test_copies_go_on_without_it_and_the_log_says_so_once(
    said: None, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, expected = CUPIES[case]
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if source is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        (tmp_path / "cupy.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    cuda = LazyCuda()
    cuda.patch(monkeypatch)
    region = HostRegion.allocate(8, 4096)
    pin(region, cuda)
    for turn in range(2):  # as behind a daemon's restart
        l1 = torch.randint(0, 256, (8, 2, 2048), dtype=torch.uint8)
        before = l1.clone()
        stream = CudaCopyStream(l1, region)
        copies = BlockCopies(np.arange(8), np.array([3, 1, 4, 0, 5, 7, 2, 6]))
        stored = stream.store(copies)
        assert stored.wait(60)
        l1.fill_(turn)
        loaded = stream.load(copies)
        assert loaded.wait(60)
        assert (stored.error, loaded.error) == (None, None)
        assert torch.equal(l1, before)
        stream.close(60)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    cuda.finish()
    region.close()
    [line] = [record.getMessage() for record in caplog.records if "CuPy" in record.getMessage()]
    assert "\n" not in line
    assert f"small or scattered blocks are copied more slowly: CuPy does not work here ({expected}" in line
    assert "pip install 'cupy-cuda13x>=14', or the one for this driver" in line


def test_there_is_an_extra_for_each_cuda() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["cuda"] == extras["cuda13"] == ["cupy-cuda13x>=14", "torch>=2.6"]
    assert extras["cuda12"] == ["cupy-cuda12x>=14", "torch>=2.6"]

"""What torch, CuPy and the driver raise, told apart: no memory is left, a graph is being captured, the device is lost.

Numbers are CUDA's, the same in its runtime and its driver: https://docs.nvidia.com/cuda/cuda-driver-api, CUresult.
"""

from typing import Final

DEVICE_ERRORS: Final = (RuntimeError, MemoryError)
"""All that a call of torch, CuPy or the driver may raise.

torch.OutOfMemoryError, torch.AcceleratorError, CuPy's CUDARuntimeError and CUDADriverError, and our CudaError are
RuntimeErrors. CuPy's OutOfMemoryError is a MemoryError. Its CompileException is neither; `LayoutKernels` translates it.
"""

_OUT_OF_MEMORY: Final = 2
_OF_CAPTURES: Final = frozenset(range(900, 909))
# "Any further CUDA work will return the same error. To continue, the process must be terminated and relaunched."
_LASTING: Final = frozenset({4, 201, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
# The same, where an older torch gives no number.
_LASTING_WORDS: Final = (
    *("illegal memory access", "launch timed out", "context is destroyed", "device-side assert", "uncorrectable"),
    *("hardware stack error", "illegal instruction", "misaligned address", "invalid program counter"),
    *("unspecified launch failure", "driver shutting down"),
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for what was asked; less of it may be there."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or number_of(error) == _OUT_OF_MEMORY


def is_of_capture(error: Exception) -> bool:
    """Whether a call was refused only because some thread captures a CUDA graph."""
    return number_of(error) in _OF_CAPTURES or "captur" in str(error)


def is_lasting(error: Exception) -> bool:
    """Whether every later call of this process on the device fails, too."""
    number = number_of(error)
    return number in _LASTING if number is not None else any(words in str(error) for words in _LASTING_WORDS)


def number_of(error: Exception) -> int | None:
    """CUDA's number of the error; None where it has none."""
    for name in ("status", "error_code"):  # of the driver's and CuPy's errors, of torch's
        if isinstance(number := getattr(error, name, None), int):
            return number
    return None

"""One tensor on its way to host memory: a GPU copies it beside what the CPU does meanwhile, into pinned memory."""

import torch

from kvtier.tiers.copies import CudaEvent
from kvtier.tiers.host import cuda_driver


class HostCopy:
    """A tensor's values as they are when the device comes to it. Of a tensor in host memory it is that tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # torch takes pinned memory for such a copy, and keeps it until the device is done with it.
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event: CudaEvent | None = None
        if is_on_gpu(tensor):
            passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(tensor.device)
            passed.record(stream)
            self._event = CudaEvent(cuda_driver())
            self._event.issued(passed, stream)

    def wait(self, timeout: float) -> torch.Tensor | None:
        """The values; None if the device has not brought them in `timeout` seconds, or cannot any more."""
        if self._event is not None and (not self._event.wait(timeout) or self._event.error is not None):
            return None
        return self._tensor


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"

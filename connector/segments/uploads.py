"""Integers of one step on their way to the model's device: all of them by one copy, for which nobody waits."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def uploaded(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, each of one dimension, as tensors on the device. Work enqueued behind the call sees them.

    A GPU takes them from pinned memory: any other copy waits until it has done all that it was given before.
    """
    numbers = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    sent = numbers.to(device, non_blocking=True)
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    return [sent[start:end] for start, end in zip([0, *ends], ends, strict=False)]

"""A model on an adversary's GPU for stories of KVTier: what it computes is on time, every copy is late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.generation.utils  # noqa: F401  a model's first import of it looks at the real torch.cuda.Stream
from lazy_cuda import LazyCuda, LazyDriver, pin, ranges_of

from kvtier.connector.transformers import cache_form, device_copies, tier_blocks
from kvtier.connector.transformers.blocks import Blocks
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.connector.transformers.device_copies import DeviceCopies
from kvtier.tiers.config import HostConfig
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.metrics import Metrics


class GpuBelow:
    """Puts the device below the adapter; counts what went there."""

    def __init__(self, cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch, *, slots: int, batches: bool) -> None:
        """Staging holds `slots` blocks. `batches`: the driver copies by calls of its own."""
        self.cuda = cuda
        self.driver: Any = LazyDriver(cuda) if batches else None
        self.num_streams = self.num_gathered = self.num_scattered = 0
        self.slots = slots
        cuda.patch(monkeypatch)
        set_ = monkeypatch.setattr
        set_(device_copies, "_AHEAD", 8)  # fewer than some calls have pieces
        set_(device_copies, "CudaCopyStream", self.stream)
        set_(tier_blocks, "copies_of", self.copies)
        set_(cache_form, "is_on_gpu", lambda tensor: True)
        set_(Blocks, "read", self._moving(Blocks.read, "gathered"))
        set_(Blocks, "write", self._moving(Blocks.write, "scattered"))
        self._set = set_

    def copies(self, form: CacheForm, device: torch.device, host: HostConfig, metrics: Metrics) -> DeviceCopies:
        self._set(device_copies, "STAGING_BYTES", self.slots * form.block_bytes)
        return DeviceCopies(form, device, host.model_copy(update={"pin": False}), metrics)

    def stream(self, tensor: torch.Tensor, region: HostRegion, *, ways: CopyWays) -> CudaCopyStream:
        self.num_streams += 1
        self.cuda.own(tensor)
        pin(region, self.cuda, piece_bytes=64 << 10)
        every_size = CopyWays(CopyChoice(batch_from=0), ways.metrics)  # of tiny blocks, too
        return CudaCopyStream(tensor, region, driver=self.driver, ways=every_size)

    def _moving(self, real: Callable[..., None], what: str) -> Callable[..., None]:
        """What the compute's stream is given: it reads or writes staging in its turn."""

        def move(blocks: Blocks, slots: torch.Tensor, form: CacheForm, numbers: Any) -> None:
            reads, writes = ([], ranges_of(slots)) if what == "gathered" else (ranges_of(slots), [])
            self.cuda.compute_op(f"blocks {what}", reads, writes)
            real(blocks, slots, form, numbers)
            setattr(self, f"num_{what}", getattr(self, f"num_{what}") + len(slots))

        return move

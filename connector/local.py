"""Both sides in one process: a hierarchy of its own, and copies between it and one engine's L1."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.config import Config
from kvtier.tiers.cuda_transfer import CudaCopyStream
from kvtier.tiers.device import BlockPool
from kvtier.tiers.host import cuda_runtime
from kvtier.tiers.identity import ModelIdentity
from kvtier.tiers.opening import open_hierarchy
from kvtier.tiers.shape import KVShape
from kvtier.tiers.transfer import HostCopyStream

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_COPY_DEADLINE: Final = (
    30.0  # seconds a layer may wait for its load: memory to memory, so only a dead device takes longer
)


class LocalConnector:
    """What an engine in this process plugs in.

    `tensor` is its L1 pool, `[num_blocks, *shape.block_shape]`; `fingerprint` the model's (ModelIdentity.fingerprint).
    Raises ConfigError where the configured memory or disk is not there, FormatError and StoreLocked from the slab.
    """

    def __init__(self, config: Config, fingerprint: bytes, shape: KVShape, tensor: "torch.Tensor") -> None:
        self.hierarchy = open_hierarchy(config, fingerprint, shape)
        try:
            self._start(config, shape, tensor)
        except BaseException:
            self.hierarchy.close()
            raise

    def _start(self, config: Config, shape: KVShape, tensor: "torch.Tensor") -> None:
        self.scheduler = SchedulerSide(self.hierarchy)
        region = self.hierarchy.host.region
        if tensor.is_cuda and config.host.pin and cuda_runtime() is None:
            _log.warning("[host] pin: no CuPy to pin L2 with, copies will be slow; install kvtier[cuda]")
        stream = CudaCopyStream(tensor, region) if tensor.is_cuda else HostCopyStream(tensor, region)
        self.worker = WorkerSide(stream, shape.num_layers, shape.layer_bytes, _COPY_DEADLINE)

    @classmethod
    def connect(cls, config: Config) -> "Callable[[ModelIdentity, BlockPool], LocalConnector]":
        """What `Engine` takes as `connect`: opens the tiers once model and L1 are known."""
        return lambda identity, pool: cls(config, identity.fingerprint(), pool.shape, pool.tensor)

    def reset(self) -> None:
        """Forget every block in every tier below L1."""
        self.hierarchy.reset()

    def close(self) -> None:
        """End copies, flush stores, close the tiers. Idempotent."""
        self.scheduler.update(self.worker.close(timeout=_COPY_DEADLINE))
        self.scheduler.close()
        self.hierarchy.close()

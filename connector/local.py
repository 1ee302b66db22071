"""Both sides in one process: the tiers below, its own or the daemon's, and copies between them and one engine's L1."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvtier.connector.both_ends import BothEndsSide
from kvtier.connector.opening import open_apart, open_tiers
from kvtier.connector.worker import WorkerSide
from kvtier.tiers import copies
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import cuda_driver
from kvtier.tiers.naming import KVProbe, KVShape, ModelIdentity

if TYPE_CHECKING:
    import torch

    from kvtier.tiers.copies import BlockPool, CopyStream

_log = logging.getLogger(__name__)

# Seconds a layer may wait for its load: memory to memory, so only a dead device takes longer.
_COPY_DEADLINE: Final = 30.0


class LocalConnector:
    """What an engine in this process plugs in.

    `tensor` is its L1 pool, `[num_blocks, *shape.block_shape]`; `fingerprint` the model's (ModelIdentity.fingerprint).
    `partial_blocks`: the engine takes promises that end inside a block. `named`: what the fingerprint was made from,
    and what the model computes of a few tokens.
    Raises ConfigError where the configured memory or disk is not there, FormatError and StoreLocked from the slab.
    """

    def __init__(
        self,
        config: Config,
        fingerprint: bytes,
        shape: KVShape,
        tensor: "torch.Tensor",
        *,
        partial_blocks: bool = False,
        named: tuple[ModelIdentity, KVProbe] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self.identity: ModelIdentity | None = None
        """What blocks are named after: the identity given, or one beside it (`open_apart`). None: none was given."""
        if named is None:
            self.tiers = open_tiers(config, fingerprint, shape, takes_parts=partial_blocks)
        else:
            self.tiers, self.identity = open_apart(config, named[0], shape, named[1], takes_parts=partial_blocks)
        if tensor.is_cuda and config.host.pin and cuda_driver() is None:
            _log.warning("[host] pin: libcuda.so.1 is not found or does not start, so copies will be slow")

        def follow(region_id: int) -> "CopyStream | None":
            region = self.tiers.region
            if region is None or region.region_id != region_id:
                return None
            if not tensor.is_cuda:
                return copies.HostCopyStream(tensor, region)
            if config.host.pin:
                region.pin(tensor.device.index)
            ways = copies.CopyWays.to_measure(config.host, self.tiers.metrics)
            return copies.CudaCopyStream(tensor, region, ways=ways)  # loads torch

        self.scheduler = BothEndsSide(self.tiers, partial_blocks=partial_blocks and config.cache.partial_blocks)
        self.worker = WorkerSide(follow, shape.num_layers, shape.layer_bytes, _COPY_DEADLINE)
        try:
            if self.tiers.region is not None:  # else a daemon that is not there yet
                self.worker.connect(self.tiers.region.region_id)
        except BaseException:
            self.tiers.close()
            raise

    @property
    def hierarchy(self) -> Hierarchy:
        """The hierarchy of this process; AttributeError if the tiers are a daemon's."""
        if not isinstance(self.tiers, Hierarchy):
            raise AttributeError("the tiers are the daemon's")
        return self.tiers

    @classmethod
    def connect(cls, config: Config) -> "Callable[[ModelIdentity, BlockPool, KVProbe], LocalConnector]":
        """What `Engine` takes as `connect`: opens the tiers once model and L1 are known."""
        return lambda identity, pool, probe: cls(
            config, identity.fingerprint(), pool.shape, pool.tensor,
            partial_blocks=pool.partial_blocks, named=(identity, probe),
        )  # fmt: skip

    def reset(self) -> None:
        """Forget every block in every tier below L1."""
        self.tiers.reset()

    def close(self) -> None:
        """End copies, flush stores, close the tiers. Idempotent; in a forked child there is nothing to close."""
        if self._pid != os.getpid():
            return
        self.scheduler.update(self.worker.close(timeout=_COPY_DEADLINE))
        self.scheduler.close()
        self.tiers.close()

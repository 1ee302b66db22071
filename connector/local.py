"""Both sides in one process: the tiers below L1, its own or the daemon's, and copies between them and one L1."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtier.connector.daemon import Hello, RemoteTiers
from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.tiers import BlockShape, ConfigError, KVMismatch, copies
from kvtier.tiers.config import Config
from kvtier.tiers.file import record_beside
from kvtier.tiers.hierarchy import CacheTiers, Hierarchy, open_hierarchy
from kvtier.tiers.host import cuda_driver
from kvtier.tiers.naming import KVProbe, KVShape, ModelIdentity

if TYPE_CHECKING:
    import torch

    from kvtier.tiers.copies import BlockPool, CopyStream


_log = logging.getLogger(__name__)

_NAMESPACES: Final = 4  # per identity, for models that compute different KV
_GRACE: Final = 0.5  # seconds that the daemon's answer may take beyond its own deadline


def open_apart(
    config: Config, identity: ModelIdentity, shape: BlockShape, probe: KVProbe | None, *, takes_parts: bool = True
) -> tuple[CacheTiers, ModelIdentity]:
    """The tiers of this identity, or of the first namespace of it whose stored probe matches the model's.

    Returns that identity; its fingerprint names the blocks. Without a probe nothing is compared. A probe with NaN
    matches none: such models share one more namespace. Raises as `open_tiers`; KVMismatch if every namespace has the
    KV of another model; ConfigError if blocks are to be cut: these engines have no ranks.
    """
    for option, most in (("share_across_tp", identity.num_kv_heads), ("share_across_pp", len(identity.layers))):
        if min(size := getattr(config.cache, option) or 1, most) > 1:
            fix = 'leave it out, and give vLLM keys "kvtier" and share_across_tp 1: then all find one another\'s'
            raise ConfigError(f"[cache] {option} {size}: this engine keeps blocks whole; {fix}")
    if probe is not None and not probe.is_finite:
        problem = "this model computes NaN or infinity of a few plain tokens"
        _log.warning("%s: look at its weights and dtype; its blocks are kept apart, and compared with none", problem)
        named = replace(identity, apart=_NAMESPACES)
        return open_tiers(config, named.fingerprint(), shape, named, takes_parts=takes_parts), named
    for apart in (None, *range(1, _NAMESPACES)):
        named = replace(identity, apart=apart)
        try:
            tiers = open_tiers(config, named.fingerprint(), shape, named, probe, takes_parts=takes_parts)
        except KVMismatch as error:
            if apart is None:
                _log.warning("%s; this model's blocks are kept apart, until both sides run the same", error)
            elif apart == _NAMESPACES - 1:
                raise
            continue
        return tiers, named
    raise AssertionError("unreachable")


def open_tiers(
    config: Config,
    fingerprint: bytes,
    shape: BlockShape,
    identity: ModelIdentity | None = None,
    probe: KVProbe | None = None,
    *,
    takes_parts: bool = True,
) -> CacheTiers:
    """The daemon's tiers if `[service] socket` is set, else tiers in this process; raises as `open_hierarchy`.

    `identity`: the source of the fingerprint; the daemon shows it to users. ConfigError if it does not match `[cache]
    lossy`. `probe`: the KV the model computes for a few tokens; KVMismatch if the stored KV differs.
    `takes_parts`: the engine accepts promises that end inside a block; otherwise the daemon sends no children.
    """
    lossy = None if identity is None else identity.lossy
    if (lossy is None) != (config.cache.lossy == "none"):
        raise ConfigError(
            f'[cache] lossy "{config.cache.lossy}": this engine names its KV as {lossy or "exact"}; give both the same'
        )
    service = config.service
    if service.socket is not None:
        if lossy is not None:
            _log.info("[cache] lossy: the daemon's Redis and object store keep K and V as %s", lossy)
        about = () if identity is None else tuple(identity.shown().items())
        size = config.host.size if "size" in config.host.model_fields_set else 0
        hello = Hello(
            *(fingerprint, shape.block_size, shape.block_bytes, size),
            reset=False,
            about=about,
            lossy=lossy,
            kv_probe=None if probe is None else probe.packed(),
            takes_parts=takes_parts and config.cache.partial_blocks,
        )
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    tiers = open_hierarchy(config, fingerprint, shape, lossy=lossy, kv_probe=probe)
    if identity is not None and config.file.path is not None:
        record_beside(config.file.path, fingerprint, identity.shown())
    return tiers


# Seconds a layer may wait for its load: memory to memory, so only a dead device takes longer.
_COPY_DEADLINE: Final = 30.0


class LocalConnector:
    """The connector of an engine in this process.

    `tensor` is its L1 pool, `[num_blocks, *shape.block_shape]`; `fingerprint` the model's (ModelIdentity.fingerprint).
    `partial_blocks`: the engine accepts promises that end inside a block. `named`: the source of the fingerprint, and
    the KV the model computes for a few tokens.
    Raises ConfigError if the configured memory or disk is not available, FormatError and StoreLocked from the slab.
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
        """The identity in the blocks' names: the one given, or a namespace of it (`open_apart`). None: not given."""
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

        self.scheduler = SchedulerSide(self.tiers, partial_blocks=partial_blocks and config.cache.partial_blocks)
        self.worker = WorkerSide(follow, shape.num_layers, shape.layer_bytes, _COPY_DEADLINE)
        try:
            if self.tiers.region is not None:  # else the daemon is not reachable yet
                self.worker.connect(self.tiers.region.region_id)
        except BaseException:
            self.tiers.close()
            raise

    @property
    def hierarchy(self) -> Hierarchy:
        """The hierarchy of this process; AttributeError if the tiers are the daemon's."""
        if not isinstance(self.tiers, Hierarchy):
            raise AttributeError("the tiers are the daemon's")
        return self.tiers

    @classmethod
    def connect(cls, config: Config) -> "Callable[[ModelIdentity, BlockPool, KVProbe], LocalConnector]":
        """For `Engine(connect=…)`: opens the tiers once model and L1 are known."""
        return lambda identity, pool, probe: cls(
            config, identity.fingerprint(), pool.shape, pool.tensor,
            partial_blocks=pool.partial_blocks, named=(identity, probe),
        )  # fmt: skip

    def reset(self) -> None:
        """Forget every block in every tier below L1."""
        self.tiers.reset()

    def close(self) -> None:
        """End copies, flush stores, close the tiers. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        self.scheduler.update(self.worker.close(timeout=_COPY_DEADLINE))
        self.scheduler.close()
        self.tiers.close()

"""From a configuration to a hierarchy with its tiers open."""

from typing import Protocol

from kvtier.tiers.config import Config
from kvtier.tiers.demote import BATCH_BYTES
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.file_store import FileStore
from kvtier.tiers.hierarchy import Hierarchy, HierarchySettings
from kvtier.tiers.host import HostRegion, HostTier, slot_stride
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.port import PortSettings, TierPort
from kvtier.tiers.rates import Rates
from kvtier.tiers.redis_store import RedisStore


class Blocks(Protocol):
    """What the tiers need to know of a model's blocks; a `KVShape` says it."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""


def open_hierarchy(config: Config, fingerprint: bytes, shape: Blocks, *, lease_deadline: float = 60.0) -> Hierarchy:
    """The hierarchy a configuration describes, for the blocks of one model (`ModelIdentity.fingerprint`, 32 bytes).

    A promise nobody asks about is kept for `lease_deadline` seconds.

    Raises ConfigError where memory or disk are too small, StoreLocked, FormatError and FingerprintMismatch; a
    directory that cannot be used is one warning, and the tier attaches when it can.
    """
    metrics, rates = Metrics(), Rates(config.cache.load_or_recompute)
    if config.host.size < shape.block_bytes:
        raise ConfigError(
            f'[host] size "{config.host.size}": one block of this model takes {shape.block_bytes} bytes; raise it'
        )
    region = HostRegion.allocate(
        max(1, config.host.size // slot_stride(shape.block_bytes)),
        shape.block_bytes,
        shared=config.host.shared,
        huge_pages=config.host.huge_pages,
    )
    host = HostTier(region, policy=config.cache.policy)
    try:
        if config.host.pin:
            region.pin()
        ports = open_ports(config, fingerprint, shape, metrics, rates)
    except BaseException:
        host.close()
        raise
    settings = HierarchySettings(
        write_policy=config.cache.write_policy,
        admit_after=config.cache.admit_after,
        store_queue=config.cache.store_queue,
        prefetch_deadline=config.cache.prefetch_deadline,
        lease_deadline=lease_deadline,
    )
    return Hierarchy(host, ports, settings, metrics, rates)


def open_ports(config: Config, fingerprint: bytes, shape: Blocks, metrics: Metrics, rates: Rates) -> list[TierPort]:
    """The tiers below host memory alone, for an engine that keeps its own; raises and warns as `open_hierarchy`."""
    ports = [_file_port(config, fingerprint, shape, metrics, rates)] if config.file.path else []
    try:
        if config.redis.url is not None:
            ports.append(_redis_port(config, fingerprint, shape, metrics, rates))
    except BaseException:
        for port in ports:
            port.close(0.0)
        raise
    return ports


def _file_port(config: Config, fingerprint: bytes, shape: Blocks, metrics: Metrics, rates: Rates) -> TierPort:
    def open_file() -> FileStore:
        assert config.file.path is not None
        return FileStore.open(
            config.file.path,
            fingerprint,
            slot_bytes=shape.block_bytes,
            block_size=shape.block_size,
            size=config.file.size,
            mode=config.file.mode,
            durable=config.file.durable,
        )

    patience = PortSettings(config.file.deadline, config.breaker.failures, config.breaker.retry_after)
    return TierPort("file", open_file, patience, metrics, rates)


def _redis_port(config: Config, fingerprint: bytes, shape: Blocks, metrics: Metrics, rates: Rates) -> TierPort:
    def open_redis() -> RedisStore:
        return RedisStore.open(config.redis, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # the port's patience is that of its largest batch, and of the connection it may have to open first
    batch = max(BATCH_BYTES, shape.block_bytes) / config.redis.bandwidth
    deadline = config.redis.connect_timeout + config.redis.deadline + batch
    patience = PortSettings(deadline, config.breaker.failures, config.breaker.retry_after)
    return TierPort("redis", open_redis, patience, metrics, rates)

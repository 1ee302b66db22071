"""The Redis tier from its section of the configuration: how to reach it, and what the doctor asks. A `TierModule`."""

from kvtier.tiers import BATCH_BYTES, BlockShape, ConfiguredTier, Finding
from kvtier.tiers.config import Config
from kvtier.tiers.redis.doctor import check_redis
from kvtier.tiers.redis.store import RedisStore


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [redis] names no url."""
    if config.redis.url is None:
        return None

    def reach() -> RedisStore:
        return RedisStore.open(config.redis, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # as long as the store gives itself for the largest batch, and for the connection it may have to open first
    batch = max(BATCH_BYTES, shape.block_bytes) / config.redis.bandwidth
    return ConfiguredTier(reach, config.redis.connect_timeout + config.redis.deadline + batch)


def examine(config: Config) -> list[Finding]:
    """The servers that [redis] url names. Each answer has a deadline of seconds."""
    return check_redis(config.redis)

"""The Redis tier from its section of the configuration: how to reach it, and what the doctor asks. A `TierModule`."""

from kvtier.tiers import BATCH_BYTES, BlockShape, ConfiguredTier, Finding, load_key, require_compression
from kvtier.tiers.config import Config
from kvtier.tiers.redis.doctor import check_redis
from kvtier.tiers.redis.doctor_rate import check_compression
from kvtier.tiers.redis.options import parse
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


def checked(config: Config) -> str | None:
    """Reads the address and the key, and asks no server: one that is away is found later."""
    if config.redis.url is None:
        return None
    servers = parse(config.redis)
    if config.redis.key_file is not None:
        load_key(config.redis.key_file, "[redis] key_file")
    compressed = ""
    if config.redis.compression != "none":
        require_compression("[redis] compression")
        compressed = f", compressed by {config.redis.compression}"
    return f"[redis] {config.redis.mode} at {servers.label}{compressed}"


def answers(config: Config) -> list[Finding]:
    """Every server that [redis] url names, as for the doctor."""
    return [] if config.redis.url is None else check_redis(config.redis)


def examine(config: Config) -> list[Finding]:
    """The servers that [redis] url names, and whether compression pays. Each answer has a deadline of seconds."""
    return check_redis(config.redis) + check_compression(config.redis)

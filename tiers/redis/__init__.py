"""The tier that nodes share: blocks as records in Redis or Valkey, one server or a cluster."""

from kvtier.tiers.redis.store import RedisStore

from .store import RedisStore

__all__ = [
    "RedisStore",
]

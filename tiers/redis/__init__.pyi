from .store import RedisStore as RedisStore

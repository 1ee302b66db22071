from .forms import ClearForm
from .store import RedisStore

__all__ = [
    "ClearForm",
    "RedisStore",
]

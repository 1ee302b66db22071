"""How full the servers' memory is: each is asked for it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import redis

from kvtier.tiers import StoragePlace
from kvtier.tiers.redis.options import REDIS_ERRORS


def servers_room(clients: Sequence[tuple[str, redis.Redis]]) -> Iterator[StoragePlace]:
    """Of each server that tells it: waits for all of them, as long as their timeouts allow."""
    for name, client in clients:
        with suppress(*REDIS_ERRORS, OSError, LookupError, ValueError):
            memory: dict[str, Any] = client.info("memory")
            yield StoragePlace(name, int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None)

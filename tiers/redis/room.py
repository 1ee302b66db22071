"""How full the servers' memory is. They are asked now and then in the background: nobody waits for their answer."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Final

import redis

from kvtier.tiers import StoragePlace
from kvtier.tiers.redis.options import REDIS_ERRORS

_EVERY: Final = 10.0  # seconds between two answers, at least


class ServersRoom:
    """`told` has what was heard last, and has the servers asked if that is old. Thread-safe."""

    def __init__(self, clients: Callable[[], Sequence[tuple[str, redis.Redis]]]) -> None:
        """`clients`: the servers that hold blocks now, each by its name. Their timeouts bound the wait."""
        self._clients = clients
        self._lock = Lock()  # guards what follows
        self._told: tuple[StoragePlace, ...] = ()
        self._is_asking = False
        self._due = 0.0

    def told(self) -> Sequence[StoragePlace]:
        """Of each server that told it. Empty until the first answer, and where servers do not tell."""
        with self._lock:
            if not self._is_asking and time.monotonic() >= self._due:
                self._is_asking = True
                Thread(target=self._ask, name="kvtier-redis-room", daemon=True).start()
            return self._told

    def _ask(self) -> None:
        found = []
        try:
            for name, client in self._clients():
                with suppress(*REDIS_ERRORS, OSError, LookupError, ValueError):
                    memory: dict[str, Any] = client.info("memory")
                    found.append(
                        StoragePlace(name, int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None)
                    )
        finally:
            with self._lock:
                self._told, self._is_asking, self._due = tuple(found), False, time.monotonic() + _EVERY

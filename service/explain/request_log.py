"""Requests that have ended: the last ones, for `explain`, and the request log: one line of JSON for each."""

import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Final, Generic, Self, TypeVar

from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.naming import root_hash
from kvtier.tiers.pool import Causes

# --- the last ones ---------------------------------------------------------------------------------------------------

MOST_REQUESTS: Final = 1024
MOST_ITEMS: Final = 1 << 20  # tokens, or names of blocks
UNSALTED: Final = "no salt"


T = TypeVar("T", bound=Sized)


class Recent(Generic[T]):
    """The requests that ended last, bounded by their tokens or names; the oldest goes first. Thread-safe."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_items: int = MOST_ITEMS) -> None:
        self._lock = Lock()
        self._most_requests, self._most_items = most_requests, most_items
        self._known: OrderedDict[tuple[int, str], T] = OrderedDict()
        self._num_items = 0

    def record(self, client: int, request_id: str, request: T) -> None:
        """Record an ended request, in place of one with the same tenant and id. `client` as `client_of`."""
        key = client, request_id
        with self._lock:
            if (before := self._known.pop(key, None)) is not None:
                self._num_items -= len(before)
            self._known[key] = request
            self._num_items += len(request)
            while len(self._known) > self._most_requests or self._num_items > self._most_items:
                self._num_items -= len(self._known.popitem(last=False)[1])

    def find(self, client: int, request_id: str) -> T | None:
        with self._lock:
            return self._known.get((client, request_id))

    def __len__(self) -> int:
        return len(self._known)


def tenant_of(client: int, fingerprint: bytes) -> str:
    """A request's tenant for people: its number in the tiers, which does not reveal the cache_salt."""
    return UNSALTED if client == client_of(root_hash(fingerprint)) else f"{client:08x}"


def client_of(root: ChainHash) -> int:
    """The number of the tenant whose chains begin there, as `Answered.end_of` returns it."""
    return int.from_bytes(root[:4], "little")


# --- the request log -------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_MOST_WAITING: Final = 4096  # lines
_MOST_AT_ONCE: Final = 256  # lines of one write
_CLOSING: Final = 5.0  # seconds for the lines that wait at the end
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    id: str  # "": none
    tenant: str  # as `tenant_of` returns it
    prompt_tokens: int
    tokens: Mapping[str, int]  # of the prompt, by the tier they were found in; the others were computed
    missed: Causes = field(default_factory=dict)  # why blocks were in no tier
    output_tokens: int = 0
    ttft: float | None = None  # seconds to the first token; None: not known here
    seconds: float | None = None  # from arrival to the end; None: not known here
    end: str = "ended"  # how it ended, as far as that is known

    def line(self) -> bytes:
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": self.id or None,
            "tenant": self.tenant,
            "end": self.end,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens": {**self.tokens, "computed": max(0, self.prompt_tokens - sum(self.tokens.values()))},
            "missed": [{"cause": cause, "tier": tier, "blocks": n} for (cause, tier), n in self.missed.items()],
            "ttft_s": None if self.ttft is None else round(self.ttft, 6),
            "seconds": None if self.seconds is None else round(self.seconds, 6),
        }
        return json.dumps(fields).encode() + b"\n"


class RequestLog:
    """Appends lines to one file, reopened after a rotation. `write` never waits: a lost line is counted."""

    def __init__(self, path: Path, option: str, *, most_waiting: int = _MOST_WAITING) -> None:
        """Opens the file. ConfigError, naming the `option`, if it cannot be written."""
        self.path = path
        self.counts: Counter[str] = Counter(written=0, queue_full=0, io_error=0)  # lines
        try:
            self._file = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise ConfigError(f'{option} "{path}": {error.strerror}; name a file that can be written') from None
        self._is_torn = False  # the last line is incomplete: it is ended before the next
        self._waiting: Queue[LoggedRequest | None] = Queue(most_waiting)
        self._is_closed = False
        self._thread = Thread(target=self._write_on, name="kvtier-request-log", daemon=True)
        self._thread.start()

    @classmethod
    def opened(cls, path: Path | None, option: str) -> Self | None:
        return None if path is None else cls(path, option)

    def write(self, request: LoggedRequest) -> None:
        try:
            self._waiting.put_nowait(request)
        except Full:
            self.counts["queue_full"] += 1

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(Full):
            self._waiting.put(None, timeout=_CLOSING)
        self._thread.join(_CLOSING)

    def _write_on(self) -> None:
        is_open = True
        while is_open:
            batch = [self._waiting.get()]
            with suppress(Empty):
                while len(batch) < _MOST_AT_ONCE:
                    batch.append(self._waiting.get_nowait())
            is_open = None not in batch
            lines = [each.line() for each in batch if each is not None]
            try:
                self._append(b"".join(lines))
                self.counts["written"] += len(lines)
            except OSError as error:
                if not self.counts["io_error"]:
                    _log.warning("request log %s: %s; lines are lost until it can be written", self.path, error)
                self.counts["io_error"] += len(lines)
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        self._follow()
        if self._is_torn:
            data = b"\n" + data
        while data:
            count = os.write(self._file, data)
            self._is_torn = data[count - 1 : count] != b"\n"
            data = data[count:]

    def _follow(self) -> None:
        """Reopen the file if its path leads to another file now, or to none."""
        current = os.fstat(self._file)
        with suppress(FileNotFoundError):
            if os.path.samestat(current, os.stat(self.path)):
                return
        opened = os.open(self.path, _FLAGS, 0o600)
        os.close(self._file)
        self._file, self._is_torn = opened, False

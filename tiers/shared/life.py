"""The common parts of every tier that nodes share: an epoch, counts of outcomes, and a close that loses no reset."""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from kvtier.tiers import BlockRecord, KVMismatch, KVTierError, Outcome, Tier
from kvtier.tiers.config import ObjectsConfig, RedisConfig
from kvtier.tiers.shared.changes import SharedChanges
from kvtier.tiers.shared.forms import RecordForm

_COMPARED: Final = 30.0  # seconds that a comparison of KV probes is valid: a full server evicts them without notice


class StorageFailed(Exception):
    """The storage gave no valid reply; `code` has the storage's own word, if there is one."""

    def __init__(self, outcome: Outcome, why: str, code: str = "") -> None:
        super().__init__(why)
        self.outcome = outcome
        self.code = code


class SharedEpoch(ABC):
    """A number that is part of the key of every block stored under it. Thread-safe.

    It is the time when the namespace was begun or last reset, in microseconds; the highest one counts. A reset
    raises it: then no process finds a block stored before. It never falls: a process that knows a higher one than the
    storage writes it again. `forget` is called whenever it changes.
    """

    serves_on: ClassVar[bool]
    """Whether an agreed epoch stays valid until another is known, even if the storage cannot be reached."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._asking = threading.Lock()  # held by the one thread that reads or writes the stored epoch
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._known = 0  # the highest seen, or wanted by a reset
        self._agreed = False  # the storage has it
        self.num_begun = 0  # epochs that began, or that the storage had lost: whatever it keeps for one is gone

    @property
    def value(self) -> int | None:
        """The epoch for keys; None until it is agreed on."""
        with self._lock:
            return self._known if self._agreed else None

    def reset(self) -> None:
        """From now on blocks stored before are misses here; `settle` stores the new epoch for other processes."""
        with self._lock:
            self._known, self._agreed = max(time.time_ns() // 1000, self._known + 1), False
            self._forget()

    def settle(self, deadline: float) -> StorageFailed | None:
        """Have a value by `deadline` (time.monotonic), from the storage if need be. None, or why there is none."""
        if self._is_settled():
            return None
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return StorageFailed(Outcome.TIMEOUT, "no epoch in time")
        try:
            while not self._is_settled():
                self._agree(deadline)
        except StorageFailed as failed:
            return None if self.serves_on and self._agreed else failed.with_traceback(None)  # its frames keep buffers
        finally:
            self._asking.release()
        return None

    @abstractmethod
    def _is_settled(self) -> bool:
        """Whether the stored epoch need not be read now."""

    @abstractmethod
    def _agree(self, deadline: float) -> None:
        """Read the stored epoch, write ours if it is higher, and `_take` the one stored then. StorageFailed."""

    def _take(self, number: int) -> None:
        """The storage has this epoch now. It does not count if a reset has raised ours meanwhile. Under `_lock`."""
        if number >= self._known:
            if number > self._known:
                self.num_begun += 1
                self._forget()
            self._known, self._agreed = number, True


class OutcomeCounts:
    """How many blocks had which outcome, by verb. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._counts: Counter[str] = Counter()

    def add(self, verb: str, results: Sequence[BlockRecord | Outcome]) -> None:
        """Count the results of one call; a record is OK."""
        outcomes = [Outcome.OK if isinstance(result, BlockRecord) else result for result in results]
        with self._lock:
            self._counts.update(f"{verb}_{outcome}" for outcome in outcomes)

    def count(self, name: str, number: int) -> None:
        """So many more of one count."""
        with self._lock:
            self._counts[name] += number

    def counts(self) -> Mapping[str, int]:
        """Since the start: `{verb}_{outcome}`, and `evicted`: blocks missing when they were read."""
        with self._lock:
            return {**self._counts, "evicted": self._counts[f"read_{Outcome.EVICTED}"]}


class SharedTier(Tier):
    """A `Tier` that nodes share. Thread-safe. A batch has `config.deadline` seconds, and its bytes over `bandwidth`."""

    is_shared = True
    _epoch: SharedEpoch

    def __init__(self, name: str, config: RedisConfig | ObjectsConfig, form: RecordForm, record_bytes: int) -> None:
        """`record_bytes`: the length of the longest record."""
        self.change_feed: SharedChanges = SharedChanges(config.ttl)
        self._is_closed = False
        self._counts = OutcomeCounts()
        self._saved = form.saved
        self._config, self._record_bytes = config, record_bytes
        self._name = name
        self._compare: Callable[[], None] | None = None
        self._compared = self._refused = -1  # `num_begun` of the epoch in which the storage's probe agreed, or did not
        self._compare_at = 0.0
        self._closing = threading.Lock()  # guards what follows, and `_is_closed`; never held across I/O
        self._resetting: threading.Thread | None = None

    def reset(self) -> None:
        """Forget every block, in all processes. Returns at once: all is a miss here until the epoch is stored."""
        self._epoch.reset()
        with self._closing:
            if not self._is_closed:
                name, deadline = f"kvtier-{self._name}-reset", self._deadline(0)
                self._resetting = threading.Thread(target=self._epoch.settle, args=(deadline,), name=name, daemon=True)
                self._resetting.start()

    def compares_kv(self, compare: Callable[[], None]) -> None:
        self._compare = compare

    def _is_other_kv(self) -> bool:
        """Whether blocks of this epoch may be another model's: its KV probe is, or cannot be read now."""
        begun, now = self._epoch.num_begun, time.monotonic()
        if self._compare is None or (self._compared == begun and now < self._compare_at):
            return False
        if self._refused != begun:
            try:
                self._compare()
            except KVMismatch:
                self._compared, self._refused = -1, begun
            except KVTierError:  # no answer: the next call compares again
                return True
            else:
                self._compared, self._compare_at = begun, now + _COMPARED
        return self._refused == begun

    def stats(self) -> Mapping[str, int]:
        """Counts since open: {verb}_{outcome}, evicted; with compression also saved_{way}, in bytes."""
        return {**self._counts.counts(), **(self._saved.counts() if self._saved is not None else {})}

    def _close(self, timeout: float) -> bool:
        """Wait for the last reset, `timeout` seconds at most: none is lost. False if the tier was closed before."""
        with self._closing:
            if self._is_closed:
                return False
            self._is_closed = True
        if self._resetting is not None:
            self._resetting.join(timeout)
        return True

    def _deadline(self, num_blocks: int) -> float:
        return time.monotonic() + self._config.deadline + num_blocks * self._record_bytes / self._config.bandwidth


def cut_off(outcomes: list[Outcome]) -> list[Outcome]:
    """Blocks behind the first failure cannot be reached."""
    first = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), len(outcomes))
    if first == len(outcomes) or outcomes[first] in (Outcome.EPOCH, Outcome.CLOSED):
        return outcomes
    rest = Outcome.FULL if outcomes[first] is Outcome.FULL else Outcome.PARENT_FAILED
    return [*outcomes[: first + 1], *[rest] * (len(outcomes) - first - 1)]

"""A shared tier from its opening to its closing, and what became of blocks there, counted."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from kvtier.tiers import BlockRecord, Outcome


class TierLife:
    """Whether a tier is closed. Thread-safe. No reset is lost by closing: that waits until it is told."""

    def __init__(self, name: str) -> None:
        """`name` is that of the thread."""
        self._name = name
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._telling: threading.Thread | None = None
        self.is_closed = False

    def tell(self, reset: Callable[[], object]) -> None:
        """Call `reset`, which has a deadline of its own, in a thread. Nothing if the tier is closed."""
        with self._lock:
            if not self.is_closed:
                self._telling = threading.Thread(target=reset, name=self._name, daemon=True)
                self._telling.start()

    def close(self, timeout: float) -> bool:
        """Wait for the last reset, `timeout` seconds at most. False if the tier was closed before."""
        with self._lock:
            if self.is_closed:
                return False
            self.is_closed = True
        if self._telling is not None:
            self._telling.join(timeout)
        return True


class OutcomeCounts:
    """How many blocks had which outcome, by verb. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards what follows
        self._counts: Counter[str] = Counter()

    def add(self, verb: str, results: Sequence[BlockRecord | Outcome]) -> None:
        """A record is OK."""
        outcomes = [Outcome.OK if isinstance(result, BlockRecord) else result for result in results]
        with self._lock:
            self._counts.update(f"{verb}_{outcome}" for outcome in outcomes)

    def add_ok(self, verb: str, num_blocks: int) -> None:
        """The same of blocks that were all OK."""
        with self._lock:
            self._counts[f"{verb}_{Outcome.OK}"] += num_blocks

    def counts(self) -> Mapping[str, int]:
        """Since the start: `{verb}_{outcome}`, and `evicted`, what was gone when it was read."""
        with self._lock:
            return {**self._counts, "evicted": self._counts[f"read_{Outcome.EVICTED}"]}


def cut_off(outcomes: list[Outcome]) -> list[Outcome]:
    """Behind the first failure nobody could reach a block."""
    first = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), len(outcomes))
    if first == len(outcomes) or outcomes[first] in (Outcome.EPOCH, Outcome.CLOSED):
        return outcomes
    rest = Outcome.FULL if outcomes[first] is Outcome.FULL else Outcome.PARENT_FAILED
    return [*outcomes[: first + 1], *[rest] * (len(outcomes) - first - 1)]

"""What became of blocks where nodes share them: counted, and of a chain when one could not be stored."""

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock

from kvtier.tiers import BlockRecord, Outcome


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

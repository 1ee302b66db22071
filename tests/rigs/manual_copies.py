"""A copy stream whose copies complete, or fail, when a test says so."""

import threading
from collections import deque

from kvtier.tiers.copies.block_copier import CANCELLED, BlockCopies, CopyDirection
from kvtier.tiers.copies.transfer import L1, MAX_QUEUED, CopyEvent, CopyTask, HostEvent, copier, predecessor, refusal
from kvtier.tiers.host import HostRegion


class ManualCopyStream:
    """The test twin: copies complete, or fail, when the test says so. Single-threaded use, but `drain` may wait."""

    def __init__(self, device: L1, region: HostRegion, *, max_queued: int = MAX_QUEUED) -> None:
        """As `HostCopyStream`, without threads."""
        self._copier = copier(device, region)
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._pending: deque[CopyTask] = deque()
        self._closed = False

    @property
    def num_pending(self) -> int:
        """Copies enqueued and not ended."""
        return len(self._pending)

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L2 → L1 copies."""
        return self._enqueue("load", copies, after)

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L1 → L2 copies."""
        return self._enqueue("store", copies, after)

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        """Wait for the event."""
        return event.wait(timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until the test has ended every copy (from another thread)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self, timeout: float) -> None:
        """Drain, then cancel. Idempotent."""
        with self._changed:
            self._closed = True
        self.drain(timeout)
        with self._changed:
            while self._pending:
                self._pending.popleft().event.end(CANCELLED)
            self._changed.notify_all()

    def complete_next(self) -> CopyEvent:
        """Make the oldest copy that may start, and end it. IndexError if none may."""
        task = self._take()
        return self._end(task, task.run(self._copier))

    def fail_next(self, error: str = "the test failed this copy") -> CopyEvent:
        """End the oldest copy that may start with `error`, leaving its targets as they are. IndexError if none may."""
        return self._end(self._take(), error)

    def complete_all(self) -> int:
        """Make every copy, in order; returns how many."""
        count = self.num_pending
        for _ in range(count):
            self.complete_next()
        return count

    def _take(self) -> CopyTask:
        with self._changed:
            waiting: set[CopyDirection] = set()  # a direction whose head waits holds back what is behind it
            for task in self._pending:
                if task.direction not in waiting and task.ready():
                    self._pending.remove(task)
                    return task
                waiting.add(task.direction)
        raise IndexError(f"no copy may start: {len(waiting)} of 2 directions wait for an event")

    def _end(self, task: CopyTask, error: str | None) -> CopyEvent:
        with self._changed:
            task.event.end(error)
            self._changed.notify_all()
        return task.event

    def _enqueue(self, direction: CopyDirection, copies: BlockCopies, after: object | None) -> CopyEvent:
        event = HostEvent()
        task = CopyTask(direction, copies, predecessor(after), event)
        error = self._copier.invalid(copies)
        with self._changed:
            queued = sum(other.direction == direction for other in self._pending)
            error = error or refusal(self._closed, queued, self._max_queued)
            if error is None:
                self._pending.append(task)
        if error is not None:
            event.end(error)
        return event

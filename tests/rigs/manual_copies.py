"""A copy stream whose copies complete, or fail, when a test says so."""

from kvtier.tiers.copies.transfer import L1, MAX_QUEUED, CopyEvent, CopyTask, HostCopyStream
from kvtier.tiers.host import HostRegion


class ManualCopyStream(HostCopyStream):
    """A `HostCopyStream` without threads: the test makes its copies. Single-threaded use, but `drain` may wait."""

    def __init__(self, device: L1, region: HostRegion, *, max_queued: int = MAX_QUEUED) -> None:
        super().__init__(device, region, num_threads=0, max_queued=max_queued, at_once=0)

    @property
    def num_pending(self) -> int:
        """Copies enqueued and not ended."""
        return self._num_pending()

    def complete_next(self) -> CopyEvent:
        """Make the oldest copy that may start, loads first, and end it. IndexError if none may."""
        task = self.take()
        return self._end(task, task.run(self._copier))

    def fail_next(self, error: str = "the test failed this copy") -> CopyEvent:
        """End the copy that `complete_next` would make with `error`, leaving its targets as they are."""
        return self._end(self.take(), error)

    def complete_all(self) -> int:
        """Make every copy; returns how many."""
        count = self.num_pending
        for _ in range(count):
            self.complete_next()
        return count

    def take(self) -> CopyTask:
        with self._changed:
            for queue in self._queues.values():
                if queue and queue[0].ready():
                    return queue.popleft()
            waiting = sum(map(bool, self._queues.values()))
        raise IndexError(f"no copy may start: {waiting} of 2 directions wait for an event")

    def _end(self, task: CopyTask, error: str | None) -> CopyEvent:
        with self._changed:
            task.event.end(error)
            self._changed.notify_all()
        return task.event

"""A tier's I/O threads: loads before stores, small loads batched, bounds and deadlines for queued and running jobs."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from typing import Any, Final, Protocol, TypeVar

from kvtier.tiers import Outcome

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MOMENT: Final = 0.25  # seconds: most storage has its own deadline, slightly later than ours


def begun(name: str, work: Callable[[], T]) -> "Future[T]":
    """Run `work` on a daemon thread: if it hangs, the process can still exit. Raises nothing."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # its waiters may leave

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # no thread is free
        future.set_exception(error)
    return future


class Job(Protocol):
    """One I/O operation. The queue calls `end` exactly once for every job it accepted.

    `overdue` is called at most once, only while `run` runs, and has returned before `end` is called.
    """

    deadline: float  # on the queue's clock; inf: memory only, it cannot hang

    def run(self) -> Any:
        """Do the I/O, on an I/O thread, and return its result."""

    def end(self, result: Any, *, late: bool) -> None:
        """Complete the job. `result`: what `run` returned, or the Outcome that says why it did not run or raised.

        `late`: `overdue` was called before. Must not raise.
        """

    def overdue(self) -> None:
        """It runs past its deadline: nothing waits for it now, but `end` still follows. Must not wait for I/O."""
        return


class JoinedJob(ABC):
    """A `Job` that one thread may run together with others of its kind, if the storage serves many blocks at once."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """The job's size in blocks."""

    @abstractmethod
    def run_with(self, others: "Sequence[JoinedJob]") -> Sequence[Any]:
        """Do its I/O and that of the others in one call; returns the results, its own first."""


@dataclass(eq=False, slots=True)
class _RunningJob:
    """A job on its thread. `lock` orders `overdue` and the end of `run`; it is taken before any other lock."""

    job: Job
    lock: Lock = field(default_factory=Lock)
    is_late: bool = False
    is_over: bool = False


class IoQueue:
    """`num_threads` threads over two bounded queues, urgent first.

    A thread runs consecutive small urgent jobs together, up to `joined` blocks, but leaves a fair share to free
    threads. The thread that takes a batch wakes the next one if jobs are left. A job submitted while a thread is on its
    way to the queue wakes no other: if each job woke a thread, each would run alone.

    Lock: `_lock` guards the queues and is never held while a job's methods run. Workers and drainers have conditions of
    their own, because a `notify` meant for a worker must not wake a drainer instead.
    """

    def __init__(
        self, name: str, num_threads: int, max_queued: int, clock: Callable[[], float], joined: int = 1
    ) -> None:
        self._clock = clock
        self._joined = joined
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._lock = Lock()
        self._job_added = Condition(self._lock)
        self._work_ended = Condition(self._lock)
        self.urgent: deque[Job] = deque()
        self.normal: deque[Job] = deque()
        self.running: dict[int, _RunningJob] = {}  # key: thread number + i × num_threads, i: place in its batch
        self._closed = False
        self._num_waiting = 0  # threads that sleep
        self._num_coming = num_threads  # … and threads that are about to check the queues
        self._threads = [
            Thread(target=self._work, args=(n,), name=f"kvtier-{name}-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool = False) -> bool:
        """Enqueue; False if the queue is full or closed (then no method of the job is called)."""
        with self._lock:
            if self._closed or len(self.urgent) + len(self.normal) >= self._max_queued:
                return False
            (self.urgent if urgent else self.normal).append(job)
            self._wake_one()
            return True

    @property
    def idle(self) -> bool:
        with self._lock:
            return not (self.urgent or self.normal or self.running)

    def expire(self) -> bool:
        """End queued jobs that are past their deadline; call `overdue` of those that run past theirs.

        True if every thread hangs, so that no queued job will run.
        """
        now = self._clock()
        with self._lock:
            late = [job for queue in (self.urgent, self.normal) for job in queue if now >= job.deadline]
            if late:
                self.urgent = deque(job for job in self.urgent if now < job.deadline)
                self.normal = deque(job for job in self.normal if now < job.deadline)
                self._work_ended.notify_all()
            hung = [each for each in self.running.values() if not each.is_late and now >= each.job.deadline]
            hanging = {key % self._num_threads for key, r in self.running.items() if now >= r.job.deadline + _MOMENT}
        for job in late:
            job.end(Outcome.TIMEOUT, late=False)
        for running in hung:
            with running.lock:
                if not (running.is_over or running.is_late):
                    running.is_late = True
                    running.job.overdue()
        return len(hanging) == self._num_threads

    def drain(self, timeout: float) -> bool:
        """Wait until idle; False if `timeout` seconds (real time) pass first."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while self.urgent or self.normal or self.running:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._work_ended.wait(left)
        return True

    def close(self, timeout: float) -> bool:
        """End queued jobs with CLOSED and join the threads; False if a job still runs. Idempotent.

        A thread that is merely about to exit does not count as hanging, even if `timeout` is too short to join it.
        """
        with self._lock:
            self._closed = True
            self._num_coming, self._num_waiting = self._num_coming + self._num_waiting, 0
            waiting = [*self.urgent, *self.normal]
            self.urgent.clear()
            self.normal.clear()
            self._job_added.notify_all()
            self._work_ended.notify_all()
        for job in waiting:
            job.end(Outcome.CLOSED, late=False)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return not self.running

    def _work(self, number: int) -> None:
        while batch := self._next(number):
            results = self._result([*batch.values()])
            with self._lock:
                self._num_coming += 1
            for running, result in zip(batch.values(), results, strict=True):
                with running.lock:
                    running.is_over = True  # from here on `overdue` is not called
                try:
                    running.job.end(result, late=running.is_late)
                except Exception:
                    _log.exception("the end of an I/O job failed")
            with self._lock:
                for key in batch:
                    del self.running[key]
                self._work_ended.notify_all()

    def _result(self, batch: list[_RunningJob]) -> Sequence[Any]:
        """Each job's result, or the Outcome of those that did not run or raised."""
        now = self._clock()
        are_due = [now < running.job.deadline for running in batch]
        due = [running.job for running, is_due in zip(batch, are_due, strict=True) if is_due]
        results: Sequence[Any] = []
        try:
            if len(due) > 1:
                first, *others = (job for job in due if isinstance(job, JoinedJob))
                results = first.run_with(others)
                if len(results) != len(due):
                    raise ValueError(f"{len(results)} results of {len(due)} jobs")
            else:
                results = [job.run() for job in due]
        except Exception:
            _log.exception("an I/O job failed; counted as %s", Outcome.IO_ERROR)
            results = [Outcome.IO_ERROR] * len(due)
        remaining = iter(results)
        return [next(remaining) if is_due else Outcome.TIMEOUT for is_due in are_due]

    def _next(self, number: int) -> dict[int, _RunningJob]:
        """The jobs this thread runs next, under their keys in `running`; empty if the queue is closed."""
        with self._lock:
            self._num_coming -= 1
            while not (self.urgent or self.normal):
                if self._closed:
                    return {}
                self._num_waiting += 1
                self._job_added.wait()  # the waker already added it to `_num_coming`
                self._num_coming -= 1
            num_free = 1 + self._num_coming + self._num_waiting
            share = -(-len(self.urgent) // num_free)
            jobs = [(self.urgent or self.normal).popleft()]
            room, now = self._joined, self._clock()
            while isinstance(last := jobs[-1], JoinedJob) and self.urgent and len(jobs) < share:
                room -= last.num_blocks
                following = self.urgent[0]
                if not isinstance(following, JoinedJob) or following.num_blocks > room or now >= following.deadline:
                    break
                jobs.append(self.urgent.popleft())
            batch = {number + i * self._num_threads: _RunningJob(job) for i, job in enumerate(jobs)}
            self.running.update(batch)
            if self.urgent or self.normal:
                self._wake_one()
            return batch

    def _wake_one(self) -> None:
        """Unless a thread is about to check the queues: that one wakes the next if it leaves jobs."""
        if self._num_waiting and not self._num_coming:
            self._num_waiting -= 1
            self._num_coming += 1
            self._job_added.notify()

"""A tier's I/O threads: loads before stores, a bound on what waits, a deadline on what waits and on what runs."""

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, Thread
from typing import Protocol

from kvtier.tiers.tier import Outcome

_log = logging.getLogger(__name__)


class Job(Protocol):
    """One piece of I/O. `run` or `drop` is called exactly once; `overdue` at most once, only while it runs."""

    deadline: float  # on the queue's clock

    def run(self) -> None:
        """Do the I/O and settle its outcome; called on an I/O thread."""

    def drop(self, outcome: Outcome) -> None:
        """It will never run, or `run` raised: settle with `outcome`. Must not raise."""

    def overdue(self) -> None:
        """It runs past its deadline: nobody waits for it any more; its late completion still ends in `run`."""


class IoQueue:
    """`num_threads` threads over two bounded queues, urgent first.

    Lock: `_lock`, held only around the queues, never while a job runs or is told anything. Workers and drainers wait on
    conditions of their own: a `notify` meant for a worker must not wake a drainer instead.
    """

    def __init__(self, name: str, num_threads: int, max_queued: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._max_queued = max_queued
        self._lock = Lock()
        self._work_came = Condition(self._lock)
        self._work_ended = Condition(self._lock)
        self._urgent: deque[Job] = deque()
        self._normal: deque[Job] = deque()
        self._running: dict[int, tuple[Job, bool]] = {}  # thread number → job, told overdue
        self._closed = False
        self._threads = [
            Thread(target=self._work, args=(n,), name=f"kvtier-{name}-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool = False) -> bool:
        """Enqueue; False when the queue is full or closed (the job is not touched)."""
        with self._lock:
            if self._closed or len(self._urgent) + len(self._normal) >= self._max_queued:
                return False
            (self._urgent if urgent else self._normal).append(job)
            self._work_came.notify()
            return True

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return not (self._urgent or self._normal or self._running)

    def expire(self) -> None:
        """Drop what waited past its deadline; tell what runs past its own. Cheap; called often."""
        if not (self._running or self._urgent or self._normal):
            return
        now = self._clock()
        with self._lock:
            late = [job for queue in (self._urgent, self._normal) for job in queue if now >= job.deadline]
            if late:
                self._urgent = deque(job for job in self._urgent if now < job.deadline)
                self._normal = deque(job for job in self._normal if now < job.deadline)
                self._work_ended.notify_all()
            hung = [(n, job) for n, (job, told) in self._running.items() if not told and now >= job.deadline]
            for n, job in hung:
                self._running[n] = (job, True)
        for job in late:
            job.drop(Outcome.TIMEOUT)
        for _, job in hung:
            job.overdue()

    def drain(self, timeout: float) -> bool:
        """Wait until idle; False when `timeout` seconds (real time) pass first."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while self._urgent or self._normal or self._running:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._work_ended.wait(left)
        return True

    def close(self, timeout: float) -> bool:
        """Drop what waits with CLOSED and join the threads; False where one still hangs in its I/O. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = [*self._urgent, *self._normal]
            self._urgent.clear()
            self._normal.clear()
            self._work_came.notify_all()
            self._work_ended.notify_all()
        for job in waiting:
            job.drop(Outcome.CLOSED)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        while (job := self._next(number)) is not None:
            try:
                if self._clock() >= job.deadline:
                    job.drop(Outcome.TIMEOUT)
                else:
                    job.run()
            except Exception:
                _log.exception("an I/O job failed; counted as %s", Outcome.IO_ERROR)
                job.drop(Outcome.IO_ERROR)
            finally:
                with self._lock:
                    del self._running[number]
                    self._work_ended.notify_all()

    def _next(self, number: int) -> Job | None:
        with self._lock:
            while not (self._urgent or self._normal):
                if self._closed:
                    return None
                self._work_came.wait()
            job = (self._urgent or self._normal).popleft()
            self._running[number] = (job, False)
            return job

"""A tier's I/O threads: loads before stores, small loads together, bounds and deadlines on what waits and runs."""

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
_MOMENT: Final = 0.25  # seconds: most storage has deadlines of its own, which come a moment later


def begun(name: str, work: Callable[[], T]) -> "Future[T]":
    """What comes of `work`, done on a thread of its own: should it never end, it keeps no process from ending."""
    came: Future[T] = Future()

    def run() -> None:
        try:
            came.set_result(work())
        except BaseException as error:
            came.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return came


class Job(Protocol):
    """One piece of I/O. The queue sees to it that `end` is called exactly once for every job it has taken.

    `overdue` is called at most once, only while `run` runs, and has returned before `end` is called.
    """

    deadline: float  # on the queue's clock

    def run(self) -> Any:
        """Do the I/O, on an I/O thread, and return what came of it."""

    def end(self, result: Any, *, late: bool) -> None:
        """Settle: `result` is what `run` returned, or an Outcome that says why it never ran or that it raised.

        `late`: `overdue` was called before. Must not raise.
        """

    def overdue(self) -> None:
        """It runs past its deadline: nobody waits for it any more; `end` still follows. Must not wait for I/O."""


class JoinedJob(ABC):
    """A `Job` that one thread may run together with others of its kind, where the storage answers many at once."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """How large it is."""

    @abstractmethod
    def run_with(self, others: "Sequence[JoinedJob]") -> Sequence[Any]:
        """Do its I/O and that of the others at once; returns what came of it, its own first."""


@dataclass(eq=False, slots=True)
class _RunningJob:
    """A job on its thread. `lock` puts `overdue` and the job's end in order; it is taken before any other lock."""

    job: Job
    lock: Lock = field(default_factory=Lock)
    is_late: bool = False
    is_over: bool = False


class IoQueue:
    """`num_threads` threads over two bounded queues, urgent first.

    A thread takes small urgent jobs that wait in a row together, up to `joined` blocks of them, but leaves their share
    to other threads that are free. Who takes wakes the next one if something is left: a job that comes while a thread
    is on its way to the queue wakes nobody, because a thread woken for each job would take each by itself.

    Lock: `_lock`, held only around the queues, never while a job runs or is told anything. Workers and drainers wait on
    conditions of their own, because a `notify` meant for a worker must not wake a drainer instead.
    """

    def __init__(
        self, name: str, num_threads: int, max_queued: int, clock: Callable[[], float], joined: int = 1
    ) -> None:
        self._clock = clock
        self._joined = joined
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._lock = Lock()
        self._work_came = Condition(self._lock)
        self._work_ended = Condition(self._lock)
        self.urgent: deque[Job] = deque()
        self.normal: deque[Job] = deque()
        self.running: dict[int, _RunningJob] = {}  # by thread number, and its place among those it runs
        self._closed = False
        self._num_waiting = 0  # threads that wait to be woken
        self._num_coming = num_threads  # … and those that will look at the queues in a moment
        self._threads = [
            Thread(target=self._work, args=(n,), name=f"kvtier-{name}-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool = False) -> bool:
        """Enqueue; False when the queue is full or closed (the job is not touched)."""
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
        """End what waited past its deadline; tell what runs past its own. Needed only where something waits or runs.

        True if every thread hangs: nothing that waits will run.
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
        """Wait until idle; False when `timeout` seconds (real time) pass first."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while self.urgent or self.normal or self.running:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._work_ended.wait(left)
        return True

    def close(self, timeout: float) -> bool:
        """End what waits with CLOSED and join the threads; False if one still runs a job. Idempotent.

        A thread that is only about to end hangs in nothing, also where `timeout` leaves it no time for that.
        """
        with self._lock:
            self._closed = True
            self._num_coming, self._num_waiting = self._num_coming + self._num_waiting, 0
            waiting = [*self.urgent, *self.normal]
            self.urgent.clear()
            self.normal.clear()
            self._work_came.notify_all()
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
                    running.is_over = True  # from here on nobody calls it late
                try:
                    running.job.end(result, late=running.is_late)
                except Exception:
                    _log.exception("the end of an I/O job failed")
            with self._lock:
                for key in batch:
                    del self.running[key]
                self._work_ended.notify_all()

    def _result(self, batch: list[_RunningJob]) -> Sequence[Any]:
        """What came of each job, or why there is no such thing."""
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
        came = iter(results)
        return [next(came) if is_due else Outcome.TIMEOUT for is_due in are_due]

    def _next(self, number: int) -> dict[int, _RunningJob]:
        """What this thread runs now, under its keys in `running`; nothing: the queue is closed."""
        with self._lock:
            self._num_coming -= 1
            while not (self.urgent or self.normal):
                if self._closed:
                    return {}
                self._num_waiting += 1
                self._work_came.wait()  # who wakes it counts it as coming
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
        """Unless a thread comes anyway: it wakes the next if it leaves something."""
        if self._num_waiting and not self._num_coming:
            self._num_waiting -= 1
            self._num_coming += 1
            self._work_came.notify()

"""Stories of an I/O queue: order, bounds, deadlines while waiting and while running, jobs that raise, closing."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Barrier, Event, Thread

import pytest
from at_once import at_once
from doubles import FakeClock, wait_until

from kvtier.tiers.hierarchy.io_queue import IoQueue, JoinedJob
from kvtier.tiers.tier import Outcome


class ScriptedJob:
    """Does what the test says, and writes down what it was told."""

    def __init__(
        self, log: list[str], name: str, deadline: float = math.inf, work: Callable[[], object] = lambda: None
    ) -> None:
        self.deadline = deadline
        self.name = name
        self.started = Event()
        self.ended = self.late = False
        self._log = log
        self._work = work

    def run(self) -> None:
        self.started.set()
        self._work()

    def end(self, result: Outcome | None, *, late: bool) -> None:
        assert not self.ended, "it is told its end exactly once"
        self.ended, self.late = True, late
        self._log.append(f"{self.name} {'ran' if result is None else result}")

    def overdue(self) -> None:
        self._log.append(f"{self.name} overdue")


class SmallJob(ScriptedJob, JoinedJob):
    """One of those that run together; it writes down with whom."""

    num_blocks = 2

    def run_with(self, others: Sequence[JoinedJob]) -> list[str]:
        jobs = [self, *(other for other in others if isinstance(other, SmallJob))]
        self._log.append(" + ".join(job.name for job in jobs))
        for job in jobs:
            job.run()
        return [f"{job.name}'s" for job in jobs]


class Story:
    """A queue, its clock, a gate that jobs may wait at, and the log of what jobs were told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.gate = Event()
        self.log: list[str] = []
        self.queues: list[IoQueue] = []

    def queue(self, num_threads: int = 1, max_queued: int = 100, joined: int = 1) -> IoQueue:
        self.queues.append(IoQueue("test", num_threads, max_queued, self.clock, joined))
        return self.queues[-1]

    def job(self, name: str, within: float = math.inf, work: Callable[[], object] = lambda: None) -> ScriptedJob:
        return ScriptedJob(self.log, name, self.clock() + within, work)

    def gated(self, name: str, within: float = math.inf) -> ScriptedJob:
        return self.job(name, within, lambda: self.gate.wait(30))

    def block(self, queue: IoQueue, within: float = math.inf) -> ScriptedJob:
        """A job that runs and hangs until the gate opens."""
        job = self.gated("hung", within)
        assert queue.submit(job)
        assert job.started.wait(60)
        return job


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    story.gate.set()
    for queue in story.queues:
        assert queue.close(10)


def test_urgent_jobs_go_first_each_kind_in_order(story: Story) -> None:
    queue = story.queue()
    story.block(queue)
    for name in ("write 1", "write 2"):
        assert queue.submit(story.job(name))
    for name in ("read 1", "read 2"):
        assert queue.submit(story.job(name), urgent=True)
    story.gate.set()
    assert queue.drain(60)
    assert queue.idle
    assert story.log == ["hung ran", "read 1 ran", "read 2 ran", "write 1 ran", "write 2 ran"]


def test_a_full_queue_refuses_and_does_not_touch_the_job(story: Story) -> None:
    queue = story.queue(max_queued=2)
    story.block(queue)
    assert queue.submit(story.job("a"))
    assert queue.submit(story.job("b"), urgent=True)
    assert not queue.submit(story.job("c"))  # what waits is bounded, of both kinds together
    assert not queue.submit(story.job("d"), urgent=True)
    story.gate.set()
    assert queue.drain(60)
    assert story.log == ["hung ran", "b ran", "a ran"]
    assert queue.submit(story.job("e"))  # there is room again


def test_a_deadline_passes_while_a_job_waits(story: Story) -> None:
    queue = story.queue()
    story.block(queue)
    for name, within in (("early", 1.0), ("late", 3.0), ("early too", 1.0)):
        queue.submit(story.job(name, within))
    queue.submit(story.job("urgent early", 1.0), urgent=True)
    story.clock.advance(0.5)
    queue.expire()
    assert not story.log  # nothing is due
    story.clock.advance(1)
    queue.expire()
    assert story.log == ["urgent early timeout", "early timeout", "early too timeout"]
    story.gate.set()
    assert queue.drain(60)
    assert story.log[3:] == ["hung ran", "late ran"]


def test_an_overdue_job_is_notified_once_and_still_ends_late(story: Story) -> None:
    queue = story.queue()
    job = story.block(queue, within=1.0)
    story.clock.advance(1)
    queue.expire()
    queue.expire()
    assert story.log == ["hung overdue"]
    assert not queue.idle  # its thread is not back yet
    story.gate.set()
    assert queue.drain(60)
    assert story.log == ["hung overdue", "hung ran"]
    assert job.late


def test_a_job_that_raises_is_dropped_as_an_io_error_and_costs_no_thread(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    queue = story.queue()

    def explode() -> None:
        raise ValueError("a bug")

    with caplog.at_level(logging.ERROR):
        queue.submit(story.job("bad", work=explode))
        queue.submit(story.job("good"))
        assert queue.drain(60)
    assert story.log == ["bad io_error", "good ran"]
    assert "a bug" in caplog.text  # counted, and not silent


def test_a_drainer_never_swallows_the_wake_up_of_a_worker(story: Story) -> None:
    """A `notify` meant for an idle worker must not wake somebody who waits for the queue to become idle."""
    queue = story.queue(num_threads=2)
    story.block(queue)
    drainers = [Thread(target=queue.drain, args=(30,)) for _ in range(8)]
    for drainer in drainers:
        drainer.start()
    for i in range(200):  # one thread hangs, the other must see every single job
        job = story.job(f"job {i}")
        queue.submit(job)
        assert job.started.wait(60)
    story.gate.set()
    for drainer in drainers:
        drainer.join(60)
        assert not drainer.is_alive()


def test_close_drops_queued_jobs_and_refuses_new_ones(story: Story) -> None:
    queue = story.queue()
    story.block(queue)
    queue.submit(story.job("read"), urgent=True)
    queue.submit(story.job("write"))
    closer = Thread(target=queue.close, args=(30,))
    closer.start()
    wait_until(lambda: len(story.log) == 2)
    assert story.log == ["read closed", "write closed"]
    assert not queue.submit(story.job("too late"))
    story.gate.set()  # the running one ends, as `run` always may
    closer.join(60)
    assert not closer.is_alive()
    assert story.log == ["read closed", "write closed", "hung ran"]
    assert queue.close(1)  # again: nothing happens
    assert queue.idle


def test_close_does_not_wait_for_a_hung_job_for_ever(story: Story) -> None:
    queue = story.queue()
    story.block(queue)
    assert not queue.close(0.05)
    story.gate.set()
    assert queue.close(10)
    assert story.log == ["hung ran"]


def small(story: Story, name: str, within: float = math.inf, work: Callable[[], object] = lambda: None) -> SmallJob:
    return SmallJob(story.log, name, story.clock() + within, work)


def test_small_loads_that_wait_in_a_row_run_together(story: Story) -> None:
    queue = story.queue(joined=5)
    hung = story.block(queue)
    for job in (small(story, "a"), small(story, "b"), small(story, "c"), story.job("d"), small(story, "e")):
        assert queue.submit(job, urgent=True)
    assert queue.submit(small(story, "store"))
    story.gate.set()
    assert queue.drain(60)
    assert hung.ended
    # Two of two blocks fit five; what is no such load, and a store, run alone.
    assert story.log == ["hung ran", "a + b", "a a's", "b b's", "c ran", "d ran", "e ran", "store ran"]


def test_threads_that_are_free_share_what_waits(story: Story) -> None:
    """One that took all of it would leave the disk idle while it ends them."""
    queue = story.queue(num_threads=2, joined=16)
    story.block(queue)  # one thread …
    submitted = Event()
    other = story.job("other", work=lambda: submitted.wait(30) and None)  # … and the other
    assert queue.submit(other)
    assert other.started.wait(60)
    meet = Barrier(2)  # "a" and what the second thread takes first run at the same time
    names = "abcdefgh"
    for name in names:
        work = (lambda: meet.wait(30) and None) if name in "ae" else (lambda: None)
        assert queue.submit(small(story, name, work=work), urgent=True)
    with queue._lock:
        queue._num_coming += 1  # the hung thread is about to come
    submitted.set()
    wait_until(lambda: "a + b + c + d" in story.log)
    with queue._lock:
        queue._num_coming -= 1
    story.gate.set()  # it takes the other half
    assert queue.drain(60)
    assert "e + f + g + h" in story.log


def test_no_job_is_left_lying_whatever_the_order_of_wake_ups(story: Story) -> None:
    """Jobs that submit jobs, from several threads, with pauses: all run, and then all threads wait."""
    queue = story.queue(num_threads=3, max_queued=4096, joined=4)
    ended: list[str] = []

    class Chain(SmallJob):
        left = 30

        def end(self, result: object, *, late: bool) -> None:
            ended.append(self.name)
            if self.left:
                after = Chain([], self.name)
                after.left = self.left - 1
                assert queue.submit(after, urgent=bool(self.left % 3))

    def submit(number: int) -> None:
        for i in range(20):
            assert queue.submit(Chain([], f"{number}/{i}"), urgent=True)
            if i % 5 == 0:
                assert queue.drain(60)

    at_once(*(partial(submit, n) for n in range(3)))
    assert queue.drain(60)
    assert Counter(ended) == {f"{n}/{i}": 31 for n in range(3) for i in range(20)}
    wait_until(lambda: (queue._num_waiting, queue._num_coming) == (3, 0))


def test_a_batch_with_a_wrong_number_of_results_fails_all_of_it(story: Story) -> None:
    queue = story.queue(joined=6)
    story.block(queue)
    first = small(story, "a")
    first.run_with = lambda others: ["one"]  # type: ignore[method-assign]
    for job in (first, small(story, "b")):
        assert queue.submit(job, urgent=True)
    story.gate.set()
    assert queue.drain(60)
    assert story.log == ["hung ran", f"a {Outcome.IO_ERROR}", f"b {Outcome.IO_ERROR}"]


def test_a_batch_that_raises_fails_all_of_it_and_the_thread_lives_on(story: Story) -> None:
    queue = story.queue(joined=6)
    story.block(queue)

    def raises() -> None:
        raise RuntimeError("broken")

    for job in (small(story, "a", work=raises), small(story, "b")):
        assert queue.submit(job, urgent=True)
    story.gate.set()
    assert queue.drain(60)
    assert story.log == ["hung ran", "a + b", f"a {Outcome.IO_ERROR}", f"b {Outcome.IO_ERROR}"]
    assert queue.submit(small(story, "c"), urgent=True)
    assert queue.drain(60)
    assert story.log[-1] == "c ran"


def test_a_queue_that_runs_nothing_hangs_in_nothing_however_little_time_it_has_to_close(story: Story) -> None:
    queue = story.queue(num_threads=2)
    assert queue.submit(story.job("one"))
    assert queue.drain(60)
    assert queue.close(0)  # its threads, which wait for jobs, have no time to end

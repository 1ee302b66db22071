"""Stories of jobs between an engine's memory and the tiers: whole, partial, refused, hung, drained."""

from collections.abc import Iterator, Sequence

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, payload_of, wait_until

from kvtier.connector.vllm.tier_jobs import EndedJob, StoreOrder, TierJobs
from kvtier.tiers.hierarchy.lower_tier import PortSettings, Rates, TierPort
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import BATCH_BYTES, BlockRecord, ChainHash, Outcome

NAMES = chain_of(6).hashes
DEADLINE = 2.0
LOAD_DEADLINE = 3.0


def ended_jobs(jobs: TierJobs) -> list[EndedJob]:
    """The next jobs to end."""
    found: list[EndedJob] = []

    def any_ended() -> bool:
        found.extend(jobs.finished())
        return bool(found)

    wait_until(any_ended)
    return found


class Story:
    """Jobs over two tiers in memory, on a clock the test moves; the engine's memory is `slots`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.tier, self.second = MemoryTier(), MemoryTier()
        settings = PortSettings(deadline=DEADLINE, failures=2, retry_after=1.0, num_threads=1)
        self.ports = [
            TierPort(name, lambda tier=tier: tier, settings, self.metrics, Rates("load"), self.clock)
            for name, tier in (("file", self.tier), ("redis", self.second))
        ]
        self.jobs = TierJobs(self.ports, SLOT_BYTES, 4, LOAD_DEADLINE, self.metrics, self.clock)
        self.slots = [memoryview(bytearray(SLOT_BYTES)) for _ in NAMES]

    def fill(self, *positions: int) -> None:
        for i in positions:
            self.slots[i][:] = payload_of(NAMES[i])

    def store(self, job_id: int, *positions: int) -> None:
        self.jobs.store(job_id, [NAMES[i] for i in positions], [self.slots[i] for i in positions])

    def load(self, job_id: int, *positions: int) -> None:
        self.jobs.load(job_id, [NAMES[i] for i in positions], [self.slots[i] for i in positions])

    def ended(self) -> EndedJob:
        """The next job to end, alone."""
        [ended] = ended_jobs(self.jobs)
        return ended

    def counted(self, series: str) -> float:
        return self.metrics.snapshot().get(series, 0)

    def holds(self, position: int) -> bool:
        return bytes(self.slots[position]) == payload_of(NAMES[position])


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    for tier in (story.tier, story.second):
        tier.gate.set()
    story.jobs.close(10)
    assert not story.jobs._live
    story.jobs.check()


def test_what_is_stored_is_loaded_again_from_the_first_tier_that_holds_it(story: Story) -> None:
    story.fill(0, 1, 2)
    story.store(7, 0, 1, 2)
    assert story.ended() == EndedJob(7, [Outcome.OK] * 3, 0.0)
    assert [set(tier.blocks) for tier in (story.tier, story.second)] == [set(NAMES[:3])] * 2  # every tier has them
    assert story.jobs.holds(NAMES[0])
    assert not story.jobs.holds(NAMES[3])

    story.tier.discard(NAMES[1:2])
    for slot in story.slots:
        slot[:] = bytes(SLOT_BYTES)
    story.load(8, 0, 1, 2)
    assert story.ended().outcomes == [Outcome.OK] * 3
    assert all(story.holds(i) for i in range(3))
    assert story.second.reads == [NAMES[1]]  # what the first has lost


def test_a_block_that_fails_alone_leaves_its_neighbours_whole_and_its_memory_untouched(story: Story) -> None:
    story.tier.fill(chain_of(6))
    record, data = story.tier.blocks[NAMES[1]]
    story.tier.blocks[NAMES[1]] = (record, data[:-1] + b"?")  # rot
    before = bytes(story.slots[1])
    story.load(1, 0, 1, 2)
    assert story.ended().outcomes == [Outcome.OK, Outcome.CHECKSUM, Outcome.OK]
    assert story.holds(0)
    assert story.holds(2)
    assert bytes(story.slots[1]) == before  # not one unverified byte reached the engine's memory
    assert story.counted('kvtier_corruption_total{tier="file"}') == 1
    assert story.counted('kvtier_miss_total{reason="checksum"}') == 1
    assert not story.jobs.holds(NAMES[1])  # nobody is promised it again


def test_a_read_that_hangs_ends_at_its_deadline_and_never_writes_to_memory_given_back(story: Story) -> None:
    story.tier.fill(chain_of(6))
    story.tier.gate.clear()
    story.load(1, 0, 1)
    wait_until(lambda: story.ports[0].queue.running)
    story.clock.advance(DEADLINE)
    assert story.ended().outcomes == [Outcome.TIMEOUT] * 2
    assert story.counted('kvtier_miss_total{reason="timeout"}') == 2

    # The engine uses its memory for something else; then the disk answers.
    story.fill(0, 1)
    story.slots[0][:] = b"x" * SLOT_BYTES
    story.tier.gate.set()
    assert story.ports[0].queue.drain(60)
    assert bytes(story.slots[0]) == b"x" * SLOT_BYTES
    assert not story.jobs.finished()  # and the job does not end twice


def test_jobs_queued_after_a_hung_read_end_too_and_the_breaker_opens(story: Story) -> None:
    story.tier.fill(chain_of(6))
    story.tier.gate.clear()
    story.load(1, 0)
    wait_until(lambda: story.ports[0].queue.running)
    story.load(2, 1)  # waits for the only thread
    story.clock.advance(LOAD_DEADLINE)
    ended = story.jobs.finished()
    assert [job.outcomes for job in ended] == [[Outcome.TIMEOUT]] * 2
    story.tier.gate.set()
    assert story.ports[0].queue.drain(60)
    story.ports[0].failed("read")  # the second in a row
    assert not story.jobs.holds(NAMES[2])  # a miss from now on: nobody waits for that disk


def test_a_job_is_taken_whole_and_those_past_the_bound_are_refused_whole(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    story.fill(*range(6))
    story.tier.gate.clear()
    story.store(1, 0, 1, 2)
    story.store(2, 3, 4)  # three wait, of four that may: the whole job joins them
    story.store(3, 5)
    story.store(4, 5)
    refused = story.jobs.finished()
    assert refused == [EndedJob(3, [Outcome.QUEUE_FULL], 0.0), EndedJob(4, [Outcome.QUEUE_FULL], 0.0)]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["1 chunks were not stored"]
    assert "cache.store_queue" in caplog.text
    story.tier.gate.set()
    wait_until(lambda: not story.jobs._live)
    assert [job.outcomes for job in story.jobs.finished()] == [[Outcome.OK] * 3, [Outcome.OK] * 2]
    assert set(story.tier.blocks) == set(NAMES[:5])
    assert story.counted('kvtier_store_dropped_total{tier="file",reason="queue_full"}') == 2
    story.store(5, 5)  # the room is free again
    assert story.ended().outcomes == [Outcome.OK]


@pytest.mark.parametrize("sizes", [[40], [5] * 8, [1] * 40, [1, 30, 9]])
def test_however_long_a_prompt_is_and_in_how_many_jobs_it_comes_all_of_it_is_kept(sizes: list[int]) -> None:
    tier, metrics = MemoryTier(), Metrics()
    port = TierPort("file", lambda: tier, PortSettings(num_threads=2), metrics, Rates("load"))
    jobs = TierJobs([port], SLOT_BYTES, 64, 60.0, metrics)
    jobs._per_batch = 4
    names = chain_of(sum(sizes)).hashes
    slots = [memoryview(bytearray(payload_of(name))) for name in names]
    order, first = StoreOrder(), 0
    tier.gate.clear()
    for job_id, size in enumerate(sizes):
        jobs.store(job_id, names[first : first + size], slots[first : first + size], order=order)
        first += size
    assert not jobs.finished()  # the engine's memory is read until all of a job is stored
    tier.gate.set()
    jobs.drain(60)
    assert {job.job_id: job.outcomes for job in jobs.finished()} == {i: [Outcome.OK] * n for i, n in enumerate(sizes)}
    assert tier.writes == names  # parents first, one part behind the other
    jobs.check()
    jobs.close(10)


class InOrder:
    """Jobs of one request in parts of two blocks, and what became of them."""

    def __init__(self, story: Story, max_storing: int = 64) -> None:
        self.story, self.order = story, StoreOrder()
        story.jobs._per_batch, story.jobs._max_storing = 2, max_storing
        story.fill(*range(6))

    def store(self, job_id: int, *positions: int, groups: Sequence[int] = ()) -> None:
        names, slots = [NAMES[i] for i in positions], [self.story.slots[i] for i in positions]
        self.story.jobs.store(job_id, names, slots, groups, self.order)

    def outcomes(self) -> dict[int, list[str]]:
        for tier in (self.story.tier, self.story.second):
            tier.gate.set()
        wait_until(lambda: not self.story.jobs._live)
        return {job.job_id: [str(each) for each in job.outcomes] for job in self.story.jobs.finished()}


def test_behind_a_block_that_failed_nothing_more_of_its_prompt_is_written(story: Story) -> None:
    story.second.write_fails = {NAMES[3]: Outcome.IO_ERROR}
    story.tier.write_fails = {NAMES[1]: Outcome.IO_ERROR}
    request = InOrder(story)
    story.tier.gate.clear()
    request.store(1, 0, 1, 2, 3)
    request.store(2, 4, 5)  # the next step's, before anything failed
    outcomes = request.outcomes()
    assert outcomes[1][:3] == ["ok"] * 3  # each as far as one tier took it
    assert outcomes[1][3] in ("io_error", "parent_failed")
    assert outcomes[2] == ["parent_failed"] * 2
    assert story.tier.writes == NAMES[:2]
    assert story.second.writes == NAMES[:4]
    # Another request is not concerned, be its blocks the same.
    story.tier.write_fails = story.second.write_fails = {}
    other = InOrder(story)
    other.store(3, *range(6))
    assert other.outcomes() == {3: ["ok"] * 6}


def test_groups_of_layers_are_chains_of_their_own(story: Story) -> None:
    story.tier.write_fails = story.second.write_fails = {NAMES[0]: Outcome.IO_ERROR}
    request = InOrder(story)
    request.store(1, *range(6), groups=[0, 0, 0, 1, 1, 1])
    assert request.outcomes() == {1: ["io_error", "ok", "parent_failed", "ok", "ok", "ok"]}
    request.store(2, 2, 3, groups=[0, 1])
    assert request.outcomes() == {2: ["parent_failed", "ok"]}


def test_what_follows_a_refused_job_is_refused_too_though_there_is_room(story: Story) -> None:
    request, other = InOrder(story), InOrder(story, max_storing=4)
    story.tier.gate.clear()
    other.store(1, 0, 1, 2, 3)
    request.store(2, 4)  # four wait already
    assert request.outcomes() == {1: ["ok"] * 4, 2: ["queue_full"]}
    request.store(3, 5)
    assert request.outcomes() == {3: ["parent_failed"]}
    assert NAMES[5] not in story.tier.blocks


def test_closing_with_a_long_line_ends_every_job(story: Story) -> None:
    request = InOrder(story)
    story.tier.gate.clear()
    request.store(1, *range(6))
    request.store(2, 0, 1)
    story.jobs.drain(0.05)
    assert {job.job_id for job in story.jobs.finished()} == {1, 2}
    assert len(story.tier.writes) <= 2  # what had not begun never does
    story.tier.gate.set()


def test_a_failing_disk_costs_stores_and_loads_never_an_exception(story: Story) -> None:
    story.tier.broken = story.second.broken = True
    story.fill(0)
    for job_id in range(2):
        story.store(job_id, 0)
        assert story.ended().outcomes == [Outcome.IO_ERROR]
    story.store(2, 0)  # twice in a row: the breaker is open, the disk is left alone
    assert story.ended().outcomes == [Outcome.BREAKER_OPEN]
    story.tier.broken = False
    story.clock.advance(1.0)
    story.jobs.finished()  # sends the probe that is due
    assert story.ports[0].queue.drain(60)
    story.store(3, 0)
    assert story.ended().outcomes == [Outcome.OK]  # it is back, without a restart


def test_drain_gives_up_what_hangs_and_nothing_touches_memory_after_it(story: Story) -> None:
    story.tier.fill(chain_of(6))
    story.tier.gate.clear()
    story.load(1, 0, 1)
    story.store(2, 2)
    story.jobs.drain(0.05)
    assert not story.jobs._live
    assert {job.job_id for job in story.jobs.finished()} == {1, 2}
    before = [bytes(slot) for slot in story.slots]
    story.tier.gate.set()
    assert story.ports[0].queue.drain(60)
    assert [bytes(slot) for slot in story.slots] == before
    assert NAMES[2] not in story.tier.writes  # it had not begun: it never does


def test_a_large_job_travels_in_calls_of_bounded_size_and_ends_as_one() -> None:
    class CountingTier(MemoryTier):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
            self.calls.append(len(hashes))
            return super().read(hashes, into)

    tier, metrics, size = CountingTier(), Metrics(), BATCH_BYTES // 2
    port = TierPort("file", lambda: tier, PortSettings(), metrics, Rates("load"))
    jobs = TierJobs([port], size, 8, 60.0, metrics)
    slots = [memoryview(bytearray(payload_of(name, size))) for name in NAMES[:5]]
    jobs.store(1, NAMES[:5], slots)
    ended_jobs(jobs)
    for slot in slots:
        slot[:8] = bytes(8)
    jobs.load(2, NAMES[:5], slots)
    [loaded] = ended_jobs(jobs)
    assert loaded.outcomes == [Outcome.OK] * 5
    assert [bytes(slot) == payload_of(name, size) for name, slot in zip(NAMES, slots, strict=False)] == [True] * 5
    assert tier.calls == [2, 2, 1]
    jobs.close(10)


def test_where_nothing_is_compiled_the_same_bytes_arrive(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    story.tier.fill(chain_of(6))
    story.load(1, *range(6))
    assert story.ended().outcomes == [Outcome.OK] * 6
    assert all(story.holds(i) for i in range(6))

"""Stories of a port: a lower tier that fails, hangs, comes back, was never there or was replaced; and resets."""

import logging
from collections.abc import Callable, Iterator
from threading import Event, Thread

import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, payload_of, record_of, wait_until
from peers_rig import buffers

from kvtier.tiers.errors import ConfigError, TierUnavailable
from kvtier.tiers.hierarchy import lower_tier
from kvtier.tiers.hierarchy.lower_tier import PortSettings, Rates, Span, TierPort
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import BlockRecord, ChainHash, Direction, Outcome, Tier


class Story:
    """Opens ports over tiers the test makes, on a clock the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.rates = Rates("auto")
        self.ports: list[TierPort] = []

    def port(
        self, open: Callable[[], Tier], failures: int = 2, num_threads: int = 1, deadline: float = 2.0
    ) -> TierPort:
        settings = PortSettings(deadline=deadline, failures=failures, retry_after=1.0, num_threads=num_threads)
        self.ports.append(TierPort("file", open, settings, self.metrics, self.rates, self.clock))
        return self.ports[-1]

    def probe(self, port: TierPort, after: float = 1.0) -> None:
        """Time passes, whatever probes are due are sent, and they end."""
        self.clock.advance(after)
        port.tick()
        assert port.queue.drain(60)

    def is_shown_open(self, direction: Direction) -> bool:
        return self.metrics.snapshot()[f'kvtier_breaker_open{{tier="file",direction="{direction}"}}'] == 1


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    for port in story.ports:
        port.check()
        port.close(10)
        assert port.tier is None


CHAIN = chain_of(4)
HASHES = CHAIN.hashes


def state(port: TierPort) -> str:
    """Of the read breaker."""
    return port.breakers["read"].state.value


def read(port: TierPort, hashes: list[ChainHash]) -> list[BlockRecord | Outcome]:
    return port.read(hashes, buffers(len(hashes)))


def write(port: TierPort, *positions: int, epoch: int | None = None) -> list[Outcome]:
    payloads = [memoryview(payload_of(HASHES[i])) for i in positions]
    return port.write([record_of(CHAIN, i) for i in positions], payloads, port.epoch if epoch is None else epoch)


def full_tier() -> MemoryTier:
    tier = MemoryTier()
    tier.fill(CHAIN)
    return tier


def test_what_is_written_is_found_read_and_measured(story: Story) -> None:
    tier = MemoryTier()
    port = story.port(lambda: tier)
    assert write(port, 0, 1) == [Outcome.OK] * 2
    assert port.lookup(HASHES) == 2
    assert port.holds(HASHES) == [True, True, False, False]
    into = buffers(3)
    results = port.read(HASHES[:3], into)
    assert results == [record_of(CHAIN, 0), record_of(CHAIN, 1), Outcome.EVICTED]
    assert [bytes(buffer) for buffer in into[:2]] == [payload_of(h) for h in HASHES[:2]]
    counters = story.metrics.snapshot()
    assert counters['kvtier_bytes_total{tier="file",direction="write"}'] == 2 * SLOT_BYTES
    assert counters['kvtier_bytes_total{tier="file",direction="read"}'] == 2 * SLOT_BYTES  # what arrived
    story.rates.computed(1 << 50, 1.0)  # an engine of infinite speed: whether the tier's rate is known shows
    assert not story.rates.worth_loading(Span(0, 1, {"file": 1 << 30}))


def test_misses_corruption_and_a_full_disk_are_no_failures(story: Story) -> None:
    tier = full_tier()
    port = story.port(lambda: tier, failures=1)
    tier.read_fails = {HASHES[0]: Outcome.CHECKSUM, HASHES[1]: Outcome.KEY_MISMATCH, HASHES[2]: Outcome.EVICTED}
    tier.write_fails = {HASHES[0]: Outcome.FULL}
    assert read(port, HASHES)[:3] == [Outcome.CHECKSUM, Outcome.KEY_MISMATCH, Outcome.EVICTED]
    assert write(port, 0) == [Outcome.FULL]
    assert port.breakers["read"].closed
    assert port.writable
    assert story.metrics.snapshot()['kvtier_corruption_total{tier="file"}'] == 2
    # What was found bad is not promised to the next request.
    assert port.holds(HASHES) == [False, False, True, True]


def test_failures_in_a_row_open_one_direction_and_not_the_other(story: Story) -> None:
    tier = full_tier()
    port = story.port(lambda: tier)
    tier.read_fails = {HASHES[3]: Outcome.IO_ERROR}
    read(port, HASHES)
    read(port, HASHES[:1])  # an answer in between
    read(port, HASHES)
    assert port.lookup(HASHES) == 4
    read(port, HASHES)  # the second in a row
    assert port.lookup(HASHES) == 0
    assert port.holds(HASHES) == [False] * 4
    assert (story.is_shown_open("read"), story.is_shown_open("write")) == (True, False)
    num_reads = len(tier.reads)
    assert read(port, HASHES) == [Outcome.BREAKER_OPEN] * 4
    assert len(tier.reads) == num_reads  # left alone
    assert write(port, 0) == [Outcome.OK]
    # Its probe brings it back.
    story.probe(port, after=0.5)
    assert port.lookup(HASHES) == 0
    story.probe(port, after=0.5)
    assert port.lookup(HASHES) == 4
    assert not story.is_shown_open("read")


def test_a_tier_that_is_absent_at_start_attaches_later(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS 12: one warning, the engine unaffected, no restart."""
    tier = full_tier()
    there: list[MemoryTier] = []

    def open_tier() -> MemoryTier:
        if not there:
            raise TierUnavailable("no such directory")
        return tier

    with caplog.at_level(logging.WARNING):
        port = story.port(open_tier)
        assert port.lookup(HASHES) == 0
        assert read(port, HASHES) == [Outcome.BREAKER_OPEN] * 4
        assert write(port, 0) == [Outcome.BREAKER_OPEN]
        port.reset()  # nothing there to forget, yet
        port.check()
        for _ in range(3):
            story.probe(port, after=32)
    assert caplog.text.count("no such directory") == 1
    there.append(tier)
    story.probe(port, after=32)
    assert port.writable
    # It was reset while it was away, so it came back empty: nothing stale is served.
    assert port.lookup(HASHES) == 0
    assert write(port, 0, 1) == [Outcome.OK] * 2
    assert port.lookup(HASHES) == 2


def test_an_idle_engine_finds_a_tier_that_came_back() -> None:
    """It makes no call that would send a probe, and its first request must not pay for that with a miss."""
    attempts: list[int] = []

    def open_tier() -> Tier:
        attempts.append(1)
        if len(attempts) < 3:
            raise TierUnavailable("down at start")
        return full_tier()

    settings = PortSettings(failures=2, retry_after=0.05)
    port = TierPort("file", open_tier, settings, Metrics(), Rates("auto"))
    port.probe_alone()
    wait_until(lambda: port.lookup(HASHES) == 4)
    port.failed("read")
    port.failed("read")
    assert port.lookup(HASHES) == 0
    wait_until(lambda: port.lookup(HASHES) == 4)
    port.close(10)


@pytest.mark.parametrize("refusal", [None, ConfigError("[file] size: too small")])
def test_a_tier_that_hangs_as_it_opens_attaches_once_it_answers(
    story: Story, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refusal: ConfigError | None
) -> None:
    monkeypatch.setattr(lower_tier, "_LEAST", 0.0)
    gate, tier = Event(), full_tier()

    def hung() -> Tier:
        assert gate.wait(60)
        if refusal is not None:
            raise refusal
        return tier

    port = story.port(hung, deadline=0.01)  # nobody waits for it any longer than some of these
    assert "has not opened within 0.05 s" in (port.wanting or "")
    assert (port.lookup(HASHES), write(port, 0)) == (0, [Outcome.BREAKER_OPEN])
    gate.set()
    if refusal is not None:
        wait_until(lambda: "file tier stays off: [file] size: too small" in caplog.text)
        return
    wait_until(lambda: port.tier is tier)
    story.probe(port)
    assert port.lookup(HASHES) == 4
    assert port.wanting is None


def test_what_the_user_must_mend_is_raised_at_start_and_never_later(story: Story) -> None:
    def misconfigured() -> MemoryTier:
        raise ConfigError("too small")

    with pytest.raises(ConfigError):
        story.port(misconfigured)
    tier = full_tier()
    answers: list[MemoryTier | None] = [tier, None]

    def broken_later() -> MemoryTier:
        answer = answers.pop(0) if answers else None
        if answer is None:
            raise ConfigError("too small now")
        return answer

    port = story.port(broken_later, failures=1)
    tier.broken = True
    read(port, HASHES[:1])
    story.probe(port)  # opens anew, is refused: still only a miss
    assert port.lookup(HASHES) == 0


def test_a_tier_whose_file_was_replaced_is_reopened(story: Story) -> None:
    old, new = full_tier(), MemoryTier()
    new.fill(CHAIN, 0)
    tiers = [old, new]
    port = story.port(lambda: tiers.pop(0), failures=1)
    old.broken = True  # its file is gone: reads fail, and so does the probe
    read(port, HASHES)
    assert port.lookup(HASHES) == 0
    story.probe(port)
    assert old.closed
    assert port.lookup(HASHES) == 1  # the file that lies there now
    assert not new.closed
    assert write(port, 1) == [Outcome.OK]  # the other direction never noticed
    assert HASHES[1] in new.blocks


def test_a_tier_that_stays_open_is_not_reopened_while_it_can_be_read(story: Story) -> None:
    class ReadOnly(MemoryTier):
        stays_open = True

        def probe(self, direction: Direction) -> bool:
            return direction == "read" and not self.broken

    tier, opened = ReadOnly(), list[ReadOnly]()
    tier.fill(CHAIN)
    tier.write_fails = {HASHES[0]: Outcome.IO_ERROR}

    def reach() -> ReadOnly:
        opened.append(tier)
        return tier

    port = story.port(reach, failures=1)
    write(port, 0)
    for _ in range(3):
        story.probe(port, after=32)
        assert (port.lookup(HASHES), port.writable, len(opened)) == (4, False, 1)
    # If its reads fail, too, it is.
    tier.broken = True
    read(port, HASHES)
    story.probe(port, after=32)
    assert tier.closed
    assert len(opened) >= 2


def test_a_hung_probe_counts_as_failed_and_its_late_answer_as_nothing(story: Story) -> None:
    gate, asked = Event(), Event()

    class HungProbe(MemoryTier):
        def probe(self, direction: Direction) -> bool:
            asked.set()
            return gate.wait(30)

    tier = HungProbe()
    tier.fill(CHAIN)
    tier.read_fails = {HASHES[0]: Outcome.IO_ERROR}
    port = story.port(lambda: tier, failures=1)
    read(port, HASHES[:1])
    story.clock.advance(1)
    port.tick()
    assert asked.wait(60)
    assert state(port) == "half_open"
    story.clock.advance(2)  # its deadline
    port.tick()
    assert state(port) == "open"
    gate.set()  # it answers at last: stale
    assert port.queue.drain(60)
    assert state(port) == "open"
    assert port.tier is tier
    story.probe(port, after=2)  # the next one counts
    assert port.lookup(HASHES) == 4


def test_a_reset_forgets_blocks_and_writes_offered_before_it(story: Story) -> None:
    """FAULTS 37."""
    tier = full_tier()
    port = story.port(lambda: tier)
    epoch = port.epoch
    port.reset()
    assert port.lookup(HASHES) == 0
    assert write(port, 0, epoch=epoch) == [Outcome.EPOCH]  # computed with the old weights
    assert not tier.blocks
    assert write(port, 0) == [Outcome.OK]


def test_a_write_that_a_reset_overtakes_is_undone_and_never_visible(story: Story) -> None:
    tier = MemoryTier()
    port = story.port(lambda: tier)
    tier.gate.clear()
    outcomes: list[Outcome] = []
    entered = Event()
    real_write, real_discard = tier.write, tier.discard

    def signalling_write(*args: object) -> list[Outcome]:
        entered.set()
        return real_write(*args)  # type: ignore[arg-type] # passed on as they came

    def discard_when_nobody_can_see_it(hashes: list[ChainHash]) -> None:
        assert HASHES[0] in tier.blocks  # the write has landed after the reset …
        assert port.lookup(HASHES) == 0  # … and is hidden
        real_discard(hashes)

    tier.write, tier.discard = signalling_write, discard_when_nobody_can_see_it  # type: ignore[method-assign,assignment]
    writer = Thread(target=lambda: outcomes.extend(write(port, 0, 1)))
    writer.start()
    assert entered.wait(60)
    port.reset()
    tier.gate.set()
    writer.join(60)
    assert outcomes == [Outcome.EPOCH] * 2
    assert not tier.blocks
    tier.write, tier.discard = real_write, real_discard  # type: ignore[method-assign]
    assert write(port, 0) == [Outcome.OK]
    assert port.lookup(HASHES) == 1


def test_a_tier_that_opens_only_after_close_is_closed_again(story: Story) -> None:
    """A probe hangs in `open` (a dead mount) while the service shuts down: close does not wait for it."""
    tier = full_tier()
    gate, opening = Event(), Event()
    is_start = True

    def open_tier() -> MemoryTier:
        if is_start:
            raise OSError("stale file handle")
        opening.set()
        gate.wait(30)
        return tier

    port = story.port(open_tier)
    is_start = False
    story.clock.advance(1)
    port.tick()
    assert opening.wait(60)
    port.close(0.05)
    assert port.tier is None
    gate.set()
    wait_until(lambda: tier.closed)
    assert port.tier is None


class SharedMemoryTier(MemoryTier):
    """What others store into as well."""

    is_shared = True


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tier_that_returns_is_not_reset_again_if_others_store_there(story: Story, is_shared: bool) -> None:
    tier = SharedMemoryTier() if is_shared else MemoryTier()
    port = story.port(lambda: tier)
    port.reset()  # told while it is there
    tier.broken = True
    port.breakers["read"].trip()
    tier.fill(CHAIN)  # another node stored these
    story.probe(port)  # no answer: closed, and opened anew
    assert tier.closed
    assert port.tier is tier
    assert bool(tier.blocks) is is_shared  # nobody else stores into a file of ours: what is there is old


def test_a_shared_tier_that_missed_a_reset_is_reset_when_it_returns(story: Story) -> None:
    tier = SharedMemoryTier()
    attempts: list[int] = []

    def open_tier() -> Tier:
        attempts.append(1)
        if len(attempts) == 1:
            raise TierUnavailable("down at start")
        return tier

    tier.fill(CHAIN)
    port = story.port(open_tier)
    port.reset()
    story.probe(port)
    assert port.tier is tier
    assert not tier.blocks

"""The sequencer as scripted traces, and against every schedule: what is applied is what in-order reading would give."""

import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.service.events.consumer import END, MAX_HELD, ForgetAll, NumberedBatch, Sequencer, Step
from kvtier.tiers.errors import FormatError


def batch(seq: int, text: str = "") -> NumberedBatch:
    return NumberedBatch(seq, b"kv", f"{seq}{text}".encode())


def numbers(steps: list[Step]) -> list[int | str]:
    return ["reset" if isinstance(step, ForgetAll) else step.seq for step in steps]


def wants(sequencer: Sequencer) -> int | None:
    return sequencer.wants


def begun(*seqs: int) -> Sequencer:
    """One that has read these from a replay."""
    sequencer = Sequencer()
    assert wants(sequencer) == 0
    sequencer.asked(0)
    steps = [step for seq in seqs for step in sequencer.replayed(batch(seq))] + sequencer.ended()
    assert numbers(steps) == ["reset", *seqs]
    assert wants(sequencer) is None
    return sequencer


def test_a_summary_counts_as_a_whole() -> None:
    sequencer = begun(0)
    assert sequencer.live(batch(8)) == sequencer.live(batch(9)) == []
    sequencer.asked(1)
    steps = sequencer.replayed(batch(7, "summary"))
    assert sequencer.live(batch(10)) == []
    steps += sequencer.replayed(batch(8, "summary")) + sequencer.replayed(batch(9, "summary")) + sequencer.ended()
    assert steps == [ForgetAll(), *(batch(seq, "summary") for seq in (7, 8, 9)), batch(10)]
    # half of one is nothing: the rest would never be told again
    assert sequencer.live(batch(20)) == []
    sequencer.asked(11)
    assert numbers(sequencer.replayed(batch(19, "summary"))) == ["reset", 19]
    assert sequencer.failed() == []
    assert (sequencer.next, wants(sequencer)) == (None, 0)


def test_a_smaller_number_is_a_publisher_that_began_anew() -> None:
    sequencer = begun(0, 1, 2)
    assert sequencer.live(batch(0, "anew")) == []
    assert sequencer.counts["restarts"] == 1
    assert wants(sequencer) == 0
    sequencer.asked(0)
    assert numbers(sequencer.replayed(batch(0, "anew"))) == ["reset", 0]
    assert sequencer.ended() == []
    assert numbers(sequencer.live(batch(1, "anew"))) == [1]
    # a connection that broke: whoever answers now may be another one, with numbers as high
    sequencer.start_over()
    assert wants(sequencer) == 0
    sequencer.asked(0)
    assert numbers(sequencer.ended()) == ["reset"]  # it has told nothing yet
    assert numbers(sequencer.live(batch(0, "again"))) == [0]


def test_what_is_lost_for_good_starts_over() -> None:
    sequencer = begun(0)
    assert sequencer.live(batch(9)) == []
    sequencer.asked(1)
    assert numbers(sequencer.replayed(batch(7, "summary"))) == ["reset", 7]
    assert numbers(sequencer.replayed(batch(8, "summary"))) == [8]
    assert sequencer.counts["lost"] == 1
    # those that the summary stands for may still be on their way
    assert sequencer.live(batch(8)) == []
    assert sequencer.counts["restarts"] == 0
    assert numbers(sequencer.ended()) == [9]
    # a publisher that has nothing left
    assert sequencer.live(batch(12)) == []
    sequencer.asked(10)
    assert numbers(sequencer.ended()) == ["reset", 12]


def test_without_a_replay_address_a_gap_starts_over() -> None:
    sequencer = Sequencer(can_replay=False)
    assert numbers(sequencer.live(batch(5))) == ["reset", 5]
    assert numbers(sequencer.live(batch(6))) == [6]
    assert numbers(sequencer.live(batch(8))) == ["reset", 8]
    assert numbers(sequencer.live(batch(0, "anew"))) == ["reset", 0]
    assert wants(sequencer) is None


def test_a_replay_that_breaks_is_asked_for_anew() -> None:
    sequencer = begun(0)
    assert sequencer.live(batch(9)) == []
    sequencer.asked(1)
    assert numbers(sequencer.replayed(batch(1))) == [1]
    assert sequencer.replayed(batch(3)) == []  # 2 was dropped on the way
    assert wants(sequencer) == 2
    sequencer.asked(2)
    sequencer.failed()
    assert wants(sequencer) == 2
    assert sequencer.replayed(batch(2)) == []  # of a replay that nobody reads any more
    assert sequencer.counts["broken_replays"] == sequencer.counts["failed_replays"] == 1


def test_what_waits_is_bounded_and_not_forgotten() -> None:
    sequencer = begun(0)
    last = MAX_HELD + 100
    for seq in range(2, last + 1):
        assert sequencer.live(batch(seq)) == []
    assert sequencer.counts["overflows"] == last - 1 - MAX_HELD
    sequencer.asked(1)
    steps = sequencer.replayed(batch(1)) + sequencer.ended()
    assert sequencer._num_held == 0
    assert numbers(steps) == list(range(1, MAX_HELD + 2))
    assert wants(sequencer) == MAX_HELD + 2  # the first that found no place
    sequencer.asked(MAX_HELD + 2)
    for seq in range(MAX_HELD + 2, last + 1):
        assert numbers(sequencer.replayed(batch(seq))) == [seq]
    assert sequencer.is_live


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"1", b""], [b"", b"12345678"], [b"", bytes(8), b"", b""]])
def test_other_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(FormatError):
        NumberedBatch.parse(frames)
    assert NumberedBatch.parse([b"", END, b""]) is None
    assert NumberedBatch.parse(batch(7).frames) == batch(7)


class Publisher:
    """Keeps a bounded past, and sums up what is older. Its state is a set of numbers that come and go."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.log: list[NumberedBatch] = []
        self.life = 0

    def publish(self, key: int) -> NumberedBatch:
        told = batch(len(self.log), f" {'-' if key in self.state else '+'}{key} life {self.life}")
        self.log.append(told)
        return told

    def begin_anew(self) -> None:
        self.log, self.life = [], self.life + 1

    @property
    def state(self) -> set[int]:
        return applied([*self.log])

    def replay(self, first: int) -> list[NumberedBatch]:
        past = self.log[max(first, len(self.log) - self.kept) :]
        if len(self.log) > first and past[0].seq > first:
            parts = [f" +{key}" for key in sorted(self.state)] or [""]
            while len(self.log) - first <= len(parts):
                self.log.append(batch(len(self.log), " "))
            return [batch(len(self.log) - len(parts) + i, part) for i, part in enumerate(parts)]
        return past


def applied(steps: list[Step]) -> set[int]:
    held: set[int] = set()
    for step in steps:
        if isinstance(step, ForgetAll):
            held.clear()
            continue
        for word in step.payload.decode().split()[1:]:
            if word[0] == "+":
                held.add(int(word[1:]))
            elif word[0] == "-":
                held.remove(int(word[1:]))
            else:
                break
    return held


@settings(max_examples=brief(50, 250))
@given(st.data())
def test_any_schedule_ends_as_in_order_reading_would(data: st.DataObject) -> None:
    publisher, sequencer = Publisher(data.draw(st.sampled_from([1, 3, 100]))), Sequencer()
    on_its_way: list[NumberedBatch] = []
    replay: list[NumberedBatch | None] = []
    steps: list[Step] = []

    def read_one() -> None:
        told = replay.pop(0)
        steps.extend(sequencer.ended() if told is None else sequencer.replayed(told))

    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(
            st.sampled_from(
                ["publish"] * 4
                + ["deliver"] * 4
                + ["drop", "double", "ask", "anew", "fail", "make sure"]
                + ["read"] * 2
            )
        ):
            case "publish":
                on_its_way.append(publisher.publish(data.draw(st.integers(0, 5))))
            case "deliver" if on_its_way:
                at = data.draw(st.integers(0, min(3, len(on_its_way) - 1)))
                steps += sequencer.live(on_its_way.pop(at))
            case "drop" if on_its_way:
                on_its_way.pop(data.draw(st.integers(0, len(on_its_way) - 1)))
            case "double" if on_its_way:
                steps += sequencer.live(on_its_way[0])
            case "ask" if sequencer.wants is not None:
                replay = [*publisher.replay(sequencer.wants), None]
                sequencer.asked(sequencer.wants)
            case "read" if replay:
                read_one()
            case "fail" if data.draw(st.integers(0, 3)) == 0:
                replay = []
                steps += sequencer.failed()
            case "make sure" if sequencer.next is not None and not sequencer.is_replaying:
                replay = [*publisher.replay(sequencer.next), None]
                sequencer.asked(sequencer.next)
            case "anew" if data.draw(st.integers(0, 3)) == 0:
                # its connections break, and with them what was on its way; the subscriber notices
                publisher.begin_anew()
                on_its_way, replay = [], []
                sequencer.start_over()
    # one batch more arrives, as sooner or later it does, and what is asked for is answered
    steps += sequencer.live(publisher.publish(6))
    for _ in range(100):
        while replay:
            read_one()
        if sequencer.wants is None:
            break
        replay = [*publisher.replay(sequencer.wants), None]
        sequencer.asked(sequencer.wants)
    assert sequencer.is_live
    assert applied(steps) == publisher.state

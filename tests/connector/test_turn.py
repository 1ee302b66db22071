"""Turn: threads one after another in the order of arrival; refused are forks, calls inside calls, and a hung holder."""

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import pytest
from at_once import at_once
from doubles import wait_until

from kvtier.connector import turn as turn_module
from kvtier.connector.turn import Turn, Turns
from kvtier.tiers import RequestError


def started(work: Callable[[], object]) -> Thread:
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_leaves_queues_behind_waiting_ones() -> None:
    turn, order, is_first = Turn("engine"), [], Event()

    def take(name: str) -> None:
        with turn:
            order.append(name)
            is_first.set()
            if name == "a1":
                wait_until(turn._queue.locked)  # somebody waits

    def one_after_another() -> None:
        for name in ("a1", "a2", "a3"):
            take(name)

    first = started(one_after_another)
    is_first.wait(10)
    second = started(lambda: take("b"))
    first.join(10)
    second.join(10)
    assert order.index("b") == 1
    assert not turn._lock.locked()
    assert not turn._queue.locked()


def test_no_two_threads_have_the_turn_at_once() -> None:
    turn, inside, most = Turn("engine"), [0], [0]

    def work() -> None:
        for _ in range(200):
            with turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    at_once(*[work] * 4)
    assert (inside, most) == ([0], [1])


def test_a_call_from_inside_a_call_is_refused_and_the_turn_continues() -> None:
    turn = Turn("engine")
    with turn:
        with pytest.raises(RequestError, match="this engine was called from inside one of its own calls"), turn:
            pass
        assert not turn.taken_at_once()
    with turn:
        pass


def test_an_error_ends_the_turn() -> None:
    turn = Turn("engine")
    with suppress(ValueError), turn:
        raise ValueError
    assert turn.taken_at_once()
    turn.leave()


def test_behind_a_thread_that_hangs_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_module, "_PATIENCE", 0.05)
    turn, go_on, told = Turn("KVTier"), Event(), []

    def hang() -> None:
        with turn:
            go_on.wait(30)

    def refused() -> None:
        with suppress(RequestError):
            with turn:
                pass
            return
        told.append("refused")

    holder = started(hang)
    wait_until(turn._lock.locked)
    others = [started(refused) for _ in range(3)]
    for other in others:
        other.join(30)
    assert told == ["refused"] * 3
    with pytest.raises(RequestError, match=r"another thread has been in this KVTier for 0 s; end that call"), turn:
        pass
    go_on.set()
    holder.join(30)
    with turn:  # it works again
        pass


def test_a_fork_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn("engine")
    monkeypatch.setattr(turn_module.os, "getpid", lambda: 1)
    assert turn.is_inherited
    assert not turn.taken_at_once()
    with pytest.raises(RequestError, match="a fork has neither its threads nor its memory"), turn:
        pass


def test_one_thing_has_one_turn_as_long_as_it_lives_and_in_a_fork_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        pass

    turns, one, other = Turns("KVTier"), Model(), Model()
    first = turns.of(one)
    assert turns.of(one) is first is not turns.of(other)
    monkeypatch.setattr(turn_module.os, "getpid", lambda: -1)
    assert turns.of(one) is not first
    with turns.of(one):
        assert turns.of(one).is_mine
    del one, other
    assert not turns._turns

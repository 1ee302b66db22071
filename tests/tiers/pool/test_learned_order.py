"""The policy "predicted": blocks of requests that return least go first; without reports it goes by age."""

import hashlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from _eviction_traces import TRACES, agent_sessions, without_hints
from doubles import FakeClock
from extent import brief
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.service.simulation import Capacity, TraceReplay
from kvtier.tiers.compiled import extension
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.policy import learned
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.reuse import Hint, RequestEnd, ReusePredictor, make_shadow, recent
from kvtier.tiers.reuse.predictor import (
    EDGES,
    NUM_AGES,
    NUM_ANSWERS,
    NUM_CLASSES,
    NUM_HINTS,
    Hazards,
    class_of,
    expected,
)
from kvtier.tiers.tier import ChainHash

NO_TAGS = np.zeros(0, np.uint64)


class Served:
    """A pool that requests come to, and its hits."""

    def __init__(self, num_slots: int, policy: str = "predicted", *, tells: bool = True) -> None:
        self.clock = FakeClock(0.0)
        self.pool = SlotPool(num_slots, policy=policy, clock=self.clock)
        self.num_slots, self.tells = num_slots, tells
        self.num_hits = self.num_asked = 0

    def serve(
        self, names: list[ChainHash], num_prompt: int, *, tokens: int = 100, hint: Hint | None = None, client: int = 0
    ) -> int:
        """One request, from lookup to end. Returns how many blocks of its prompt were there."""
        lease = self.pool.lease(names)
        left = names[len(lease) : self.num_slots]
        parent = names[len(lease) - 1] if len(lease) else None
        reservation = self.pool.reserve(left, parent, if_worth=True)
        if reservation is not None and len(reservation):
            self.pool.seal(reservation).release()
        lease.release()
        if self.tells:
            self.pool.ended(RequestEnd(names, num_prompt, tokens, hint, client))
        found = min(len(lease), num_prompt)
        self.num_hits += found
        self.num_asked += num_prompt
        return found


def chain(*path: object, length: int) -> list[ChainHash]:
    return [hashlib.sha256(repr((*path, i)).encode()).digest() for i in range(length)]


def test_where_nobody_tells_ends_the_order_is_lrus() -> None:
    dice = random.Random(7)
    tail, lru = Served(64, tells=False), Served(64, "lru", tells=False)
    for _ in range(600):
        names = chain(dice.randrange(40), length=dice.randrange(1, 12))
        assert tail.serve(names, len(names)) == lru.serve(names, len(names))
        tail.clock.now += dice.random()
        every = [name for i in range(40) for name in chain(i, length=12)]
        assert tail.pool.holds(every) == lru.pool.holds(every)
    tail.pool.check()
    lru.pool.check()


def test_what_is_said_to_be_finished_goes_before_what_goes_on() -> None:
    """Clients whose hints are right, for an hour: half of the conversations come back after five minutes."""
    served = Served(400)
    dice = random.Random(1)
    coming: list[tuple[float, int, int]] = []
    for number in range(1500):
        served.clock.now += 3.0
        while coming and coming[0][0] <= served.clock.now:
            _, again, turn = coming.pop(0)
            served.serve(chain(again, length=4 * turn), 4 * turn, hint=Hint.FINISHED)
        goes_on = dice.random() < 0.5
        served.serve(chain(number, length=4), 4, hint=Hint.GOES_ON if goes_on else Hint.FINISHED)
        if goes_on:
            coming.append((served.clock.now + 200.0, number, 2))
    one, other = chain("goes on", length=4), chain("finished", length=4)
    served.serve(one, 4, hint=Hint.GOES_ON)
    served.serve(other, 4, hint=Hint.FINISHED)
    served.clock.now += 100.0
    for number in range(60):
        served.serve(chain("later", number, length=4), 4, hint=Hint.GOES_ON)
        if not all(served.pool.holds(other)):
            break
    assert all(served.pool.holds(one))
    assert not all(served.pool.holds(other))
    served.pool.check()


def test_three_of_eight_clients_that_lie_take_little_from_the_others() -> None:
    """Bounds: no liar gains a hit, and the others lose at most 8 points of 94, the time of learning included."""
    liars, clients = (1, 4, 7), range(8)
    shares = {}
    for lies in (False, True):
        served, dice = Served(300), random.Random(5)
        coming: list[tuple[float, int, int]] = []
        hits = {client: [0, 0] for client in clients}
        for number in range(1600):
            served.clock.now += 1.0
            client = number % len(clients)
            while coming and coming[0][0] <= served.clock.now:
                _, again, whose = coming.pop(0)
                found = served.serve(chain(again, length=8), 8, hint=Hint.FINISHED, client=whose)
                hits[whose][0] += min(found, 4)
                hits[whose][1] += 4
            goes_on = dice.random() < 0.3
            says = Hint.GOES_ON if goes_on or (lies and client in liars) else Hint.FINISHED
            served.serve(chain(number, length=4), 4, hint=says, client=client)
            if goes_on:
                coming.append((served.clock.now + 100.0, number, client))
        shares[lies] = {client: found / asked for client, (found, asked) in hits.items()}
    honest = [client for client in clients if client not in liars]
    before, after = (np.mean([shares[lies][client] for client in honest]) for lies in (False, True))
    assert after >= before - 0.08
    assert all(shares[True][liar] <= shares[False][liar] for liar in liars)


def test_blocks_that_become_idle_after_the_end_belong_to_it() -> None:
    served = Served(16)
    names = chain("late", length=8)
    reservation = served.pool.reserve(names)
    assert reservation is not None
    lease = served.pool.seal(reservation)
    served.pool.ended(RequestEnd(names, 8, 10, Hint.FINISHED))
    lease.release()  # as when the slab has them
    assert served.pool.reserve(chain("other", length=12)) is not None
    assert served.pool.holds(names) == [True] * 4 + [False] * 4  # its last blocks went
    served.pool.check()


def test_without_eviction_the_notes_stay_bounded_too() -> None:
    served, names = Served(64), chain("same", length=4)
    reservation = served.pool.reserve(names)
    assert reservation is not None
    lease = served.pool.seal(reservation)
    for _ in range(500):
        served.pool.ended(RequestEnd(names, 4, 10))
    assert served.pool._learned is not None
    assert served.pool._learned.num_rows <= 8
    lease.release()
    served.pool.check()


class MadeUpReturns(ReusePredictor):
    """Places by a formula that jumps about, in place of what is learned."""

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        places: NDArray[np.int64] = (kinds * 7919 + np.asarray(seconds).astype(np.int64) // 10) % 997
        return places

    def place(self, kind: int, age: float) -> int:
        return int(self.places(np.array([kind]), np.array([age]))[0])


class SlowOrder:
    """The order of victims by its definition: a list of names, each with its request's class and end."""

    def __init__(self) -> None:
        self.queue: list[ChainHash] = []  # idle blocks in the order of their last use
        self.ended: dict[ChainHash, tuple[int, float]] = {}  # class and end of the last request that had it

    def victims(self, count: int, place: Callable[[int, float], int], now: float) -> list[ChainHash]:
        """The blocks of the lowest place, then of the oldest end, then in the queue's order."""

        def rank(name: ChainHash) -> tuple[int, float]:
            kind, ended_at = self.ended[name]
            return place(kind, now - ended_at), ended_at

        return sorted(self.queue, key=rank)[:count]


@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "end", "late", "evict", "wait"]), st.integers(0, 7), st.integers(1, 4)),
        max_size=60,
    )
)
@example([("late", 0, 1), ("wait", 0, 4), ("use", 1, 1), ("wait", 0, 4), ("evict", 0, 1)])  # idle for a minute, unseen
@settings(max_examples=brief(20, 60), deadline=None)
def test_the_order_is_that_of_a_slow_list(steps: list[tuple[str, int, int]]) -> None:
    """Eight conversations of four blocks each, none of them the parent of another."""
    clock, slow = FakeClock(0.0), SlowOrder()
    pool = SlotPool(32, policy="predicted", clock=clock)
    order = pool._learned
    assert order is not None
    order.returns = returns = MadeUpReturns()
    order.rival.leads = False  # as after the first requests

    def use(names: list[ChainHash]) -> list[Lease]:
        leases = []
        for name in names:
            lease = pool.lease([name])
            if not len(lease):
                reservation = pool.reserve([name])
                assert reservation is not None
                lease = pool.seal(reservation)
            leases.append(lease)
        slow.queue = [name for name in slow.queue if name not in names]
        return leases

    def release(names: list[ChainHash], leases: list[Lease]) -> None:
        for lease in reversed(leases):
            lease.release()
        slow.queue += reversed(names)

    def end(names: list[ChainHash], tokens: int) -> None:
        ended = pool.ended(RequestEnd(names, len(names), tokens))
        assert ended is not None
        slow.ended.update(dict.fromkeys(names, (ended.kind, clock.now)))
        slow.ended.update(dict.fromkeys(names[: ended.num_head], (ended.head_kind, clock.now)))

    def evict(count: int) -> None:
        """Take all free slots, and so many more."""
        clock.now += 20.0  # rows are ranked anew
        expected = slow.victims(count, returns.place, clock.now)
        names = [block.to_bytes(32, "big") for block in range(pool.counts().free + len(expected))]
        taken = [pool.reserve([name]) for name in names]
        assert None not in taken
        gone = [name for name in slow.queue if not pool.holds([name])[0]]
        assert sorted(gone) == sorted(expected)
        slow.queue = [name for name in slow.queue if name not in gone]
        for each in taken:
            assert each is not None
            pool.abandon(each)

    for verb, who, number in steps:
        names = chain(who, length=4)[:number]
        clock.now += 1.0
        if verb == "wait":
            clock.now += 7.0 * number
        elif verb == "evict":
            evict(number)
        else:
            leases = use(names)
            if verb == "late":
                end(names, 50 * number)
                release(names, leases)
            else:
                release(names, leases)
                end(names, 50 * number)
        pool.check()


@pytest.mark.parametrize("name", ["loop", *brief([], ["scans", "documents"]), "flips"])
def test_on_made_up_traces_it_is_no_more_than_a_point_below_lru(name: str) -> None:
    """The first 700 requests each, in a cache that holds a part of what returns."""
    requests = TRACES[name](1)[:700]
    shares = {}
    for policy in ("predicted", "lru"):
        served = Served(360, policy)
        for each in requests:
            served.clock.now = each.arrival
            names = [block.to_bytes(32, "little") for block in each.blocks]
            served.serve(names, each.num_prompt, tokens=each.num_output_tokens)
        served.pool.check()
        shares[policy] = served.num_hits / served.num_asked
    assert shares["predicted"] >= shares["lru"] - 0.01


def test_it_gives_way_while_lru_does_better() -> None:
    """A rival that has seen the learned order lose takes over, and gives the order back after its stay."""
    rival, same = make_shadow(100), list(range(8))
    for number in range(1, 400):  # each has the beginning of the one before, and finds nothing of it
        rival.ended([*same, 10 * number, 10 * number + 1], 10, 0)
    has_led = rival.leads
    assert has_led
    assert rival.num_takeovers == 1
    for number in range(400, 4000):  # nothing is asked for again: neither loses
        rival.ended(list(range(10 * number, 10 * number + 10)), 10, 0)
    assert not rival.leads
    assert rival.num_takeovers == 1


def test_chance_does_not_hand_over() -> None:
    """Long prompts, of which the learned order finds what LRU has not as often as the other way round."""
    rival, dice = make_shadow(800), random.Random(3)
    for number in range(4000):
        start = 10_000_000 + 200 * number
        lru_has = number and dice.random() < 0.5
        tags = list(range(start - 200, start)) if lru_has else list(range(start, start + 200))
        rival.ended(tags, 200, 0 if lru_has else 200)
    assert rival.num_takeovers <= 1  # each prompt is more than a hundredth of a window
    assert not rival.leads


def test_a_sample_stands_for_all_blocks_and_is_the_same_in_equal_beginnings() -> None:
    rival, rng = make_shadow(40_000), np.random.default_rng(1)
    every, counts = 40_000 // 512, []
    for _ in range(300):
        tags = rng.integers(0, (1 << 64) - 1, 500, np.uint64)
        places, their_tags = rival.sampled(tags)
        sampled = list(places)
        assert sampled == sorted({*sampled})
        assert their_tags == tags[sampled].tolist()
        cut_off = int(rng.integers(0, 500))
        assert rival.sampled(tags[:cut_off])[0] == [at for at in sampled if at < cut_off]
        counts.append(len(sampled))
    assert np.mean(counts) == pytest.approx(500 / every, rel=0.02)


@pytest.mark.parametrize("name", ["chats", "shared", "compaction"])
def test_the_shadow_counts_the_hits_that_lru_has(name: str) -> None:
    """Also of beginnings that many requests share, and of prompts of which LRU lost the end."""
    leads, found = list[int](), {}
    for policy in ("predicted", "lru"):
        served = Served(500, policy)
        for each in TRACES[name](1)[:600]:
            served.clock.now = each.arrival
            names = [(block + 1).to_bytes(32, "little") for block in each.blocks]
            served.serve(names, each.num_prompt, tokens=each.num_output_tokens)
            leads += [order.rival.lead] if (order := learned(served.pool._core)) is not None else []
        found[policy] = served.num_hits
    assert found["predicted"] - sum(leads) == pytest.approx(found["lru"], rel=0.01)


def test_a_beginning_that_requests_share_outlives_what_they_have_alone() -> None:
    """Questions about ten documents, behind each a page that never comes again; then only such pages."""
    served, dice = Served(200), random.Random(2)
    for number in range(600):
        served.clock.now += 5.0
        served.serve([*chain("document", dice.randrange(10), length=8), *chain("page", number, length=6)], 14)
    assert all(all(served.pool.holds(chain("document", i, length=8))) for i in range(10))
    for number in range(12):
        served.clock.now += 1.0
        served.serve(chain("lonely", number, length=10), 10)
    assert sum(sum(served.pool.holds(chain("document", i, length=8))) for i in range(10)) >= 72
    served.pool.check()


def test_what_is_worth_less_than_all_that_is_here_is_refused() -> None:
    """Long conversations go on every minute, more than fit. Those that are here stay, so some of them always hit."""
    shares = {}
    for policy in ("predicted", "lru"):
        served = Served(400, policy)
        for turn in range(1, 60):
            for who in range(6):
                served.clock.now += 10.0
                served.serve(chain(who, length=100 + turn), 100 + turn)
        shares[policy] = served.num_hits / served.num_asked
        served.pool.check()
    assert shares["lru"] == 0.0
    assert shares["predicted"] > 0.3


class FixedReturns(ReusePredictor):
    """New blocks have the place 0, all others `value`."""

    value = place_of_new = 0

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(len(kinds), self.value)


def test_a_refusal_keeps_the_head_and_says_how_much_it_left() -> None:
    pool = SlotPool(8, policy="predicted")
    order = pool._learned
    assert order is not None
    order.returns = returns = FixedReturns()
    order.rival.leads = False
    names = chain("first", length=6)
    reservation = pool.reserve(names)
    assert reservation is not None
    pool.seal(reservation).release()
    pool.ended(RequestEnd(names, 6, 100))
    others = chain("second", length=5)
    for is_above, num_taken in ((True, 2), (False, 5)):
        value = 10 if is_above else -10
        returns.value = value
        order.clock = partial(float, 100.0 if is_above else 200.0)
        reservation = pool.reserve(others, if_worth=True)
        assert reservation is not None
        assert (reservation.hashes, reservation.num_refused) == (others[:num_taken], 5 - num_taken)
        pool.abandon(reservation)
    assert pool.holds(names) == [True] * 3 + [False] * 3
    pool.check()


def test_after_a_reset_lru_would_have_nothing_either() -> None:
    served = Served(64)
    order = learned(served.pool._core)
    assert order is not None
    served.serve(chain("talk", length=8), 8)
    served.pool.reset()
    for _ in range(2):
        served.serve(chain("talk", length=8), 8)
        assert order.rival.lead == 0


@pytest.mark.skipif(extension("kvtier.tiers.reuse.recent_compiled") is None, reason="not built: `make compiled`")
def test_both_forms_of_recent_requests_decide_alike() -> None:
    """A random program: prompts that go on, run beside each other, or share beginnings, judged against LRU."""
    form: Any = extension("kvtier.tiers.reuse.recent_compiled")
    dice, rng, answers = random.Random(5), np.random.default_rng(5), list[list[object]]()
    program = [
        (rng.integers(0, 1 << 63, dice.randrange(0, 9), np.uint64), dice.randrange(10), dice.random() * 9)
        for _ in range(3000)
    ]
    for module in (form, recent):
        requests, shadow, found, now = module.RecentRequests(), module.LruShadow(2048), list[object](), 0.0
        talks = [np.zeros(0, np.uint64)] * 10
        for new, talk, seconds in program:
            tags = talks[talk] = np.concatenate([talks[talk], new])[-40:].copy()
            num_prompt, now = max(0, len(tags) - talk % 3), now + 3.0
            found.append(requests.recognise(tags, num_prompt, now - seconds))
            requests.add(tags, num_prompt, now, talk, 1 + len(new), talk % 3)
            if num_prompt and len(new) == 3:
                requests.add_head(int(tags[0]), 1, 2 + talk, 7)
            found.append(requests.head_of(int(tags[0])) if len(tags) else None)
            sampled, their_tags = shadow.sampled(tags)
            shadow.ended(their_tags, len(sampled), len(new) % 2)
            found.append((list(sampled), their_tags, shadow.lead, shadow.leads, shadow.num_takeovers))
        found += [requests.waiting().tolist(), requests.waiting_heads().tolist()]
        answers.append(found)
    assert answers[0] == answers[1]
    assert any(isinstance(each, tuple) and each[3] for each in answers[0][0::3])  # some came back


@pytest.mark.parametrize("module", [extension("kvtier.tiers.reuse.recent_compiled") or recent, recent])
@pytest.mark.parametrize("num_prompt", [9, 1 << 40, -1])
def test_more_prompt_blocks_than_names_are_as_many_as_there_are_names(module: Any, num_prompt: int) -> None:
    """The compiled form knows no bounds: what lies behind the tags is not read."""
    tags, requests = np.arange(1, 9, dtype=np.uint64), module.RecentRequests()
    requests.add(tags[6:], num_prompt, 1.0, 1, 0, 0)
    assert requests.recognise(tags[:1], num_prompt, 5.0) == (0, 0.0, 0, None)
    assert requests.recognise(tags[6:], num_prompt, 5.0)[0] == (num_prompt > 0)


@pytest.mark.skipif((agents := agent_sessions(1500)) is None, reason="the agents' trace is not here")
@pytest.mark.parametrize(("num_slots", "lead"), [(680, 0.06), (1600, 0.05), (2720, 0.03)])
def test_on_recorded_agents_it_beats_lru_by_far(num_slots: int, lead: float) -> None:
    assert agents is not None
    replay, asked = TraceReplay(without_hints(agents), 1), int(agents.num_prompt.sum())
    lru, tail = (replay.run(Capacity(num_slots, policy=policy)).found.sum() / asked for policy in ("lru", "predicted"))
    assert tail >= lru + lead


def note(returns: ReusePredictor, now: float, tags: list[int], **told: Any) -> int:
    """One end at this time; returns its turn, from 0: 2 stands for third and fourth."""
    end = RequestEnd((), len(tags), 100, **told)
    found = returns.record(end, np.array(tags, np.uint64), lambda _: 0, lambda: now)
    return found.kind // (NUM_HINTS * NUM_ANSWERS)


def test_requests_of_one_prompt_at_once_are_one_turn_of_one_conversation() -> None:
    """Three choices of one answer, told one after the other; then the next turn, twice at once."""
    returns = ReusePredictor()
    assert [note(returns, 10.0 + i, [1, 2, 3], seconds=5.0) for i in range(3)] == [0, 0, 0]
    assert [note(returns, 30.0 + i, [1, 2, 3, 4, 5], seconds=5.0) for i in range(2)] == [1, 1]
    assert note(returns, 50.0, [1, 2, 3, 4, 5, 6], seconds=5.0) == 2
    # Whoever says nothing of times is taken for the next turn.
    assert [note(returns, 60.0 + i, [7, 8]) for i in range(2)] == [0, 1]


def test_what_is_said_and_what_is_derived_are_judged_apart() -> None:
    """A client says "goes on" of what never returns, while its answers' tool calls return."""
    returns = ReusePredictor()
    for number in range(2000):
        now, odd = 10.0 * number, bool(number % 2)
        note(returns, now, [10**6 + number // 2])  # nobody says anything: every other one returns
        note(returns, now, [2 * 10**6 + number // 2], hint=None if odd else Hint.TOOL, is_derived=True, client=5)
        note(returns, now, [3 * 10**6 + number], hint=Hint.GOES_ON, client=5)
    promises = {
        is_derived: returns.record(
            RequestEnd((), 0, 100, hint, 5, is_derived), NO_TAGS, lambda _: 0, lambda: 20000.0
        ).kind
        for is_derived, hint in ((False, Hint.GOES_ON), (True, Hint.TOOL))
    }
    assert promises[False] == class_of(0, 100, 0)  # not heard
    assert promises[True] == class_of(0, 100, 2)  # heard


def test_a_conversation_that_began_shorter_than_a_block_is_known_by_its_answer() -> None:
    returns = ReusePredictor()
    answer = np.array([1, 2], np.uint64)
    assert returns.record(RequestEnd((), 0, 100), answer, lambda _: 0, lambda: 1.0).kind == class_of(0, 100, 0)
    assert note(returns, 50.0, [1, 2, 3]) == 1


# What classes of requests waited, in sums: the same as each request's own seconds at each age.


Ages = NDArray[np.float64]


def spans(start: Ages, end: Ages) -> Ages:
    """`[n, ages]`: how much of the time from one age to another, in seconds, lies in each of the ages."""
    upper = np.append(EDGES[1:], np.inf)
    between: Ages = np.maximum(np.minimum(end[:, None], upper) - np.maximum(start[:, None], EDGES), 0.0)
    return between


def test_sums_by_age_are_those_of_single_requests() -> None:
    draw = np.random.default_rng(3)
    start = np.append(draw.uniform(0, 1.5 * EDGES[-1], 3000), [0.0, EDGES[5], 0.0])
    end = np.append(start[:3000] + draw.choice([0.0, 1.0, 300.0, 5000.0], 3000), [0.0, EDGES[6], 9e4])
    kinds = draw.integers(0, NUM_CLASSES, len(start))
    hazards = Hazards()
    hazards.waited(kinds, start, end)
    one_by_one = np.zeros((NUM_CLASSES, NUM_AGES))
    np.add.at(one_by_one, kinds, spans(start, end))
    assert np.allclose(hazards._waited, one_by_one, rtol=1e-9, atol=1e-6)
    assert (hazards._waited >= 0).all()


def test_returns_to_be_expected_are_the_hazard_times_the_seconds() -> None:
    draw = np.random.default_rng(4)
    start, hazard = draw.uniform(0, 1.2 * EDGES[-1], 500), draw.uniform(0.001, 0.1, NUM_AGES)
    end = start + draw.choice([0.0, 5.0, 4000.0], 500)
    assert np.allclose(expected(hazard, start, end), spans(start, end) @ hazard)

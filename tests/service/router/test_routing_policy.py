"""Stories of routing: a prompt goes where the least work lies before its first token, and the choice says why."""

import importlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
from extent import brief

from kvtier.service.observe.statuses import LatencyFigures
from kvtier.service.router.fleet import Latencies
from kvtier.service.router.proxy import CROWD, LOAD_WEIGHT, WEIGHTS, Candidate, Choice, Reason, choose, sticky
from kvtier.tiers.compiled import extension

POLICIES: Final[tuple[Callable[[list[Candidate]], Choice], ...]] = (
    lambda fleet: choose(fleet, 10),
    lambda fleet: sticky(fleet, b"s"),
)


def replica(name: str, prefix: dict[str, int] | None = None, load: float = 0, **more: Any) -> Candidate:
    return Candidate(name, prefix or {}, load, **more)


def spread(replicas: list[Candidate], num_requests: int = 12) -> Counter[str | None]:
    """Where so many requests in a row would go."""
    return Counter(choose(replicas, 10, turn=turn).name for turn in range(num_requests))


def test_a_conversation_stays_where_its_prefix_is_until_that_replica_has_too_much_to_do() -> None:
    # The first turn is new to all, and goes to whom the turn it is.
    fleet = [replica("a"), replica("b"), replica("c")]
    assert choose(fleet, 10, turn=1).name == "b"
    # Its blocks are at b now: the second turn, of 14, goes there too, while what b has to do weighs less than those 10.
    for load in (0, 5, 19):
        fleet[1] = replica("b", {"GPU": 10}, load)
        choice = choose(fleet, 14, load_weight=0.5, turn=2)
        assert (choice.name, choice.reason) == ("b", Reason.PREFIX)
        assert [score.work for score in choice.scores] == [14, 4 + load / 2, 14]
        assert [score.cached for score in choice.scores] == [0, 10, 0]
    # Past that it is quicker to compute it all at an idle one.
    fleet[1] = replica("b", {"GPU": 10}, 21)
    fleet[2] = replica("c", load=1)
    choice = choose(fleet, 14, load_weight=0.5, turn=2)
    assert (choice.name, choice.reason) == ("a", Reason.LOAD)


def test_a_block_counts_by_the_tier_it_is_in() -> None:
    # All hold the same ten blocks, each in another tier: the nearest saves most.
    media = ["EXTERNAL", "CPU", "GPU", "STORAGE"]
    fleet = [replica(medium.lower(), {medium: 10}) for medium in media]
    while fleet:
        choice = choose(fleet, 12, turn=3)
        assert choice.name == {4: "gpu", 3: "cpu", 2: "storage", 1: "external"}[len(fleet)]
        assert choice.reason == (Reason.NEARER if len(fleet) > 1 else Reason.ONLY)
        fleet = [each for each in fleet if each.name != choice.name]
    # Many blocks farther away beat few near ones; a prefix may lie in several tiers.
    fleet = [replica("few", {"GPU": 4}), replica("many", {"GPU": 1, "STORAGE": 6})]
    choice = choose(fleet, 12)
    assert (choice.name, choice.reason) == ("many", Reason.PREFIX)
    assert choice.scores[1].cached == 7
    # More blocks that are worth less are no reason: that one has less to do.
    fleet = [replica("near", {"GPU": 8}, 300), replica("far", {"EXTERNAL": 10})]
    assert (choose(fleet, 12).name, choose(fleet, 12).reason) == ("far", Reason.LOAD)
    # The weights are data: where loading from disk costs more than it saves, the same fleet is scored otherwise.
    fleet = [replica("few", {"GPU": 4}), replica("many", {"GPU": 1, "STORAGE": 6})]
    assert choose(fleet, 12, weights={**WEIGHTS, "STORAGE": -0.1}).name == "few"
    # A medium without a weight saves nothing, and is no error.
    choice = choose([replica("tape", {"TAPE": 9}), replica("few", {"CPU": 1})], 12)
    assert choice.name == "few"


def test_equals_take_turns() -> None:
    # Nothing tells them apart, at the start or with the same blocks everywhere.
    for prefix in ({}, {"GPU": 3}):
        fleet = [replica(name, prefix) for name in "abc"]
        assert spread(fleet) == {"a": 4, "b": 4, "c": 4}
        assert choose(fleet, 10).reason == Reason.EQUAL
    # Two hold it, one does not: the two share the work.
    fleet = [replica("a", {"GPU": 3}), replica("b"), replica("c", {"GPU": 3})]
    assert spread(fleet) == {"a": 6, "c": 6}
    # The same sums in another order are equal, whatever floating point says.
    halves = {"GPU": 0.1, "CPU": 0.2, "STORAGE": 0.3}
    fleet = [replica("a", {"GPU": 1, "CPU": 1, "STORAGE": 1}), replica("b", {"STORAGE": 1, "CPU": 1, "GPU": 1})]
    assert {choose(fleet, 9, weights=halves, turn=turn).name for turn in range(2)} == {"a", "b"}
    # A little less to do is enough to break the tie.
    choice = choose([replica("a", {"GPU": 3}, load=2), replica("b", {"GPU": 3}, load=1)], 9)
    assert (choice.name, choice.reason) == ("b", Reason.LOAD)


def test_what_is_new_to_all_goes_where_least_is_to_do_however_little_that_counts() -> None:
    loads = {"a": 3, "b": 2.5, "c": 300}
    fleet = [replica(name, load=load) for name, load in loads.items()]
    assert choose(fleet, 20).name == "b"
    assert choose(fleet, 20).reason == Reason.LOAD
    # A block that one alone holds does not gather everything that is new there.
    assert choose([replica("a", {"GPU": 1}, 60), replica("b", load=2)], 20).name == "b"


def test_a_prefix_that_all_ask_for_spreads() -> None:
    # a alone holds it. So many requests more than elsewhere are borne; as many again outweigh a prompt cached whole.
    for num_requests, name, reason in ((16, "a", Reason.PREFIX), (31, "a", Reason.PREFIX), (33, "b", Reason.LOAD)):
        fleet = [replica("a", {"GPU": 20}, num_requests=num_requests), replica("b")]
        choice = choose(fleet, 20, crowd=16)
        assert (choice.name, choice.reason) == (name, reason)
        assert choice.scores[0].work == pytest.approx(20 * (num_requests / 16 - 1))
    # A few more say nothing, not even about a prompt that is new to all.
    assert [score.work for score in choose([replica("a", num_requests=9), replica("b")], 20).scores] == [20, 20]
    # Where all have many, nobody is crowded.
    fleet = [replica("a", {"GPU": 20}, num_requests=90), replica("b", num_requests=80)]
    assert choose(fleet, 20).name == "a"
    # The dead have the fewest, and that says nothing.
    fleet.append(replica("c", is_alive=False))
    assert choose(fleet, 20).name == "a"


def test_the_dead_and_the_full_get_nothing() -> None:
    # b holds everything, and is full; c holds much, and is dead.
    fleet = [replica("a"), replica("b", {"GPU": 10}, 64, limit=64), replica("c", {"GPU": 9}, is_alive=False)]
    fleet.append(replica("d", load=3))
    assert spread(fleet) == {"a": 12}
    # The page shows them all the same, without an estimate.
    choice = choose(fleet, 10)
    assert [(score.name, score.work) for score in choice.scores] == [("a", 10), ("b", None), ("c", None), ("d", 10.3)]
    assert choice.reason == Reason.LOAD
    # One block less and b takes it again, if it's worth the wait.
    fleet[1] = replica("b", {"GPU": 10}, 7, limit=8)
    assert choose(fleet, 10).name == "b"
    # One left; all full; none alive; none at all.
    full, dead = replica("b", load=64, limit=64), replica("c", is_alive=False)
    for policy in POLICIES:
        assert (policy([full, replica("a"), dead]).name, policy([full, replica("a")]).reason) == ("a", Reason.ONLY)
        assert (policy([full, dead]).name, policy([full, dead]).reason) == (None, Reason.FULL)
        assert (policy([dead]).name, policy([dead]).reason) == (None, Reason.DEAD)
        assert (policy([]).name, policy([]).reason) == (None, Reason.DEAD)


def test_where_events_stop_they_take_turns() -> None:
    # What a said it held is not to be believed any more: nor is there a reason to keep requests from it.
    fleet = [replica("a", {"GPU": 10}, is_sure=False), replica("b")]
    assert spread(fleet) == {"a": 6, "b": 6}
    # b's events go on, and it holds something: the sure thing wins.
    fleet[1] = replica("b", {"CPU": 2})
    assert choose(fleet, 10).name == "b"
    assert choose(fleet, 10).scores[0].cached == 0
    # All events have stopped: round robin, load or not, over those that can take it.
    fleet = [replica("a", {"GPU": 9}, is_sure=False), replica("b", load=5, is_sure=False), replica("c", is_alive=False)]
    assert spread(fleet) == {"a": 6, "b": 6}
    assert choose(fleet, 10).reason == Reason.UNSURE


def test_sticky_sessions_look_at_nothing_else() -> None:
    fleet = [replica("a", {"GPU": 10}), replica("b", load=50), replica("c")]
    # A session stays, sessions spread.
    sessions = [b"%d" % number for number in range(300)]
    homes = {session: sticky(fleet, session).name for session in sessions}
    assert min(Counter(homes.values()).values()) > 60
    assert sticky(fleet, b"7").reason == Reason.SESSION
    # Where b dies, only b's sessions move, to both of the others; they come back with it.
    without = [replica("a"), replica("b", is_alive=False), replica("c")]
    moved = {session: sticky(without, session).name for session in sessions}
    assert {homes[session] for session in sessions if moved[session] != homes[session]} == {"b"}
    assert set(moved.values()) == {"a", "c"}
    assert {session: sticky(fleet, session).name for session in sessions} == homes


def plainly(
    replicas: list[Candidate], num_blocks: int, load_weight: float, crowd: float, turn: int
) -> tuple[str | None, Reason]:
    """The rule as `choose` states it, over one replica after the other."""
    able = [each for each in replicas if each.can_take]
    if len(able) <= 1:
        reason = Reason.FULL if any(each.is_alive for each in replicas) else Reason.DEAD
        return (able[0].name, Reason.ONLY) if able else (None, reason)
    if not any(each.is_sure for each in able):
        return able[turn % len(able)].name, Reason.UNSURE
    fewest = min(each.num_requests for each in able)
    held = {each.name: each.prefix if each.is_sure else {} for each in able}
    saved = {name: sum(WEIGHTS.get(medium, 0.0) * n for medium, n in prefix.items()) for name, prefix in held.items()}
    work = {
        each.name: each.load * load_weight
        + num_blocks * (1 + max(0.0, (each.num_requests - fewest) / crowd - 1))
        - saved[each.name]
        for each in able
    }
    best = [each.name for each in able if work[each.name] <= min(work.values()) + 1e-6]
    chosen = best[turn % len(best)]
    if len(best) > 1:
        return chosen, Reason.EQUAL
    others = [each.name for each in able if each.name != chosen]
    if any(saved[name] > saved[chosen] - 1e-6 for name in others):
        return chosen, Reason.LOAD
    most = sum(held[chosen].values())
    return chosen, Reason.PREFIX if all(sum(held[name].values()) < most for name in others) else Reason.NEARER


@pytest.mark.parametrize("form", ["interpreted", "compiled"])
def test_a_random_program_is_routed_as_by_the_plain_rule(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "interpreted":
        monkeypatch.setenv("KVTIER_COMPILED", "off")
    elif extension("kvtier.service.router.scores_compiled") is None:
        pytest.skip("not built: `make compiled`")
    rng, reasons = random.Random(20), Counter[Reason]()
    media = [*sorted(WEIGHTS), "TAPE"]
    for turn in range(brief(3_000, 20_000)):
        number, load, sure = rng.choice([0, 1, 2, 3, 5, 40]), rng.choice([0, 3, 400]), rng.choice([0.0, 0.7, 1.0])
        fleet = [
            Candidate(
                f"r{row}",
                {m: rng.choice([1, 4, 30]) for m in rng.sample(media, rng.choice([0, 0, 1, 3]))},
                rng.randint(0, load),
                rng.choice([float("inf"), float("inf"), 0.0, 200.0]),
                rng.choice([0, 1, 20, rng.randint(0, 90)]),
                is_alive=rng.random() < 0.9,
                is_sure=rng.random() < sure,
            )
            for row in range(number)
        ]
        weights = rng.choice([0.02, LOAD_WEIGHT, 1.0]), rng.choice([8.0, CROWD, float("inf")])
        num_blocks = rng.choice([0, 8, 60, 16_384])
        choice = choose(fleet, num_blocks, load_weight=weights[0], crowd=weights[1], turn=turn)
        assert (choice.name, choice.reason) == plainly(fleet, num_blocks, *weights, turn)
        if choice.name is not None:
            chosen = next(each for each in fleet if each.name == choice.name)
            assert choice.cached == (sum(chosen.prefix.values()) if chosen.is_sure else 0)
        reasons[choice.reason] += 1
    assert reasons.keys() == set(Reason) - {Reason.SESSION}


@pytest.mark.parametrize("name", ["kvtier.service.router.scores", "kvtier.service.router.scores_compiled"])
def test_columns_refuse_what_does_not_fit_them(name: str) -> None:
    if name.endswith("compiled") and extension(name) is None:
        pytest.skip("not built: `make compiled`")
    scores = importlib.import_module(name).Scores(2)
    flags, counts, rows = np.full(2, 3, np.uint8), np.zeros(16, np.uint32), np.arange(2)
    for wrong in (-1, 2, 2**40):
        with pytest.raises(IndexError):
            scores.standing(wrong, 1.0, 2.0, 0)
        with pytest.raises(IndexError):
            scores.credit(wrong, 3, 0, 0.0)
        with pytest.raises(IndexError):
            scores.cached(wrong if wrong > 0 else -2)
    for columns in (
        (flags[:1], counts, rows, np.ones(8)),
        (flags, counts, rows[:1], np.ones(8)),
        (flags, counts, rows, np.ones(7)),
        (flags, counts[:15], rows, np.ones(8)),
        (flags, counts[:8], rows, np.ones(8)),  # there is no second row
    ):
        with pytest.raises(ValueError, match=r"row|flags"):
            scores.hold(*columns)
    for turn, crowd in ((-1, 16.0), (0, 0.0), (0, float("nan"))):
        with pytest.raises(ValueError, match="turn"):
            scores.choose(1, 0.1, crowd, turn)
    for row in range(2):
        scores.standing(row, 1.0, 2.0, 0)
        scores.credit(row, 3, 0, float("nan"))
    with pytest.raises(ValueError, match="number"):
        scores.choose(1, 0.1, 16.0, 0)
    scores.credit(0, 3, 0, 0.0)
    assert scores.choose(1, 0.1, 16.0, 5)[0] == 0


# What a replica's own metrics tell of waiting: of kvtier's engine, of vLLM with two engines, and of neither.


def page(family: str, counts: Mapping[str, int], labels: str = "") -> bytes:
    buckets = [f'{family}_bucket{{{labels}le="{bound}"}} {count}' for bound, count in counts.items()]
    return "\n".join([f"# TYPE {family} histogram", *buckets, f"{family}_sum 1.0", ""]).encode()


def test_figures_are_of_what_came_lately() -> None:
    told = Latencies()
    assert told.figures() == {}
    told.read(page("kvtier_engine_ttft_seconds", {"0.1": 1000, "1.0": 1000, "+Inf": 1000}))
    assert told.figures() == {}  # all of it may be from long ago
    ttft = page("kvtier_engine_ttft_seconds", {"0.1": 1000, "1.0": 1090, "+Inf": 1100})
    told.read(ttft + page("kvtier_engine_itl_seconds", {"0.01": 0, "0.02": 40, "+Inf": 40}))
    assert told.figures() == {
        "ttft": LatencyFigures(num=100, p50_s=0.6, p95_s=1.0),  # between 0.1 and 1 s; the last bucket has no end
        "itl": LatencyFigures(num=40, p50_s=0.015, p95_s=0.0195),
    }
    for _ in range(12):  # a minute without requests
        told.read(ttft)
    assert told.figures() == {}


def test_engines_of_one_server_are_one_and_a_new_process_begins_anew() -> None:
    told = Latencies()
    told.read(b"")
    family = "vllm:time_to_first_token_seconds"
    one = page(family, {"0.5": 2, "+Inf": 2}, 'engine="0",model_name="m",')
    told.read(one + page(family, {"0.5": 6, "+Inf": 6}, 'engine="1",model_name="m",'))
    assert told.figures()["ttft"].num == 8
    told.read(page(family, {"0.5": 1, "+Inf": 1}, 'engine="1",'))
    assert told.figures() == {}
    told.read(page(family, {"0.5": 4, "+Inf": 4}, 'engine="1",'))
    assert told.figures()["ttft"].num == 3


def test_what_is_no_metric_changes_nothing() -> None:
    told = Latencies()
    told.read(
        b"\xff\x00" * 1000 + b'kvtier_engine_ttft_seconds_bucket{le="x"} 1\nkvtier_engine_ttft_seconds_bucket{le="'
    )
    told.read(b'sglang:inter_token_latency_seconds_bucket{le="0.1"} e+.\n' * 1000)
    assert told.figures() == {}

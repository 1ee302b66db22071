"""Scripted stories of the scheduler: who computes which tokens in each step, in which blocks. No model runs."""

from collections import Counter

import pytest
from scheduler_rig import BLOCK, Begin, ScriptedConnector, tokens

from kvtier.connector.models import Reasoning
from kvtier.connector.scheduler import ConnectorUpdate
from kvtier.engine.requests import FinishReason
from kvtier.engine.sequence import SequenceState
from kvtier.tiers.hierarchy.cache_tiers import PENDING


def test_long_prompts_are_cut_to_the_budget_and_answers_go_first(begin: Begin) -> None:
    story = begin(16)
    story.add("a", tokens(1, 5), max_tokens=4)
    story.add("b", tokens(100, 18), max_tokens=2)
    assert story.step() == [("a", 0, 5), ("b", 0, 3)]  # 8 tokens a step: b gets what a leaves
    assert story.step() == [("a", 5, 6), ("b", 3, 10)]
    assert story.step() == [("a", 6, 7), ("b", 10, 17)]
    assert story.step() == [("a", 7, 8), ("b", 17, 18)]  # a's last, b's first token
    assert story.ended == {"a": FinishReason.LENGTH}
    assert story.step() == [("b", 18, 19)]
    assert story.ended["b"] == FinishReason.LENGTH


def test_a_finished_request_leaves_its_blocks_to_the_next_turn(begin: Begin) -> None:
    story = begin(16)
    first = story.add("a", tokens(1, 6), max_tokens=7)
    story.run()
    assert story.step() == []
    # Turn two: prompt, answer (12 of 13 tokens have KV: three full blocks), and a question.
    story.add("b", [*first.token_ids, 33, 34])
    assert story.step() == [("b", 12, 15)]
    assert story.live["b"].num_l1_tokens == 12


def test_generated_blocks_stay_private_if_configured(begin: Begin) -> None:
    story = begin(16, store_generated=False)
    first = story.add("a", tokens(1, 6), max_tokens=7)
    story.run()
    story.add("b", [*first.token_ids, 33])
    assert story.step() == [("b", 4, 12)]  # only the prompt's one full block is found
    story.run()


THINK, DONE, SAY, CALL = 90, 91, 7, 92


@pytest.mark.parametrize(
    ("answer", "lasts_in_calls", "num_stored"),  # of a prompt of 6 tokens, in blocks of 4
    [
        ([SAY] * 8, False, 3),
        ([THINK, SAY, SAY, DONE, *[SAY] * 4], False, 2),  # with the block in which it begins
        ([SAY, SAY, THINK, SAY, SAY, DONE, SAY, SAY], False, 2),  # it begins on a border
        ([THINK, SAY, SAY, DONE, *[CALL] * 4], False, 2),
        ([THINK, SAY, SAY, DONE, *[CALL] * 4], True, 3),  # as long as tools are called, the next turn has it
    ],
)
def test_reasoning_that_the_next_turn_lacks_is_not_kept(
    begin: Begin, answer: list[int], lasts_in_calls: bool, num_stored: int
) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector, partial_blocks=True, store_generated="answers")
    story.scheduler.reasoning = Reasoning(THINK, DONE, lasts_in_calls)
    story.scheduler.calls_tool = lambda tokens: CALL in tokens
    story.add("a", tokens(1, 6), max_tokens=99)
    story.add("b", [*tokens(200, 5), THINK], max_tokens=99)  # an answer that begins in the middle of it
    for token in [*answer, 0]:
        story.step(token=token)
    assert story.ended == dict.fromkeys("ab", FinishReason.STOP)
    stored: Counter[object] = Counter()
    for kind, name, *more in connector.log:
        stored[name] += int(str(more[1])) if kind == "store" else 0
    assert stored == {"a": num_stored, "b": 3 if lasts_in_calls else 2}


def test_a_shared_prefix_is_computed_once_within_a_batch(begin: Begin) -> None:
    story = begin(16)
    story.add("a", [*tokens(1, 8), 50], max_tokens=3)
    story.add("b", [*tokens(1, 8), 60], max_tokens=1)
    story.add("c", tokens(200, 3), max_tokens=1)
    # b's first block is being computed by a: b waits, and c, later, does not.
    assert story.step() == [("a", 0, 8)]
    assert story.step() == [("a", 8, 9), ("b", 8, 9), ("c", 0, 3)]
    assert story.live["a"].block_table[:2] != []
    assert story.live["b"].num_l1_tokens == 8
    story.run()


def test_longest_cached_prefix_first_within_an_aging_bound(begin: Begin) -> None:
    story = begin(64, max_num_seqs=1, max_passed_over=2)
    story.add("warm", tokens(1, 8))
    story.run()
    story.add("cold", tokens(500, 8))
    for i in range(4):
        story.add(f"hit{i}", [*tokens(1, 8), 90 + i])
    # Two cached ones pass the cold one, then its age counts.
    order = [chunk[0] for step in story.run() for chunk in step]
    assert order == ["hit0", "hit1", "cold", "hit2", "hit3"]


def test_pressure_preempts_the_latest_and_recomputes_it(begin: Begin) -> None:
    story = begin(5)
    story.add("a", tokens(1, 7), max_tokens=9)
    story.add("b", tokens(100, 4), max_tokens=8)
    story.run()
    assert story.scheduler.stats["preempted"] >= 1
    assert story.live["a"].num_preempted == 0
    assert story.live["b"].num_preempted >= 1
    assert story.live["a"].num_generated == 9
    assert story.live["b"].num_generated == 8


def test_offload_stores_what_it_preempts_and_waits_for_the_copies(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(5, connector, preemption="offload", store_generated=False)
    story.add("a", tokens(1, 7), max_tokens=9)
    story.add("b", tokens(100, 4), max_tokens=8)
    for _ in range(6):
        story.step()
    assert [entry for entry in connector.log if entry[1] == "b"] == [("store", "b", 0, 1)]  # its answer stays private
    # a needs a fourth block: b goes, its second block too is handed to the connector, and both wait for their copies.
    assert story.step() == []
    assert story.live["b"].state is SequenceState.WAITING
    assert connector.log[-1] == ("store", "b", 1, 1)
    assert story.step() == []  # nobody else is preempted meanwhile
    assert story.scheduler.stats["preempted"] == 1
    # The copies end: there is room for a. b comes back by a load of what it stored.
    story.end_copies()
    assert story.step() == [("a", 12, 13)]
    connector.findable["b"] = 8
    while story.scheduler.has_unfinished:
        story.step()
        loaded = tuple(story.scheduler.loading)
        connector.news = ConnectorUpdate(loaded=loaded, released=story.copies())
    story.step()
    assert [len(live.generated) for live in story.live.values()] == [9, 8]


def test_a_request_too_large_for_now_is_not_overtaken(begin: Begin) -> None:
    story = begin(6)
    story.add("a", tokens(1, 8), max_tokens=9)
    story.step()
    story.add("large", tokens(100, 16))
    story.add("small", tokens(200, 3))
    steps = story.run()
    order = [name for step in steps for name, _, _ in step]
    assert order.index("large") < order.index("small")


def test_lookups_under_way_hold_up_only_their_own_request(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector)
    connector.findable["a"] = PENDING
    story.add("a", tokens(1, 9))
    story.add("b", tokens(100, 5))
    assert story.step() == [("b", 0, 5)]
    assert story.step() == []
    # The answer: 8 tokens can be loaded. It waits for them, and computes the last one.
    connector.findable["a"] = 8
    assert story.step() == []
    assert story.live["a"].state is SequenceState.LOADING
    assert ("load", "a", 8) in connector.log
    assert story.step() == []
    connector.news = ConnectorUpdate(loaded=("a",), released=story.copies())
    assert story.step() == [("a", 8, 9)]
    assert story.live["a"].num_external_tokens == 8
    assert ("store", "a", 0, 2) not in connector.log  # what came from L2 is not stored again
    # Loaded blocks are named in L1, and offered below anew by whom finds them there: L2 may have lost or refused them.
    story.add("c", [*tokens(1, 8), 99])
    assert story.step() == [("c", 8, 9)]
    assert connector.log[-2] == ("store", "c", 0, 2)


def test_no_promise_covers_the_whole_prompt(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector)
    connector.findable["a"] = 8  # a connector that promises too much
    story.add("a", tokens(1, 8))
    story.step()
    assert ("load", "a", 4) in connector.log
    connector.news = ConnectorUpdate(loaded=("a",))
    assert story.step() == [("a", 4, 8)]


@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_an_expired_promise_is_computed(begin: Begin, loading: str) -> None:
    connector = ScriptedConnector()
    story = begin(8, connector, loading=loading)
    connector.findable["a"] = 2 * BLOCK
    connector.lapsed.add("a")
    story.add("a", range(1, 10))
    assert story.run() == [[("a", 0, 8)], [("a", 8, 9)]]


def test_failed_blocks_are_computed(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector)
    connector.findable["a"] = 12
    story.add("a", tokens(1, 14))
    story.step()
    connector.news = ConnectorUpdate(failed=(("a", 1),))  # the second block's copy failed
    assert story.step() == [("a", 4, 12)]
    assert story.step() == [("a", 12, 14)]
    assert story.live["a"].num_external_tokens == 4
    assert [entry for entry in connector.log if entry[0] == "store"] == [("store", "a", 1, 2)]


def test_full_blocks_are_stored_once_and_referenced_until_copied(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(8, connector)
    story.add("a", tokens(1, 7), max_tokens=3)
    story.step()
    assert connector.log == [("store", "a", 0, 1)]
    story.step()  # the eighth token has KV now
    assert connector.log[-1] == ("store", "a", 1, 1)
    story.step()
    assert story.ended == {"a": FinishReason.LENGTH}
    # The request is gone, its copies are not: two blocks are still taken.
    assert story.pool.num_free_blocks == 6
    assert story.scheduler.has_copies


def test_a_layerwise_load_computes_at_once_and_stores_a_step_later(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector, loading="layerwise")
    connector.findable["a"] = 4
    story.add("a", tokens(1, 9), max_tokens=2)
    assert story.step() == [("a", 4, 9)]
    assert ("store", "a", 1, 1) not in connector.log
    story.step()
    assert ("store", "a", 1, 1) in connector.log
    connector.news = ConnectorUpdate(loaded=("a",), released=story.copies())
    story.step()


def test_a_layerwise_load_that_is_late_leaves_no_trace(begin: Begin) -> None:
    connector = ScriptedConnector()
    story = begin(16, connector, loading="layerwise")
    connector.findable["a"] = 4
    story.add("a", tokens(1, 9))
    story.arrived = False
    assert story.step() == [("a", 4, 9)]  # computed on rubbish
    assert story.ended == {}
    assert story.live["a"].state is SequenceState.LOADING
    story.arrived = True
    assert story.step() == []  # its blocks may still be written
    connector.news = ConnectorUpdate(failed=(("a", 0),))
    assert story.step() == [("a", 0, 8)]
    assert story.step() == [("a", 8, 9)]


def test_an_aborted_owner_hands_its_prefix_on(begin: Begin) -> None:
    story = begin(16)
    story.add("a", tokens(1, 20))
    story.add("b", tokens(1, 20))
    assert story.step() == [("a", 0, 8)]
    story.scheduler.abort("a")
    assert story.step() == [("b", 8, 16)]  # what a computed counts
    story.run()


def test_hundreds_of_requests_through_a_tiny_pool(begin: Begin) -> None:
    story = begin(8, max_passed_over=3)
    for i in range(300):
        story.add(str(i), [*tokens(1 + i % 3 * 50, 4 + i % 7), i], max_tokens=1 + i % 9)
    story.run(limit=5000)
    assert set(story.ended) == set(story.live)
    assert all(live.num_generated == live.params.max_tokens for live in story.live.values())

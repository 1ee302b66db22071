"""Scripted stories of hits that end inside a block: loads that come, fail, lapse or are late; copies within L1."""

import pytest
from scheduler_rig import Begin, ScriptedConnector, tokens

from kvtier.connector.plan import WorkerReport
from kvtier.connector.scheduler import ConnectorUpdate


def test_a_load_that_ends_inside_a_block_is_computed_from_there(begin: Begin) -> None:
    story = begin(16, connector := ScriptedConnector())
    connector.findable["a"] = 6
    story.add("a", tokens(1, 10))
    assert story.step() == []
    assert connector.log == [("load", "a", 6)]
    connector.news = ConnectorUpdate(loaded=("a",))
    assert story.step() == [("a", 6, 10)]
    assert story.live["a"].num_external_tokens == 6
    assert story.scheduler.stats["external_tokens"] == 6
    # The block that came in part is named and stored with what the request computed in it, the whole one is neither.
    assert [entry for entry in connector.log if entry[0] == "store"] == [("store", "a", 1, 1)]
    assert story.pool.lookup(story.live["a"].hashes) == 2


def test_an_unfilled_block_stays_unnamed_and_private(begin: Begin) -> None:
    story = begin(16, connector := ScriptedConnector())
    connector.findable["a"] = 6
    story.add("a", tokens(1, 7))
    story.step()
    connector.news = ConnectorUpdate(loaded=("a",))
    assert story.step() == [("a", 6, 7)]
    assert story.ended
    assert story.pool.lookup(story.live["a"].hashes) == 1
    assert [entry for entry in connector.log if entry[0] == "store"] == []


@pytest.mark.parametrize(("first_failed", "start"), [(1, 4), (0, 0)])
def test_a_partial_block_that_failed_is_computed(begin: Begin, first_failed: int, start: int) -> None:
    story = begin(16, connector := ScriptedConnector())
    connector.findable["a"] = 6
    story.add("a", tokens(1, 8))
    story.step()
    connector.news = ConnectorUpdate(failed=(("a", first_failed),))
    assert story.step() == [("a", start, 8)]
    assert story.live["a"].num_external_tokens == start


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_a_preempted_request_begins_anew(begin: Begin, preemption: str) -> None:
    connector = ScriptedConnector()
    story = begin(5, connector, partial_blocks=True, preemption=preemption)
    connector.findable["b"] = 2
    story.add("a", tokens(1, 7), max_tokens=9)
    story.add("b", tokens(100, 4), max_tokens=8)
    for _ in range(60):
        story.step()
        loaded = tuple(story.scheduler.loading)
        connector.news = ConnectorUpdate(loaded=loaded, released=story.copies())
    assert story.scheduler.stats["preempted"] >= 1
    assert [len(live.generated) for live in story.live.values()] == [9, 8]
    assert story.live["b"].num_external_tokens == 2  # of its first admission


def test_one_copy_within_l1_and_its_source_stays_until_the_step_is_over(begin: Begin) -> None:
    story = begin(16, partial_blocks=True)
    story.add("a", tokens(1, 9))
    story.run()
    held = story.pool.match(story.live["a"].hashes[:2])
    story.pool.free(held)
    story.add("b", [*tokens(1, 6), 90, 91, 92, 93])
    story.add("c", [*tokens(1, 7), 95, 96])
    assert story.step() == [("c", 7, 9), ("b", 6, 10)]  # most is cached of c: it goes first
    assert [source for source, _ in story.copied] == [held[1], held[1]]
    assert {target for _, target in story.copied}.isdisjoint(held)
    assert (story.live["b"].num_l1_tokens, story.live["c"].num_l1_tokens) == (6, 7)


def test_a_step_given_up_references_no_source_any_more(begin: Begin) -> None:
    story = begin(8, partial_blocks=True)
    story.add("a", tokens(1, 9))
    story.run()
    story.add("b", [*tokens(1, 6), 90])
    batch = story.scheduler.schedule(WorkerReport())
    assert len(batch.copies) == 1
    story.scheduler.fail(batch, tuple(op.op_id for op in batch.plan.stores))
    assert story.step() == [("b", 6, 7)]


def test_what_l1_copies_is_not_loaded(begin: Begin) -> None:
    class Asked(ScriptedConnector):
        in_part = 0

        def lookup(self, request: object, num_computed_tokens: int, in_part: int = 0, *, spares: int = 0) -> int:
            self.in_part = in_part
            return 0

    story = begin(16, connector := Asked(), partial_blocks=True)
    story.add("a", tokens(1, 9))
    story.run()
    story.add("b", [*tokens(1, 6), 90])
    assert story.step() == [("b", 6, 7)]
    assert connector.in_part == 2

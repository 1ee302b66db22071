"""Stories of the unfinished last blocks that requests leave in L2: the next turn begins there, with the same bits."""

import pytest
from event_rig import Shelf
from exact_engines import Bits, Over, bits, forget, keep
from extent import brief
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Begin, ScriptedConnector, tokens
from small_engines import settled
from tiny_models import prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.llm import Engine
from kvtier.tiers.hierarchy.hierarchy import TierEvents
from kvtier.tiers.tier import BlockRecord


@pytest.fixture(scope="module")
def cold() -> Bits:
    return Bits()


def num_tails(engine: Engine) -> int:
    settled(engine)
    assert isinstance(engine.connector, LocalConnector)
    return engine.connector.hierarchy.host.pool.check().tails


@pytest.mark.parametrize(
    ("block_size", "loading"), [(16, "async"), (64, "layerwise"), *brief([], [(64, "async"), (256, "async")])]
)
def test_the_next_turn_begins_in_a_tail_of_l2(over: Over, block_size: int, loading: str, cold: Bits) -> None:
    engine = over(None, block_size, loading=loading)
    said = prompt(1, block_size + block_size // 2 - 3)
    [answer] = engine.generate([said], keep(6))
    for turn in range(2):
        said = [*said, *answer.token_ids, *prompt(2 + turn, block_size // 8)]
        assert num_tails(engine) == 1  # the turn before left one, and took the place of the one before that
        forget(engine, "L2")
        [answer] = engine.generate([said], keep(6))
        assert answer.num_l1_tokens == 0
        assert answer.num_external_tokens == len(said) - block_size // 8 - 1  # an answer's last token has no KV
        assert bits(answer) == cold.of(said, 6)


def test_a_tail_counts_as_l2s_in_an_answers_usage(over: Over) -> None:
    engine, first = over(None, 64), prompt(1, 90)
    engine.generate([first], keep(1))
    forget(engine, "L2")
    request = engine.request(engine.add_request([*first, *prompt(2, 9)], keep(1)))
    while engine.has_unfinished:
        engine.step()
    assert request.cached_tokens == {"L1": 0, "L2": 90, "file": 0, "peers": 0, "redis": 0, "objects": 0}


@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_an_aborted_request_leaves_what_it_has_computed(over: Over, num_steps: int, cold: Bits) -> None:
    engine, first = over(None, 64), prompt(1, 150)  # prefill takes two steps
    name = engine.add_request(first, keep(30))
    request = engine.request(name)
    for _ in range(num_steps):
        engine.step()
    computed = request.num_computed
    said = list(request.token_ids)
    assert engine.abort(name)
    engine.step()
    assert num_tails(engine) == 1
    forget(engine, "L2")
    turn = [*said, *prompt(2, 9)]
    [answer] = engine.generate([turn], keep())
    assert answer.num_external_tokens == computed
    assert bits(answer) == cold.of(turn)


def test_tails_that_are_off_too_short_or_private_are_not_stored(over: Over, cold: Bits) -> None:
    first = prompt(1, 40)
    off = over(None, 64, partial_blocks=False)
    off.generate([first], keep(1))
    assert num_tails(off) == 0
    few = over(None, 64)
    few.generate([first[:7], prompt(2, 64)], keep(1))  # fewer tokens than an eighth of a block, and none
    assert num_tails(few) == 0
    private = over(None, 64, store_generated=False)
    [answer] = private.generate([first], keep(6))
    forget(private, "L2")
    turn = [*first, *answer.token_ids, 5]
    [again] = private.generate([turn], keep())
    assert again.num_external_tokens == 40  # of the prompt alone
    assert bits(again) == cold.of(turn)


def test_a_full_l1_waits_for_the_tails_copy(begin: Begin) -> None:
    """The blocks of a request that ended are free, but for the one that a copy still reads."""

    class Takes(ScriptedConnector):
        def store_partial(self, request_id: str, partial: BlockRecord, block_id: int) -> bool:
            self.log.append(("partial", request_id, len(partial.tokens) // 4))
            return True

    story = begin(4, connector := Takes(), partial_blocks=True)
    story.add("a", tokens(1, 10))
    story.add("b", tokens(50, 15))
    story.step()
    story.step()
    assert ("partial", "a", 2) in connector.log
    assert connector.log.index(("partial", "a", 2)) < connector.log.index(("finished", "a"))
    assert story.copies()
    assert story.pool.num_free_blocks < 4
    assert story.step() == []  # "b" needs all four
    story.end_copies()
    assert story.step() == [("b", 0, 8)]
    story.end_copies()
    story.step()


def test_l1s_events_have_only_full_blocks(over: Over, cold: Bits) -> None:
    engine, shelf = over(None, 16), Shelf()
    events, first = TierEvents("l1", lambda: engine.pool), prompt(1, 40)
    engine.generate([first], keep(1))
    shelf.apply(events.take())
    assert not events.waiting
    named = engine.prompt(first).chain
    assert named is not None
    assert shelf.blocks["l1"].keys() == set(named.hashes)
    [answer] = engine.generate([[*first, 5, 6]], keep())
    assert answer.num_l1_tokens == 40  # the tail is there all the same
    assert bits(answer) == cold.of([*first, 5, 6])
    engine.pool.check()


# A random story: conversations beside each other, each turn from whichever tier is left.


@settings(max_examples=brief(4, 20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 7), st.sampled_from(["L1", "L2", "slab"])),
        min_size=4,
        max_size=9,
    ),
    block_size=st.sampled_from([16, 64]),
    slots=st.sampled_from(["8MiB", "512KiB"]),
)
def test_conversations_get_the_bits_of_an_engine_without_a_cache(
    over: Over,
    turns: list[tuple[int, int, int, str]],
    block_size: int,
    slots: str,
    cold: Bits,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    engine = over(tmp_path_factory.mktemp("slab"), block_size, host={"size": slots})
    said = [prompt(9, 30), prompt(9, 30), prompt(8, 45)]  # two begin alike
    for number, (which, length, max_tokens, tier) in enumerate(turns):
        forget(engine, tier)
        question = prompt(100 + number, length)
        [answer] = engine.generate([[*said[which], *question]], keep(max_tokens))
        assert bits(answer) == cold.of([*said[which], *question], max_tokens)
        said[which] = [*said[which], *question, *answer.token_ids]
    num_tails(engine)

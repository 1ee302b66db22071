"""Stories of segments without marks: what comes back anywhere is found, in every tier; exact prefixes come first."""

from pathlib import Path
from typing import Any

import pytest
from small_engines import GREEDY, KEEP, Make, end, names_of, off_full_prefill, over_slab, settled
from tiny_models import prompt

from kvtier.connector.segments import Repair, Segment
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers import RequestError
from kvtier.tiers.errors import ConfigError

AUTO: dict[str, Any] = {"segments": "auto", "segment_min_tokens": 16, "num_blocks": 200}
UNBOUND = Repair(max_deviation=9)  # K and V of random weights depend much on what stands before
DOCUMENT = prompt(1, 240)
LEAST = 140  # of its tokens: without what is before its first border and after its last one


def behind(seed: int, document: list[int] = DOCUMENT, lead: int = 21) -> list[int]:
    """A prompt that begins and ends like no other, with the document at a place of its own."""
    return [*prompt(100 + seed, lead + seed), *document, *prompt(200 + seed, 9)]


def answers(engine: Engine, *prompts: list[int], params: SamplingParams = KEEP, **options: Any) -> list[Completion]:
    """One after the other."""
    every: dict[str, Any] = {"repair": UNBOUND, **options}
    return [engine.generate([one], params, **every)[0] for one in prompts]


def is_full_prefill(found: Completion, tokens: list[int]) -> bool:
    return off_full_prefill(found.logits, tokens + found.token_ids, len(tokens)) <= 1e-4


def test_a_document_is_reused_from_its_second_prompt_on(make: Make) -> None:
    engine = make(tiers=True, **AUTO)
    prompts = [behind(seed) for seed in range(4)]
    found = answers(engine, *prompts)
    # What comes for the first time is exact, and nothing is computed beside it.
    assert found[0].num_segment_tokens == 0
    assert found[0].repair_share is None
    assert is_full_prefill(found[0], prompts[0])
    # The second prompt has its pieces computed alone; from then on they are there.
    assert all(LEAST <= each.num_segment_tokens < len(DOCUMENT) for each in found[1:])
    num_computed = engine.stats["segments_computed"]
    assert 2 * (num_computed - 1) <= engine.stats["segments_held"] <= 2 * num_computed
    assert num_computed > 2
    assert engine.stats["blends"] == 3
    for each in found[1:]:
        assert each.repair_share is not None
        assert abs(each.repair_share - 0.15) < 0.01
        assert each.num_l1_tokens == each.num_external_tokens == 0
    # Nothing behind the first reused token has a name, in no tier; the pieces are prompts of their own.
    settled(engine)
    held = engine.connector.hierarchy.host.pool  # type: ignore[attr-defined]
    for tokens in prompts[1:]:
        own = names_of(engine, tokens)
        assert engine.pool.lookup(own) <= 6
        assert not any(held.holds(own[6:]))
    assert engine.segments is not None
    assert engine.segments.unmarked is not None
    for piece in engine.segments.unmarked.texts(DOCUMENT)[:-1]:
        assert engine.pool.lookup(names_of(engine, piece)) == len(piece) // 16
    end(engine)


def test_exact_prefixes_come_first(make: Make) -> None:
    engine = make(**AUTO)
    engine.precompute([DOCUMENT])
    # A document at the start, and a prompt that was computed before, are prefixes.
    first, second = answers(engine, DOCUMENT + prompt(7, 20), DOCUMENT + prompt(8, 20))
    assert (first.num_l1_tokens, second.num_l1_tokens) == (240, 240)
    assert first.num_segment_tokens == second.num_segment_tokens == 0
    assert is_full_prefill(second, DOCUMENT + prompt(8, 20))
    # So is what several answers to one prompt share: the others wait for the first one's blocks.
    tokens = prompt(9, 200)
    found = engine.generate([tokens] * 4, KEEP, repair=UNBOUND)
    assert [each.num_segment_tokens for each in found] == [0] * 4
    assert sorted(each.num_l1_tokens for each in found) == [0, 192, 192, 192]
    end(engine)


def test_a_conversation_is_blended_once_then_exact(make: Make) -> None:
    engine = make(**AUTO)
    engine.precompute([DOCUMENT])
    turn = behind(3)
    blended, cached = [], []
    for number in range(5):
        [found] = answers(engine, turn)
        blended.append(found.num_segment_tokens > 0)
        cached.append(found.num_l1_tokens)
        if not found.num_segment_tokens:
            assert is_full_prefill(found, turn)
        turn = [*turn, *found.token_ids, *prompt(60 + number, 12)]
    assert blended == [True, False, False, False, False]
    assert cached[1] <= 48  # it has to be computed once, all of it …
    assert cached[2] >= 256  # … and then is a prefix
    end(engine)


def test_the_callers_marks_are_used_where_there_are_any(make: Make) -> None:
    engine = make(**AUTO)
    engine.precompute([DOCUMENT])
    tokens = behind(4)
    [marked] = answers(engine, tokens, segments=[[Segment(25, 25 + 240)]])
    assert marked.num_segment_tokens == 240  # the whole document, as the caller says
    [none] = answers(engine, behind(5), segments=[[]])
    assert none.num_segment_tokens == 0
    assert is_full_prefill(none, behind(5))
    end(engine)


def test_too_few_known_tokens_are_computed_with_the_others(make: Make) -> None:
    engine = make(**AUTO)
    engine.precompute([DOCUMENT])
    tokens = behind(6, document=[*prompt(40, 300), *DOCUMENT])
    [found] = answers(engine, tokens)
    assert found.num_segment_tokens == 0
    assert is_full_prefill(found, tokens)
    assert engine.stats["segments_few"] > 0
    assert engine.pool.lookup(names_of(engine, tokens)) == len(tokens) // 16  # so it is a prefix from now on
    end(engine)


def test_salts_separate_what_was_seen(make: Make) -> None:
    engine = make(**AUTO)
    for seed in range(2):
        answers(engine, behind(seed), cache_salt="a")
    computed = engine.stats["segments_computed"]
    assert computed > 0
    [other] = answers(engine, behind(7), cache_salt="b")
    assert other.num_segment_tokens == 0
    assert engine.stats["segments_computed"] == computed
    end(engine)


def test_after_a_restart_the_slab_has_them_at_first_sight(disk_dir: Path) -> None:
    engine = over_slab(disk_dir, **AUTO)
    engine.precompute([DOCUMENT])
    [first] = answers(engine, behind(1))
    settled(engine)
    end(engine)
    engine = over_slab(disk_dir, **AUTO)
    [second] = answers(engine, behind(1))
    assert engine.stats["segments_loaded"] > 0
    assert engine.stats["segments_computed"] == 0  # what no tier has is not computed alone
    assert engine.stats["segments_new"] > 0
    assert abs(second.num_segment_tokens - first.num_segment_tokens) <= 48
    [other] = answers(engine, behind(2, document=prompt(50, 240)))
    assert other.num_segment_tokens == 0
    assert is_full_prefill(other, behind(2, document=prompt(50, 240)))
    assert engine.segments is not None
    assert not engine.segments._children
    end(engine)


@pytest.mark.parametrize("tokens", [[7] * 700, [7, 8, 9] * 233], ids=["one token", "three tokens"])
def test_one_token_over_and_over_is_one_segment(make: Make, tokens: list[int]) -> None:
    engine = make(**AUTO)
    found = [answers(engine, [*prompt(seed, 30 + seed), *tokens], params=GREEDY)[0] for seed in range(4)]
    assert [len(each.token_ids) for each in found] == [8] * 4
    # Equal pieces are computed once for a request.
    assert engine.stats["segments_computed"] <= 2 * 128 // 16 * len(set(tokens))
    end(engine)


def test_an_abort_ends_what_was_queued_for_it(make: Make) -> None:
    engine = make(tiers=True, **AUTO)
    answers(engine, behind(0))
    for num_steps in range(4):
        name = engine.add_request(behind(2 + num_steps), GREEDY, repair=UNBOUND)
        for _ in range(num_steps):
            engine.step()
        assert engine.abort(name)
        while engine.has_unfinished:
            engine.step()
        assert engine.drain(60)
        assert engine.segments is not None
        assert not engine.segments._children
        engine.pool.reset()
    end(engine)


def test_settings_that_do_not_fit_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match='segments "auto": answers are approximate, and this engine is "exact"'):
        make(exact=True, exact_rows=64, **AUTO)
    with pytest.raises(ConfigError, match='segments "auto": they are found by name, and enable_prefix_caching is off'):
        make(segments="auto", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r'repair_share 1\.5: use a number from 0 to 1, or "auto"'):
        EngineConfig(repair_share=1.5)
    with pytest.raises(RequestError, match="check_layer 9: this model's layers are 0 to 2"):
        make(**AUTO).add_request(behind(1), GREEDY, repair=Repair(check_layer=9))


def test_the_share_auto_is_chosen_and_told(make: Make) -> None:
    engine = make(**AUTO, repair_share="auto")
    engine.precompute([DOCUMENT])
    [found] = answers(engine, behind(1), repair=Repair(share="auto", max_deviation=9))
    assert found.repair_share is not None
    assert 0.045 <= found.repair_share <= 0.205
    # A rule that measures no deviation takes 15 %.
    [first] = answers(engine, behind(2), repair=Repair("first", share="auto"))
    assert first.repair_share is not None
    assert abs(first.repair_share - 0.15) < 0.05
    assert engine.segments is not None
    shares = engine.segments.counts.shares
    assert sum(shares.counts.values()) == 2
    assert shares.sum == pytest.approx(found.repair_share + first.repair_share)
    end(engine)

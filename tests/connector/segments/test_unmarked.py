"""Where texts without marks are cut: by what is near alone, within bounds, whatever a caller sends."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from doubles import chain_over
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.connector.segments.progress import chosen_share
from kvtier.connector.segments.segment import Segment
from kvtier.connector.segments.unmarked import SeenNames, UnmarkedSegments, borders, segments_in

chain_of = partial(chain_over, block_size=16)
WINDOW = 8
SHORTEST = (8, 16, 64)
TEXT = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=600),
    st.lists(st.integers(0, 3), max_size=600),  # few different tokens: many equal hashes
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 40)).map(lambda it: it[0] * it[1]),
)


def text_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 30_000, length).tolist()
    return tokens


# borders


@given(before=TEXT, text=TEXT, after=TEXT, shortest=st.sampled_from(SHORTEST))
@settings(max_examples=brief(100, 1000), deadline=None)
def test_a_border_depends_on_what_is_near_alone(
    before: list[int], text: list[int], after: list[int], shortest: int
) -> None:
    """Inside a text, `shortest` tokens from its start and `shortest` + 8 from its end, borders are its own."""
    alone = set(borders(text, shortest).tolist())
    inside = range(shortest, len(text) - shortest - WINDOW + 1)
    assert alone <= set(inside)
    found = borders([*before, *text, *after], shortest) - len(before)
    assert {place for place in found.tolist() if place in inside} == alone


@given(text=TEXT, start=st.integers(0, 700), shortest=st.sampled_from(SHORTEST))
@settings(max_examples=brief(100, 1000), deadline=None)
def test_segments_are_a_partition_within_their_bounds(text: list[int], start: int, shortest: int) -> None:
    whole = segments_in(text, shortest)
    assert [token for each in whole for token in text[each.start : each.end]] == text
    assert all(0 < each.end - each.start <= 8 * shortest for each in whole)
    assert all(np.diff(borders(text, shortest)) > shortest)
    assert segments_in(text, shortest, start) == [each for each in whole if each.end > start]


def test_a_document_is_cut_alike_behind_anything() -> None:
    document, shortest = text_of(1, 3000), 32
    alone = {(each.start, each.end) for each in segments_in(document, shortest)}
    for seed in range(5):
        lead = text_of(10 + seed, 100 + 37 * seed)
        found = segments_in([*lead, *document, *text_of(20 + seed, 200)], shortest)
        same = {(each.start - len(lead), each.end - len(lead)) for each in found} & alone
        assert sum(end - start for start, end in same) >= 0.9 * len(document)  # all but its first and last piece
    lengths = [each.end - each.start for each in segments_in(text_of(2, 100_000), shortest)]
    assert 1.8 * shortest <= np.mean(lengths) <= 2.2 * shortest


def test_the_cut_is_written_down() -> None:
    """docs/reuse.md describes it: another cut would find nothing of what is stored."""
    assert borders(list(range(400)), 16).tolist() == BORDERS


BORDERS = [83, 130, 230, 312, 345]


# hostile prompts


@pytest.mark.parametrize(
    "tokens",
    [[7] * 1_000_000, [1, 2, 3] * 333_333, text_of(3, 1_000_000), list(range(1_000_000))],
    ids=["one token", "three tokens", "random", "rising"],
)
def test_a_million_tokens_stay_within_bounds(tokens: list[int]) -> None:
    finder = UnmarkedSegments(16, 32)
    chain = chain_of(tokens)
    tracemalloc.start()
    for _ in range(2):
        found = finder.find(chain, tokens, 0)
        finder.note(chain, found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < len(found.segments) <= 4096
    assert all(len(each.hashes) <= 8 * 32 // 16 for each in found.segments)
    assert peak < 400 << 20
    assert finder._seen._table.nbytes == 2 << 20  # all that is kept
    if len(set(tokens)) == 1:  # equal pieces are one
        assert len({each.hashes for each in found.segments[:-1]}) == 1


def test_short_and_empty_texts_have_no_borders() -> None:
    for length in range(2 * 16 + WINDOW):
        assert not len(borders(list(range(length)), 16))
        assert segments_in(list(range(length)), 16) == ([Segment(0, length)] if length else [])


# what was seen


def test_names_are_counted_up_to_three_and_forgotten_by_others() -> None:
    names = chain_of(text_of(4, 160)).hashes
    seen = SeenNames(1 << 10)
    assert seen.counts([]).tolist() == []
    for count in (0, 1, 2, 3, 3):
        assert seen.counts(names).tolist() == [count] * 10
        seen.note(names + names)  # within one prompt a name counts once
    seen.note(chain_of(text_of(5, 16 * 20_000)).hashes)
    assert seen.counts(names).tolist() != [3] * 10
    assert seen._table.nbytes == 8 << 10


def test_what_was_seen_is_worth_computing_and_a_returning_prefix_is_exact() -> None:
    finder, document = UnmarkedSegments(16, 16), text_of(6, 400)
    numbers = []
    for seed in range(3):
        tokens = [*text_of(30 + seed, 50), *document, *text_of(40 + seed, 50)]
        found = finder.find(chain_of(tokens), tokens, 0)
        finder.note(chain_of(tokens), found)
        assert found.num_exact == 0
        numbers.append(sum(each.num_seen for each in found.segments))
    assert numbers[0] == 0
    assert numbers[1] == numbers[2] >= 0.7 * 400 / 16
    # Another tenant's are others.
    salted = chain_of(tokens, salt="a")
    assert not any(each.num_seen for each in finder.find(salted, tokens, 0).segments)
    # The next turn: its beginning returns, and is computed exactly.
    longer = [*tokens, *text_of(50, 100)]
    found = finder.find(chain_of(longer), longer, 0)
    assert found.num_exact == len(tokens) // 16 * 16
    assert all(each.segment.end > found.num_exact for each in found.segments)


def test_where_most_prompts_have_a_next_turn_none_is_blended() -> None:
    """A blend saves its prompt's time; the next turn computes all of it. Where both come, the first is computed."""
    finder = UnmarkedSegments(16, 16)

    def offers(tokens: list[int], *, is_turn: bool = False) -> bool:
        chain = chain_of(tokens)
        found = finder.find(chain, tokens, 0)
        finder.note(chain, found)
        return finder.pays(found, 0 if is_turn else found.num_least)

    alone = [offers(text_of(seed, 200)) for seed in range(60, 70)]
    assert all(alone)
    both = []
    for seed in range(70, 130):
        both.append(offers(text_of(seed, 200)))
        offers([*text_of(seed, 200), *text_of(1000 + seed, 200)], is_turn=True)
    assert both[0]
    assert not any(both[-20:])
    # It forgets: where they stop coming back, blends begin again.
    assert [offers(text_of(seed, 200)) for seed in range(200, 400)][-1]
    # Too few tokens are not worth one, whatever comes back.
    found = finder.find(chain_of(text_of(9, 200)), text_of(9, 200), 0)
    assert found.num_least == 100
    assert not finder.pays(found, 99)


def test_what_the_exact_prefix_has_is_not_looked_for() -> None:
    finder, tokens = UnmarkedSegments(16, 16), text_of(7, 600)
    found = finder.find(chain_of(tokens), tokens, 320)
    assert found.num_exact == 320
    assert all(each.segment.end > 320 for each in found.segments)
    assert len(found.names) == (600 - 320) // 16 + sum(len(each.hashes) for each in found.segments)


def test_texts_to_compute_are_what_is_found_behind_another_text() -> None:
    finder, document = UnmarkedSegments(16, 16), text_of(8, 500)
    names = {name for text in finder.texts(document) for name in chain_of(text).hashes}
    tokens = [*text_of(9, 77), *document, *text_of(10, 60)]
    found = [each for each in finder.find(chain_of(tokens), tokens, 0).segments if set(each.hashes) & names]
    assert sum(each.segment.end - each.segment.start for each in found) >= 0.7 * 500


# the share that is chosen


@given(squares=st.lists(st.floats(0, 4), min_size=1, max_size=400))
@settings(max_examples=brief(100, 1000), deadline=None)
def test_the_chosen_share_is_that_of_large_deviations_within_its_bounds(squares: list[float]) -> None:
    values = np.array(squares)
    number = round(chosen_share(values) * len(values))
    least, most = max(1, round(0.05 * len(values))), max(1, round(0.2 * len(values)))
    assert number == min(max(sum(each > 0.2 for each in squares), least), most)

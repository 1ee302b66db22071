"""Stories of the optimum: what no policy can beat, against every schedule there is on small cases."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies

from kvtier.service.simulation.optimum import Optimum

Chain = tuple[int, ...]


def brute_force(chains: list[Chain], num_prompt: list[int], capacity: int) -> int:
    """The most prompt blocks found by any cache of whole prefixes: every set it could keep after every request."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(chains):
            return 0
        chain, asked = chains[at], num_prompt[at]
        found = next((i for i in range(asked) if chain[i] not in held), asked)
        could = sorted(held | set(chain))
        most = 0
        for count in range(min(capacity, len(could)) + 1):
            for kept in combinations(could, count):
                most = max(most, best(at + 1, frozenset(kept)))
        return found + most

    return best(0, frozenset())


@strategies.composite
def tree_traces(draw: strategies.DrawFn) -> tuple[list[Chain], list[int]]:
    """Up to six requests over a tree of seven blocks, each a path from its root; the last blocks may be an answer's."""
    paths: list[Chain] = [(0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4), (5,), (5, 6)]
    chains = draw(strategies.lists(strategies.sampled_from(paths), min_size=1, max_size=6))
    return chains, [draw(strategies.integers(0, len(chain))) for chain in chains]


@settings(max_examples=60, deadline=None)
@given(tree_traces(), strategies.integers(0, 4))
def test_no_schedule_finds_more_and_one_finds_as_much(trace: tuple[list[Chain], list[int]], capacity: int) -> None:
    chains, num_prompt = trace
    assert Optimum(chains, num_prompt).hits(capacity).sum() == brute_force(chains, num_prompt, capacity)


def test_the_block_needed_last_goes_and_the_deepest_first() -> None:
    # Three chats take turns; two blocks fit beside the head that all share.
    chains = [(0, 1, 2), (0, 3, 4), (0, 5, 6), (0, 1, 2), (0, 3, 4)]
    optimum = Optimum(chains)
    assert optimum.num_asked == 15
    assert optimum.hits(3).tolist() == [0, 1, 1, 3, 1]
    # With one block more the second chat keeps its beginning, and not its end.
    assert optimum.hits(4).tolist() == [0, 1, 1, 3, 2]
    assert optimum.hits(5).tolist() == [0, 1, 1, 3, 3]
    assert optimum.share(5) == pytest.approx(8 / 15)


def test_an_answer_is_kept_for_its_next_turn_and_costs_nothing_if_there_is_none() -> None:
    chains = [(0, 1, 2), (7, 8, 9), (0, 1, 2, 3)]
    assert Optimum(chains, [2, 2, 4]).hits(3).tolist() == [0, 0, 3]
    # An answer that is given again is kept from then on alone.
    assert Optimum([(0, 1), (7,), (0, 1), (0, 1)], [1, 1, 1, 2]).hits(1).tolist() == [0, 0, 1, 1]


def test_no_request_and_no_room() -> None:
    assert Optimum([]).share(10) == 0
    assert Optimum([(1,), (1,)]).hits(0).tolist() == [0, 0]

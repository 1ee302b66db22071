"""Stories of benchmarks/eviction.py: its made-up agents, cuts of recorded sessions, and other orders of eviction."""

import pytest
from _eviction_policies import OTHERS, Lru, share_of
from _eviction_traces import AGENT_TRACES, TRACES, cut, made_up

from kvtier.service.simulation import Capacity, TraceReplay, optimum_of


@pytest.mark.parametrize(("name", "size"), [("chats", 300), ("documents", 200), ("compaction", 700)])
def test_other_orders_find_no_more_than_the_optimum_and_lru_finds_what_kvtiers_does(name: str, size: int) -> None:
    trace = made_up(name, limit=400)
    found = TraceReplay(trace, 1).run(Capacity(size, policy="lru")).found
    assert share_of(Lru, trace, size) == pytest.approx(found.sum() / trace.num_prompt.sum())
    bound = optimum_of(trace).share(size)
    for policy in OTHERS.values():
        assert 0 < share_of(policy, trace, size) <= bound + 1e-9
        assert share_of(policy, trace, trace.num_names) == pytest.approx(optimum_of(trace).share(trace.num_names))


@pytest.mark.parametrize("name", AGENT_TRACES)
def test_made_up_agents_are_the_same_each_time_and_come_in_order(name: str) -> None:
    requests = TRACES[name](3)
    assert requests == TRACES[name](3)
    assert requests != TRACES[name](4)
    arrivals = [each.arrival for each in requests]
    assert arrivals == sorted(arrivals)
    assert all(0 < each.num_prompt <= len(each.blocks) for each in requests)


def test_a_compacted_context_keeps_its_head_and_no_more() -> None:
    requests, seen = TRACES["compaction"](1), set[int]()
    prompts = [each.blocks[: each.num_prompt] for each in requests]
    assert max(map(len, prompts)) < 400
    short = 0
    for prompt in prompts:
        num_known = next((i for i, block in enumerate(prompt) if block not in seen), len(prompt))
        short += num_known in (16, 24, 40)  # a session's first request, or one behind a summary
        seen.update(prompt)
    assert short > 100


def test_a_cut_has_whole_sessions_at_other_times() -> None:
    trace = made_up("tool-loops", limit=600)
    some = cut(trace, 1)
    assert 0 < len(some) < len(trace)
    assert (some.begun[1:] >= some.begun[:-1]).all()
    firsts = {int(trace.chain(request)[0]) for request in range(len(trace))}
    assert len({int(some.chain(request)[0]) for request in range(len(some))}) == round(len(firsts) / 2)

"""Who gives way of too many that wait: bounded, fair between addresses, and in order."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.service.command_line import Crowd


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.booleans())))
def test_it_never_holds_more_than_it_may(steps: list[tuple[int, str, bool]]) -> None:
    crowd, waiting = Crowd[int](3), dict[int, str]()
    for one, address, stays in steps:
        waiting.pop(one, None)
        if not stays:
            crowd.discard(one)
            continue
        crowd.add(one, address)
        waiting[one] = address
        if (victim := crowd.surplus()) is not None:
            of_each = [list(waiting.values()).count(each) for each in set(waiting.values())]
            assert list(waiting.values()).count(waiting[victim]) == max(of_each)
            assert next(each for each, where in waiting.items() if where == waiting[victim]) == victim
            del waiting[victim]
        assert len(crowd) == len(waiting) <= 3

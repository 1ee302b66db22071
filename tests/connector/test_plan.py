"""A step plan crosses a process border: it survives the trip, and nothing else is taken for one."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.tiers.errors import FormatError

PLAN = StepPlan(
    step=7,
    region=42,
    loads=(CopyOp(1, "a", (3, 4), (8, 9), (1, 1), layerwise=True),),
    stores=(CopyOp(2, "b", (5,), (0,), (3,)),),
)


def test_a_plan_survives_the_trip() -> None:
    assert StepPlan.decode(PLAN.encode()) == PLAN
    assert StepPlan.decode(StepPlan(1, 0).encode()) == StepPlan(1, 0)


def test_an_empty_plan_is_false() -> None:
    assert PLAN
    assert not StepPlan(1, 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [99, 1, 0, [], []],  # another version
        [1, -1, 0, [], []],
        [1, 1, 0, [[1, "a", [1], [2, 3], [1], False]], []],  # columns of unequal length
        [1, 1, 0, [[1, 5, [1], [2], [1], False]], []],  # the request id is no text
        [1, 1, 0, [[1, "a", [1], [2], [1], 1]], []],  # the kind is no bool
        [1, 1, 0, [[1, "a", [True], [2], [1], False]], []],
        [1, 1, 0, [[1, "a"]], []],
        {"step": 1},
    ],
)
def test_what_is_no_plan_is_a_format_error(value: object) -> None:
    with pytest.raises(FormatError):
        StepPlan.decode(msgpack.packb(value))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_format_error_or_a_plan(data: bytes) -> None:
    try:
        plan = StepPlan.decode(data)
    except FormatError:
        return
    assert StepPlan.decode(plan.encode()) == plan


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_a_format_error_or_another_plan(position: int, value: int) -> None:
    data = bytearray(PLAN.encode())
    data[position % len(data)] = value
    try:
        StepPlan.decode(bytes(data))
    except FormatError:
        return

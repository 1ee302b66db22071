"""Which of a request's blocks may be stored: the quick look at whole tables against the look at every block."""

import random
from itertools import groupby

import pytest

from kvtier.connector.vllm.requests import NULL, whole_runs
from kvtier.connector.vllm.slots import GroupLane

SIZE = 64  # tokens of kvtier's block
KINDS = {
    "one table": (GroupLane(0),),
    "a window": (GroupLane(0), GroupLane(1, window=128)),
    "smaller blocks behind a window": (GroupLane(0), *(GroupLane(1, place, 4, window=32) for place in range(4))),
    "chunks": (GroupLane(0), *(GroupLane(1, place, 2, chunk=64) for place in range(2))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_runs_are_those_of_the_look_at_every_block(kind: str, share: float) -> None:
    draw = random.Random(f"{kind} {share}")
    lanes = tuple(enumerate(KINDS[kind]))
    for _ in range(50):
        last = draw.randint(1, 30)
        first = draw.randrange(last)
        counts = {lane.group: lane.count for _, lane in lanes}
        # more blocks than asked for stand in the tables, since a step allocates ahead; what is not kept is NULL
        tables = [
            [NULL if draw.random() < share else draw.randint(1, 99) for _ in range(count * (last + 2))]
            for count in counts.values()
        ]

        # of each block alone: is there all of it, or only what no prompt needs missing?
        def is_whole(block: int, tables: list[list[int]] = tables) -> bool:
            return all(
                tables[lane.group][lane.position(block)] != NULL or not lane.is_needed(block, SIZE) for _, lane in lanes
            )

        expected = [list(run) for whole, run in groupby(range(first, last), is_whole) if whole]
        assert [list(run) for run in whole_runs(lanes, tables, range(first, last), SIZE)] == expected

"""Records that come in pieces of any size are put together as if they had come at once."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.objects.layout import ArrivingRecords

HEAD, SLOT = 7, 20


@given(
    lengths=st.lists(st.integers(HEAD, HEAD + SLOT), max_size=6),
    cuts=st.lists(st.integers(0, 6 * (HEAD + SLOT)), max_size=8),
    came=st.floats(0, 1.5),
)
def test_each_record_is_told_once_when_it_is_whole(lengths: list[int], cuts: list[int], came: float) -> None:
    sent = np.random.default_rng(1).bytes(int(came * sum(lengths)))
    slots = [bytearray(SLOT) for _ in lengths]
    told: list[tuple[int, bytes]] = []
    views = [memoryview(slot) for slot in slots]
    records = ArrivingRecords(lengths, HEAD, views, lambda number, record: told.append((number, record)))
    edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    for start, end in itertools.pairwise(edges):
        records.take(memoryview(sent)[start:end])
    at, expected = 0, []
    for number, length in enumerate(lengths):
        record, at = sent[at : at + length], at + length
        if len(record) < length:
            break
        expected.append((number, record[:HEAD]))
        assert slots[number] == record[HEAD:].ljust(SLOT, b"\0")
    assert told == expected
    assert records.num_whole == len(expected)

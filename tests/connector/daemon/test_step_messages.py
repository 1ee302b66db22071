"""What a step says to the daemon and is answered: one message for all its stores, never with too many items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.msgpack import encode

from kvtier.connector.daemon import client
from kvtier.connector.daemon.client import RemoteReservation, seals_of
from kvtier.connector.daemon.wire import pack_grants, unpack_grants

GRANTS = st.lists(st.none() | st.integers(0, 4), max_size=20)


def reservation(number: int, num_blocks: int = 1) -> RemoteReservation:
    names = [bytes([number % 256]) * 32] * num_blocks
    numbers = list(range(num_blocks))
    return RemoteReservation(
        names, numbers, numbers, numbers, [None] * num_blocks, 0, 0, lambda each, dropped: None, number
    )


def test_a_step_of_many_is_one_message() -> None:
    [seal] = seals_of([(reservation(n), [b"%04d" % n], 3) for n in range(64)])
    assert seal.epoch == 3
    assert seal.reservations == list(range(64))
    assert seal.counts == [1] * 64
    assert seal.tokens == [b"%04d" % n for n in range(64)]


def test_nothing_filled_is_no_message() -> None:
    assert seals_of([]) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=30), st.integers(5, 9))
def test_no_message_is_too_long_and_none_mixes_epochs(stores: list[tuple[int, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "MAX_ITEMS", most)
        filled = [(reservation(n, count), [b"%d" % n] * count, epoch) for n, (epoch, count) in enumerate(stores)]
        seals = seals_of(filled)
    assert all(len(seal.tokens) <= most and len(seal.reservations) <= most for seal in seals)
    told = [
        (number, count, seal.epoch)
        for seal in seals
        for number, count in zip(seal.reservations, seal.counts, strict=True)
    ]
    assert told == [(n, count, epoch) for n, (epoch, count) in enumerate(stores)]
    assert [token for seal in seals for token in seal.tokens] == [token for _, tokens, _ in filled for token in tokens]


@given(GRANTS)
def test_what_was_granted_arrives(counts: list[int | None]) -> None:
    """A step of one block each takes a way of its own through the decoder."""
    for granted in (counts, [1] * len(counts)):
        grants = [None if n is None else ([*range(n)], [*range(7, 7 + n)], [*range(n)]) for n in granted]
        told = unpack_grants(
            Raw(encode(pack_grants(grants))), [n or 0 if granted is counts else 1 for n in granted], 64
        )
        assert told == grants

"""The wire: what is packed is unpacked the same, however it is cut; all else is a FormatError, and costs nothing."""

import resource
import tracemalloc
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.msgpack import encode
from msgspec.structs import astuple
from service_rig import body_of, news_of, unpack_reply, unpack_request

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteReservation, seals_of
from kvtier.tiers.errors import FormatError
from kvtier.tiers.hierarchy.cache_tiers import Attribution, Overlap, SplitPoint, Wanted
from kvtier.tiers.tier import ChildBlock, Outcome

name = st.binary(min_size=32, max_size=32)
names = st.lists(name, max_size=5)
number = st.integers(0, 2**63 - 1)
numbers = st.lists(number, max_size=5)
ends = st.sampled_from(Overlap)
time = st.floats(0, 1e6)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=16).map(lambda ids: np.array(ids, "<u4").tobytes())
operation = st.one_of(
    st.builds(
        lambda n, p, each, ends: wire.Ask(n, p, len(each) // 2, 16, b"".join(each), ends), number, name, names, ends
    ),
    st.builds(wire.Renew, numbers),
    st.builds(wire.Cancel, numbers),
    st.builds(wire.Take, numbers),
    st.builds(wire.Release, numbers),
    st.builds(wire.Reserve.of, number, st.lists(st.builds(Wanted, names, name, name, st.booleans()), max_size=3)),
    st.builds(
        lambda epoch, sealed: wire.Seal(
            epoch, [n for n, _ in sealed], [len(t) for _, t in sealed], [each for _, t in sealed for each in t]
        ),
        number,
        st.lists(st.tuples(number, st.lists(tokens, max_size=4)), max_size=3),
    ),
    st.builds(wire.Abandon, st.sampled_from(Outcome), numbers),
    st.builds(wire.Computed, number, time, number),
    st.builds(wire.Holds, names.map(b"".join)),
    st.builds(wire.Lookup, names.map(b"".join), time),
    st.builds(wire.Ended, st.binary(min_size=16, max_size=16)),
    st.just(wire.Bye()),
    st.just(wire.Reset()),
    st.builds(wire.Drain, time, st.booleans()),
    st.just(wire.Check()),
)  # fmt: skip
child = st.builds(ChildBlock, name, tokens.filter(bool))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=25,
)  # fmt: skip


def packed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return body


@given(number, st.lists(operation, max_size=4))
def test_requests_come_out_as_they_went_in(request: int, operations: list[Any]) -> None:
    assert unpack_request(body_of(wire.pack_request(request, operations))) == (request, operations)


def test_where_both_ends_meet_comes_out_as_it_went_in_and_lies_within_what_was_found() -> None:
    def told(split: Any) -> wire.News:
        found = Attribution(5, l1=1, file=3, miss=1)
        news = news_of(7, found, None, 0.0, [], [], split=split)
        told = unpack_reply(body_of(wire.pack_reply(0, 2, [], [news]))).news[0]
        assert told.check(found) == ([], [])
        return told

    assert told(None).split is None
    assert told(SplitPoint(2, 0.5)).split == SplitPoint(2, 0.5)
    for wrong in ((0, 0.5), (4, 0.5), (2, -1.0), (2.0, 0.5), (2,), 7):
        with pytest.raises(FormatError):
            told(wrong)


def test_replies_come_out_as_they_went_in() -> None:
    found = Attribution(5, l1=1, l2=2, file=1, miss=1)
    news = news_of(7, found, None, 0.0, [3, 9, 1], [1, 1, 2**40])
    nothing = news_of(8, Attribution(2, miss=2), Outcome.NO_SLOT, 0.05, [], [])
    granted: wire.Granted = ([0, 2], [4, 5], [1, 9])
    nothing_free: wire.Granted = ([], [], [])
    reply = unpack_reply(
        body_of(wire.pack_reply(3, 2, [wire.pack_grants([granted, None, nothing_free]), b"\1\0"], [news, nothing]))
    )
    assert (reply.request, reply.epoch, wire.unpack_answer(reply.answers[1], bytes)) == (3, 2, b"\1\0")
    again, empty = reply.news
    assert (again.claim, wire.unpack_found(again.found), again.check(found)) == (7, found, ([3, 9, 1], [1, 1, 2**40]))
    assert (empty.refusal, empty.good_for, len(empty.slots)) == (Outcome.NO_SLOT, 0.05, 0)
    grant, none, empty_grant = wire.unpack_grants(reply.answers[0], num_wanted=[3, 1, 2], num_slots=6)
    assert (grant, none, empty_grant) == (granted, None, nothing_free)
    assert wire.unpack_grants(Raw(packed(wire.pack_grants([None, None]))), [1, 1], 6) == [None, None]


@given(st.lists(child, max_size=8, unique_by=lambda each: each.chain_hash))
def test_children_come_out_as_they_went_in(children: list[ChildBlock]) -> None:
    told = news_of(7, found := Attribution(2, miss=2), None, 0.0, [], [], children)
    (news,) = unpack_reply(body_of(wire.pack_reply(0, 0, [], [told]))).news
    assert news.check(found) == ([], [])
    assert list(news.children) == children
    assert all(isinstance(each, ChildBlock) for each in news.children)


@pytest.mark.parametrize(
    ("children", "why"),
    [
        (None, "Expected `array`"),
        ({}, "Expected `array`"),
        (b"", "Expected `array`"),
        ([[bytes([n]) * 32, b"\1\0\0\0"] for n in range(9)], "length <= 8"),
        ([[b"n" * 31, b"\1\0\0\0"]], "not names"),
        ([["n" * 32, b"\1\0\0\0"]], "Expected `bytes`|malformed|encoding"),
        ([[b"n" * 32, b"\1\0\0"]], "not names and the tokens of a block"),
        ([[b"n" * 32, "text"]], "Expected `bytes`|malformed|encoding"),
        ([[b"n" * 32, [1]]], "Expected `bytes`"),
        ([[b"n" * 32, bytes(4 << 20) + bytes(4)]], "not names and the tokens of a block"),
        ([[b"n" * 32, b""]], "no tokens"),
        ([[b"n" * 32, b"\1\0\0\0"], [b"n" * 32, b"\2\0\0\0"]], "repeated"),
        ([[b"n" * 32]], "length 2"),
        ([[b"n" * 32, b"\1\0\0\0", 1]], "length 2"),
        ([7], "Expected `array`"),
    ],
)  # fmt: skip
def test_children_that_are_none(children: object, why: str) -> None:
    """FAULTS 39."""
    nothing = Attribution(1, miss=1)
    body = packed([0, 0, [], [[7, wire.pack_found(nothing), None, 0.0, b"", b"", children, None]]])
    with pytest.raises(FormatError, match=why):
        unpack_reply(body).news[0].check(nothing)


def test_of_many_children_those_that_fit_are_sent() -> None:
    large, nothing = [ChildBlock(bytes([n]) * 32, bytes(16 << 10)) for n in range(8)], Attribution(1, miss=1)

    def told() -> list[wire.News]:
        return [news_of(n, nothing, None, 0.0, [], [], large[:1] if n in (3, 4) else large) for n in range(20)]

    reply = unpack_reply(body_of(wire.pack_reply(0, 0, [], told())))
    assert [each.claim for each in reply.news] == list(range(20))  # told of all claims …
    assert (
        sum(len(each.children) for each in reply.news) * (16 << 10) <= wire.MAX_CHILDREN_BYTES
    )  # … not of all children
    assert [len(each.children) for each in reply.news[:10]] == [8, 8, 8, 1, 1, 8, 8, 8, 8, 0]
    without = unpack_reply(body_of(wire.pack_reply(0, 0, [], told(), room=0)))
    assert not any(each.children for each in without.news)


def sealed(body: bytes) -> list[tuple[int, list[bytes]]]:
    """What the one seal of a request says is filled."""
    _, [seal] = unpack_request(body)
    assert isinstance(seal, wire.Seal)
    return seal.filled()


def wanted_of(body: bytes) -> list[Wanted]:
    """What the one reservation of a request is for."""
    _, [reserve] = unpack_request(body)
    assert isinstance(reserve, wire.Reserve)
    return reserve.wanted()


def test_a_seal_of_tokens_that_no_block_has() -> None:
    for tokens in (b"\1\0\0", bytes(4 << 20) + bytes(4), "text", None):
        with pytest.raises(FormatError, match=r"tokens|bytes"):
            sealed(packed([0, [[6, 1, [1], [1], [tokens]]]]))


@pytest.mark.parametrize(
    ("reservations", "counts"), [([1], [2]), ([1, 2], [1]), ([1], [0]), ([], []), ([1, 2], [1, 1])]
)
def test_a_seal_that_does_not_say_whose_its_tokens_are(reservations: list[int], counts: list[int]) -> None:
    """FAULTS 39."""
    with pytest.raises(FormatError, match="counts are not those"):
        sealed(packed([0, [[6, 1, reservations, counts, [b"\1\0\0\0"]]]]))


@pytest.mark.parametrize(
    ("counts", "names", "parents", "tenants", "tails", "why"),
    [
        ([2], 1, 1, 1, [], "1 names, 2 are wanted"),
        ([1, 1], 3, 2, 2, [], "3 names, 2 are wanted"),
        ([1, 1], 2, 1, 2, [], "lengths"),
        ([1, 1], 2, 2, 3, [], "lengths"),
        ([1, 1], 2, 2, 2, [2], "out of range"),
        ([1, 1], 2, 2, 2, [-1], "Expected `int` >= 0"),
        ([1, -1], 0, 2, 2, [], "not all in"),
        ([1 << 18], 1, 1, 1, [], "not all in"),
    ],
)  # fmt: skip
def test_columns_of_a_reserve_that_do_not_fit(
    counts: list[int], names: int, parents: int, tenants: int, tails: list[int], why: str
) -> None:
    """FAULTS 39."""
    columns = [array("q", counts).tobytes(), *(bytes(32 * count) for count in (names, parents, tenants))]
    with pytest.raises(FormatError, match=why):
        wanted_of(packed([0, [[5, 1, *columns, tails]]]))


@given(st.lists(operation, max_size=6))
def test_what_is_sent_together_does_what_it_did_apart(operations: list[Any]) -> None:
    """Seals, ends of leases and the like are put into one operation each: the daemon does the same for them."""

    def each_alone(operations: list[Any]) -> list[Any]:
        alone: list[Any] = []
        for operation in operations:
            match operation:
                case wire.Seal(epoch, reservations, counts, tokens):
                    left = iter(tokens)
                    for reservation, count in zip(reservations, counts, strict=True):
                        alone.append(wire.Seal(epoch, [reservation], [count], [next(left) for _ in range(count)]))
                case wire.Abandon(reason, reservations):
                    alone += [wire.Abandon(reason, [number]) for number in reservations]
                case wire.Cancel(numbers) | wire.Release(numbers):
                    alone += [type(operation)([number]) for number in numbers]
                case _:
                    alone.append(operation)
        return alone

    apart, together = each_alone(operations), list[Any]()
    for operation in each_alone(operations):
        if not (together and wire.coalesce(together[-1], operation, 3)):
            together.append(operation)
    assert each_alone(together) == apart
    assert len(together) <= len(apart)
    of_a_kind = (wire.Seal, wire.Abandon, wire.Cancel, wire.Release)
    assert all(
        len(astuple(each)[-1]) <= 3 or len(each_alone([each])) == 1 for each in together if isinstance(each, of_a_kind)
    )


@pytest.mark.parametrize(
    ("num_wanted", "num_slots", "why"),
    [
        ([2, 3], 6, "not requested"),
        ([2, 2], 6, "not all in"),
        ([3, 3], 5, "not all in"),
        ([3], 6, "grants for 2, 1 are wanted"),
    ],
)
def test_a_grant_outside_the_request(num_wanted: list[int], num_slots: int, why: str) -> None:
    grant = ([0, 2], [4, 5], [1, 9])
    with pytest.raises(FormatError, match=why):
        wire.unpack_grants(Raw(packed(wire.pack_grants([grant, grant]))), num_wanted, num_slots)


@given(anything)
def test_any_value_is_a_grant_or_a_format_error(value: Any) -> None:
    try:
        wire.unpack_grants(Raw(packed(value)), [1, 2], 8)
    except FormatError:
        return


@given(st.lists(operation, min_size=1, max_size=3), st.lists(st.integers(1, 50), min_size=1))
def test_frames_cut_anywhere(operations: list[Any], cuts: list[int]) -> None:
    stream = b"".join(wire.pack_request(n, [each]) for n, each in enumerate(operations))
    reader, bodies, at = wire.FrameReader(wire.MAX_FRAME), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        bodies += reader.feed(stream[at : at + size])
        at += size
    assert [unpack_request(body) for body in bodies] == [(n, [each]) for n, each in enumerate(operations)]


@settings(max_examples=brief(60, 300))
@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_format_error(stream: bytes) -> None:
    try:
        wire.FrameReader(wire.MAX_HELLO).feed(stream)
    except FormatError:
        return


@settings(max_examples=brief(60, 300))
@given(anything)
def test_any_value_is_a_message_or_a_format_error(value: Any) -> None:
    body = packed(value)
    for unpack in (wire.unpack_handshake, wire.unpack_handshake_reply, unpack_request, unpack_reply):
        try:
            unpack(body)
        except FormatError:
            continue


@settings(max_examples=brief(60, 300))
@given(st.lists(operation, min_size=1, max_size=2), st.data())
def test_a_flipped_byte_is_another_message_or_a_format_error(operations: list[Any], data: st.DataObject) -> None:
    frame = bytearray(wire.pack_request(1, operations))
    at = data.draw(st.integers(4, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        for body in wire.FrameReader(wire.MAX_FRAME).feed(bytes(frame)):
            unpack_request(body)
    except FormatError:
        return


def test_a_length_is_refused_before_anything_is_allocated() -> None:
    """FAULTS 32, 39."""
    tracemalloc.start()
    for size in (0, wire.MAX_HELLO + 1, 1 << 30, 0xFFFFFFFF):
        with pytest.raises(FormatError, match=f"frame of {size} bytes: this side takes 1 to {wire.MAX_HELLO}"):
            wire.FrameReader(wire.MAX_HELLO).feed(size.to_bytes(4, "little") + b"\xc0")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xdd\x7f\xff\xff\xff",  # an array of two thousand million
        b"\xdf\x7f\xff\xff\xff",  # a map of as many
        b"\xc6\x7f\xff\xff\xff",  # bytes of as many
        b"\xdc" + (wire.MAX_ITEMS + 1).to_bytes(2, "big") + b"\xc0" * (wire.MAX_ITEMS + 1),
        b"\xdc\x10\x00" * 5000,  # arrays in arrays, each of which claims to have 4,096 items
        b"\xc7\x00\x05",  # an extension
        b"\x81\x01\x02",  # a map: there are none
        b"\xc1",  # nothing msgpack knows
        b"",
    ],
)
def test_what_claims_to_be_large_stays_small(hostile: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = hostile.ljust(1, b"\xc1")
    with pytest.raises(FormatError):
        unpack_request(wire.FrameReader(wire.MAX_FRAME).feed(len(body).to_bytes(4, "little") + body)[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_nothing_is_packed_that_no_reader_takes() -> None:
    with pytest.raises(ValueError, match="at most"):
        wire.pack_frame(bytes(wire.MAX_FRAME))


# What a step says to the daemon and is answered: one message for all its stores, never with too many items.


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
        patch.setattr(wire, "MAX_ITEMS", most)
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
        told = wire.unpack_grants(
            Raw(encode(wire.pack_grants(grants))), [n or 0 if granted is counts else 1 for n in granted], 64
        )
        assert told == grants

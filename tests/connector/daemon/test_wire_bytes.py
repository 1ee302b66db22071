"""Each message's bytes, as version 10 of the protocol has them: two builds of it understand each other."""

from typing import Any, Final

import numpy as np
import pytest
from msgspec.structs import replace
from service_rig import body_of, news_of, unpack_request

from kvtier.connector.daemon import wire
from kvtier.tiers.errors import FormatError
from kvtier.tiers.hierarchy.cache_tiers import Attribution, Overlap, SplitPoint, Wanted
from kvtier.tiers.reuse import Hint, RequestEnd
from kvtier.tiers.tier import ChildBlock, Outcome

A, B, P, T = (letter * 32 for letter in (b"a", b"b", b"p", b"t"))  # two names, a parent, a tenant
a, b, p, t = (each.hex() for each in (A, B, P, T))
c, i = (b"c" * 16).hex(), (b"i" * 16).hex()
header = "a6" + b"kvtier".hex() + "0a"
one = (1).to_bytes(8, "little").hex()
two = (2).to_bytes(8, "little").hex()

HELLO = wire.Hello(b"f" * 32, 16, 4096, 1 << 34, reset=False)

# Each operation alone in request 1. Those before 17 were printed by the code of kvtier 0.1.
OPERATIONS: Final = [
    (wire.Ask(7, P, 1, 16, A + B, Overlap.NONE), f"6d0000009201919700 07 c420{p} 01 10 c440{a}{b} 00"),
    (wire.Ask(7, P, 0, 16, A, Overlap.BACK), f"4d0000009201919700 07 c420{p} 00 10 c420{a} 02"),
    (wire.Renew([1, 2]), "080000009201919201 920102"),
    (wire.Cancel([3]), "070000009201919202 9103"),
    (wire.Take([4, 300]), "0a0000009201919203 9204cd012c"),
    (wire.Release([5]), "070000009201919204 9105"),
    (
        wire.Reserve.of(9, [Wanted([A, B], P, T), Wanted([A], P, T, is_partial=True)]),
        f"000100009201919705 09 c410{two}{one} c460{a}{b}{a} c440{p}{p} c440{t}{t} 9101",
    ),
    (
        wire.Seal(3, [9, 10], [1, 1], [b"\1\0\0\0", b"\2\0\0\0"]),
        "190000009201919506 03 92090a 920101 92 c40401000000 c40402000000",
    ),
    (wire.Abandon(Outcome.ABORTED, [9, 10]), "100000009201919307 a761626f72746564 92090a"),
    (wire.Computed(512, 0.25, 300), "140000009201919408 cd0200 cb3fd0000000000000 cd012c"),
    (wire.Holds(A), f"270000009201919209 c420{a}"),
    (wire.Lookup(A + B, 1.5), f"50000000920191930a c440{a}{b} cb3ff8000000000000"),
    (wire.Ended(b"c" * 16), f"17000000920191920b c410{c}"),
    (wire.Bye(), "05000000920191910c"),
    (wire.Reset(), "05000000920191910d"),
    (wire.Drain(2.0, True), "0f000000920191930e cb4000000000000000 c3"),
    (wire.Check(), "05000000920191910f"),
    (
        wire.RequestEnded.of(RequestEnd([A, B], 1, 300, Hint.TOOL, 7, True, 1.5, "r-1", 25, 0.5)),
        f"690000009201919b 10 c440{a}{b} 01 cd012c a4746f6f6c 07 c3 cb3ff8000000000000 a3722d31 19 cb3fe0000000000000",
    ),
    (wire.Preallocate(2, 0.5, 8), "100000009201919411 02 cb3fe0000000000000 08"),
    (
        wire.ReserveAt((5).to_bytes(8, "little"), wire.Reserve.of(9, [Wanted([A], P, T)])),
        f"8300000092019193 12 c4080500000000000000 9705 09 c408{one} c420{a} c420{p} c420{t} 90",
    ),
    (
        wire.RequestEnded.of(RequestEnd([A], 1, 9)),
        f"400000009201919b 10 c420{a} 01 09 a0 00 c2 cb{0:016x} a0 00 cb{0:016x}",
    ),
]


@pytest.mark.parametrize(("operation", "frame"), OPERATIONS, ids=lambda each: type(each).__name__)
def test_an_operation(operation: Any, frame: str) -> None:
    assert wire.pack_request(1, [operation]) == bytes.fromhex(frame)
    assert unpack_request(body_of(bytes.fromhex(frame))) == (1, [operation])


def test_several_operations_without_an_answer() -> None:
    assert wire.pack_request(0, [wire.Renew([1]), wire.Bye()]).hex() == "0900000092009292019101910c"


def test_a_reply() -> None:
    found = Attribution(5, l1=1, l2=2, file=1, miss=1)
    granted = wire.pack_grants([([0, 2], [4, 5], [1, 9]), None])
    followers = [ChildBlock(A, b"\1\0\0\0"), ChildBlock(B, b"\2\0\0\0" * 2)]
    news = [
        news_of(7, found, None, 0.0, [3, 9], [1, 2], followers, SplitPoint(2, 0.25)),
        news_of(8, Attribution(2, miss=2), Outcome.NO_SLOT, 0.5, [], []),
    ]
    reply = 3, 2, [granted, b"\1\0", wire.pack_found(found), True, ""], news
    columns = [(2, -1), (0, 2), (4, 5), (1, 9)]  # how many slots each has, then of all: index, slot, generation
    packed = "".join("c410" + np.array(each, "<i8").tobytes().hex() for each in columns)
    where = "980501020100000001"
    told = f"98 07 {where} c0 cb{0:016x} c410{3:02x}{0:014x}{9:02x}{0:014x} c410{1:02x}{0:014x}{2:02x}{0:014x}"
    children = f"92 92c420{a}c40401000000 92c420{b}c4080200000002000000 92 02 cb3fd0000000000000"
    nothing = "98 08 980200000000000002 a7 6e6f5f736c6f74 cb3fe0000000000000 c400 c400 90 c0"
    expected = bytes.fromhex(f"1a010000 94 03 02 95 94{packed} c4020100 {where} c3 a0 92 {told} {children} {nothing}")
    assert wire.pack_reply(*reply) == expected


@pytest.mark.parametrize(
    ("said", "frame"),
    [
        (
            replace(HELLO, reset=True, about=(("dtype", "fp16"),), lossy="fp8", kv_probe=b"kv"),
            f"9c{header}a548656c6c6fc420{'66' * 32}10cd1000cf{1 << 34:016x}c3 91 92 a56474797065 a466703136 a3667038"
            " c4026b76 c3",
        ),
        (
            replace(HELLO, takes_parts=False),
            f"9c{header}a548656c6c6fc420{'66' * 32}10cd1000cf{1 << 34:016x}c2 90 c0 c0 c2",
        ),
        (wire.Join(b"c" * 16), f"94{header}a44a6f696ec410{c}"),
        (
            wire.Welcome(b"c" * 16, b"i" * 16, 8, 4096, 3, True, 60.0),
            f"9a{header}a757656c636f6d65c410{c}c410{i}08cd100003c3cb404e000000000000",
        ),
        (wire.Joined(), f"93{header}a64a6f696e6564"),
        (wire.Refused("no room", True), f"95{header}a752656675736564a76e6f20726f6f6dc3"),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_the_first_frame(said: Any, frame: str) -> None:
    unpack = wire.unpack_handshake if isinstance(said, wire.Hello | wire.Join) else wire.unpack_handshake_reply
    body = bytes.fromhex(frame)
    assert wire.pack_handshake(said) == len(body).to_bytes(4, "little") + body
    assert unpack(body_of(wire.pack_handshake(said))) == said


def test_an_offer_of_what_may_find_no_room() -> None:
    offer = wire.Offer.of(9, [Wanted([A], P, T), Wanted([B], A, T, is_rest=True)], keeps=True)
    frame = wire.pack_request(1, [offer])
    assert frame[4:] == bytes.fromhex(f"92 01 91 99 13 09 c410{one}{one} c440{a}{b} c440{p}{a} c440{t}{t} 90 9101 c3")
    assert unpack_request(body_of(frame)) == (1, [offer])
    assert [each.is_rest for each in offer.wanted()] == [False, True]
    with pytest.raises(FormatError, match="out of range"):
        replace(offer, rest=[2]).wanted()


def test_a_request_says_what_is_traced_if_anything_is() -> None:
    span = f"00-{'ab' * 16}-{'cd' * 8}-01"
    frame = wire.pack_request(1, [wire.Cancel([3])], [(7, span)])
    assert frame[4:] == bytes.fromhex(f"93 01 91 9202 9103 91 92 07 d937 {span.encode().hex()}")
    (read,) = wire.FrameReader(wire.MAX_FRAME, wire.REQUESTS).feed(frame)
    assert read.traces == [(7, span)]
    for wrong in (f"00-{'ab' * 16}-{'cd' * 8}-01\n", f"01-{'ab' * 16}-{'cd' * 8}-01", "a prompt"):
        with pytest.raises(FormatError):
            wire.FrameReader(wire.MAX_FRAME, wire.REQUESTS).feed(wire.pack_request(1, [wire.Cancel([3])], [(7, wrong)]))


def test_a_reply_says_which_slots_are_preallocated_if_any_are() -> None:
    frame = wire.pack_reply(3, 2, [], [], preallocated=(1, 0.5, b"\5" + bytes(7), b"\1" + bytes(7)))
    assert frame[4:] == bytes.fromhex(
        "95 03 02 90 90 94 01 cb3fe0000000000000 c4080500000000000000 c4080100000000000000"
    )
    (read,) = wire.FrameReader(wire.MAX_FRAME, wire.REPLIES).feed(frame)
    assert read.preallocated is not None
    assert wire.unpack_preallocated(read.preallocated, 6) == [(5, 1)]
    for slots, generations in ((b"\6" + bytes(7), bytes(8)), (bytes(16), bytes(8)), (bytes(3), bytes(3))):
        with pytest.raises(FormatError):
            wire.unpack_preallocated((1, 0.5, slots, generations), 6)

"""The daemon's wire: frames of u32 length ‖ msgpack, cut from a stream, and the messages in them, field by field.

A client's frame is `[number, [operation, …]]`, an operation `[code, *fields]`; the daemon's is
`[number, epoch, answers, news]`. Every field is checked when it is decoded. docs/format.md has them one by one.
"""

import struct
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvtier.connector.daemon.messages import (
    Abandon,
    Ask,
    Bye,
    Cancel,
    Check,
    Computed,
    Drain,
    Ended,
    Granted,
    Holds,
    Lookup,
    News,
    Operation,
    Release,
    Renew,
    Reply,
    Reserve,
    Reset,
    Seal,
    Take,
)
from kvtier.tiers import TIERS, ChainHash, ChildBlock, FormatError, Outcome
from kvtier.tiers.hierarchy import Attribution, Ends, Meeting, Wanted
from kvtier.tiers.pool import MAX_CHILDREN

P = ParamSpec("P")
T = TypeVar("T")

MAX_HELLO: Final = 4 << 10  # bytes of a frame from a client that has not said yet who it is
MAX_FRAME: Final = 16 << 20  # bytes of any other
MAX_ITEMS: Final = 4096  # of one array: a decoder makes room for as many as an array claims to have
MAX_HASHES: Final = 1 << 17  # names in one message
MAX_CHILDREN_BYTES: Final = 1 << 20  # of the tokens of children that a client is told at once
MAX_TEXT: Final = 1024  # bytes of one text
ID_BYTES: Final = 16  # of the random names of clients and of a namespace's opening

_LENGTH: Final = struct.Struct("<I")
_HASH_BYTES: Final = 32
_MAX_SLOTS: Final = 1 << 32
_MAX_BLOCK_SIZE: Final = 1 << 20  # tokens
_NONE: Final = np.empty(0, np.int64)


class FrameReader:
    """Cuts a stream of bytes into frames. Holds less than `limit` bytes besides what it was last fed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes of one frame; may be changed between two calls of `feed`
        self._rest = bytearray()  # of the frame that is not whole yet
        self.num_waiting = 0  # bytes of it

    def feed(self, data: bytes) -> list[Any]:
        """The bodies of the frames that these bytes complete, decoded.

        Raises FormatError for a length over the limit, as soon as its four bytes are there, and for what is no msgpack.
        """
        stream: bytes | bytearray = data
        if self._rest:
            self._rest += data
            stream = self._rest
        bodies, at = [], 0
        while len(stream) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(stream, at)
            if not 0 < size <= self.limit:
                raise FormatError(f"frame of {size} bytes: this side takes 1 to {self.limit}")
            end = at + _LENGTH.size + size
            if end > len(stream):
                break
            bodies.append(_unpack(stream[at + _LENGTH.size : end]))
            at = end
        if at or stream is data:
            self._rest = bytearray(stream[at:])
        self.num_waiting = len(self._rest)
        return bodies


def pack_frame(body: object) -> bytes:
    """One frame. ValueError if it would be longer than any reader takes."""
    packed: bytes = msgpack.packb(body)
    if len(packed) > MAX_FRAME:
        raise ValueError(f"frame of {len(packed)} bytes: at most {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


def _unpack(body: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(
            body,
            max_array_len=MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=MAX_TEXT,
            strict_map_key=True,
            ext_hook=_no_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"frame of {len(body)} bytes: not msgpack within bounds ({error!s:.80})") from None


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


# messages


def decoded(decode: Callable[P, T]) -> Callable[P, T]:
    """Decorator of what decodes a body: whatever is wrong with that is a FormatError."""

    @wraps(decode)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return decode(*args, **kwargs)
        except FormatError:
            raise
        except (ValueError, TypeError, LookupError, AssertionError) as error:
            raise FormatError(f"not a message of this version: {error}") from None

    return checked


def pack_request(request: int, operations: Sequence[Operation]) -> bytes:
    """A client's frame. `request` is 0 if nobody waits for an answer."""
    packed = []
    for each in operations:
        row = _BY_MESSAGE[type(each)]
        packed.append([row.code, *(each if row.pack is None else row.pack(each))])
    return pack_frame([request, packed])


@decoded
def unpack_request(body: Any) -> tuple[int, list[Operation]]:
    request, operations = body
    codes = numbers([code for code, *_ in operations])
    return number(request), [
        _BY_CODE[code].unpack(*fields) for code, (_, *fields) in zip(codes, operations, strict=True)
    ]


def pack_reply(reply: Reply, room: int = MAX_CHILDREN_BYTES) -> bytes:
    """The daemon's frame. Of a claim whose children's tokens take more than what is left of `room`, none are told."""
    news = []
    for each in reply.news:
        if each.children:
            num_bytes = sum(len(child.tokens) for child in each.children)
            each = each if num_bytes <= room else each._replace(children=())
            room -= num_bytes if each.children else 0
        news.append(_pack_news(each))
    return pack_frame([reply.request, reply.epoch, reply.answers, news])


@decoded
def unpack_reply(body: Any) -> Reply:
    """Inverse of `pack_reply`; the answers stay as they are until the caller unpacks them."""
    request, epoch, answers, news = body
    if type(answers) is not list:
        raise FormatError("answers are not a list")
    return Reply(number(request), number(epoch), answers, [_unpack_news(fields) for fields in news])


def pack_grants(grants: Sequence[Granted | None]) -> list[bytes]:
    """The answer to a `Reserve`: how many slots each `Wanted` has, or -1, then the columns of all of them in a row."""
    counts = np.array([-1 if grant is None else len(grant.slots) for grant in grants], np.int64)
    granted = [grant for grant in grants if grant is not None]
    columns = [np.concatenate(column) if granted else _NONE for column in zip(*granted, strict=True)] or [_NONE] * 3
    return [pack_numbers(column) for column in (counts, *columns)]


@decoded
def unpack_grants(answer: Any, num_wanted: Sequence[int], num_slots: int) -> list[Granted | None]:
    """Inverse of `pack_grants`, for `Wanted` of so many hashes each and a region of `num_slots`."""
    counts, *columns = answer
    how_many = (unpack_numbers(counts, 1 << 32, least=-1)).tolist()
    most = max(num_wanted, default=0)
    indices, slots, generations = map(unpack_numbers, columns, (most, num_slots, 1 << 62))
    if not len(indices) == len(slots) == len(generations) == sum(n for n in how_many if n > 0):
        raise FormatError("a grant's columns differ in length")
    grants: list[Granted | None] = []
    first = 0
    for count, wanted in zip(how_many, num_wanted, strict=True):
        end = first + max(0, count)
        if count > 0 and not int(indices[first:end].max()) < wanted:
            raise FormatError("a slot for a block that nobody asked for")
        grants.append(None if count < 0 else Granted(indices[first:end], slots[first:end], generations[first:end]))
        first = end
    return grants


def pack_found(found: Attribution) -> list[int]:
    """Blocks, then how many of them in each tier of the table, nearest first, then the misses."""
    return [found.blocks, *(found.by_tier.get(tier, 0) for tier in TIERS), found.miss]


def unpack_found(found: Any) -> Attribution:
    blocks, *counts, miss = numbers(found)
    if len(counts) != len(TIERS):
        raise FormatError(f"counts of {len(counts)} tiers, there are {len(TIERS)}: run one kvtier on both sides")
    return Attribution(blocks, miss=miss, **dict(zip(TIERS, counts, strict=True)))


def _pack_news(news: News) -> list[Any]:
    refusal = None if news.refusal is None else str(news.refusal)
    slots, generations = pack_numbers(news.slots), pack_numbers(news.generations)
    return [news.claim, pack_found(news.found), refusal, news.good_for, slots, generations, news.children, news.meeting]


def _unpack_news(fields: Any) -> News:
    claim, where, refusal, good_for, slots, generations, children, meeting = fields
    found = unpack_found(where)
    why = None if refusal is None else Outcome(text(refusal))
    places = unpack_numbers(slots, _MAX_SLOTS), unpack_numbers(generations, 1 << 62)
    if len(places[0]) != len(places[1]) or len(places[0]) > found.loadable:
        raise FormatError("more blocks promised than found, or columns of different lengths")
    told = unpack_children(children), _unpack_meeting(meeting, found)
    return News(number(claim), found, why, seconds(good_for), *places, *told)


def unpack_children(told: Any) -> Sequence[ChildBlock]:
    """Held blocks by name and tokens: at most eight, each another one and with a token or more."""
    if type(told) is not list or len(told) > MAX_CHILDREN:
        raise FormatError(f"children: not a list of at most {MAX_CHILDREN}")
    if not told:
        return ()
    children = [ChildBlock(octets(name, _HASH_BYTES), octets_of_tokens(tokens)) for name, tokens in told]
    if len({child.chain_hash for child in children}) < len(children) or not all(child.tokens for child in children):
        raise FormatError("children: one comes twice, or has no tokens")
    return children


def _unpack_meeting(meeting: Any, found: Attribution) -> Meeting | None:
    """Nil, or a block that was found and is not the first of them, and a time."""
    if meeting is None:
        return None
    block, planned = meeting
    if not 0 < number(block) < found.blocks - found.miss:
        raise FormatError(f"both ends meet at block {block} of {found.blocks - found.miss}")
    return Meeting(block, seconds(planned))


def _ask(claim: Any, parent: Any, num_l1: Any, block_size: Any, hashes: Any, ends: Any) -> Ask:
    names, size = unpack_hashes(hashes), number(block_size, _MAX_BLOCK_SIZE)
    return Ask(number(claim), octets(parent, 32), number(num_l1, len(names) + 1), size, names, Ends(number(ends)))


def _wanted(hashes: Any, parent: Any, tenant: Any, is_tail: Any) -> Wanted:
    return Wanted(unpack_hashes(hashes), octets(parent, 32), octets(tenant, 32), flag(is_tail))


def _seal(reservation: Any, epoch: Any, tokens: Any) -> Seal:
    if type(tokens) is not list:
        raise FormatError("tokens are not a list of bytes")
    return Seal(number(reservation), number(epoch), [octets_of_tokens(each) for each in tokens])


class OperationRow(NamedTuple):
    """One operation on the wire: `[code, *fields]`."""

    code: int  # never given to another operation within a version of the protocol
    message: type[Operation]
    pack: Callable[[Any], Sequence[Any]] | None  # a message's fields on the wire; None: they go as they are
    unpack: Callable[..., Operation]  # inverse of `pack`, which checks every field


OPERATIONS: Final = (
    OperationRow(0, Ask, lambda op: [*op[:4], pack_hashes(op.hashes), int(op.ends)], _ask),
    OperationRow(1, Renew, None, lambda claims: Renew(numbers(claims))),
    OperationRow(2, Cancel, None, lambda claims: Cancel(numbers(claims))),
    OperationRow(3, Take, None, lambda claims: Take(numbers(claims))),
    OperationRow(4, Release, None, lambda leases: Release(numbers(leases))),
    OperationRow(
        5,
        Reserve,
        lambda op: [op.first, [[pack_hashes(w.hashes), w.parent, w.tenant, w.is_tail] for w in op.wanted]],
        lambda first, wanted: Reserve(number(first), [_wanted(*fields) for fields in wanted]),
    ),
    OperationRow(6, Seal, None, _seal),
    OperationRow(7, Abandon, None, lambda reservation, reason: Abandon(number(reservation), Outcome(text(reason)))),
    OperationRow(
        8,
        Computed,
        None,
        lambda num_tokens, spent, position: Computed(number(num_tokens), seconds(spent), number(position)),
    ),
    OperationRow(9, Holds, lambda op: [pack_hashes(op.hashes)], lambda hashes: Holds(unpack_hashes(hashes))),
    OperationRow(
        10,
        Lookup,
        lambda op: [pack_hashes(op.hashes), op.timeout],
        lambda hashes, timeout: Lookup(unpack_hashes(hashes), seconds(timeout)),
    ),
    OperationRow(11, Ended, None, lambda client: Ended(octets(client, ID_BYTES))),
    OperationRow(12, Bye, None, Bye),
    OperationRow(13, Reset, None, Reset),
    OperationRow(14, Drain, None, lambda timeout, below: Drain(seconds(timeout), flag(below))),
    OperationRow(15, Check, None, Check),
)

_BY_CODE: Final = {row.code: row for row in OPERATIONS}
_BY_MESSAGE: Final = {row.message: row for row in OPERATIONS}


def handlers_of(owner: type) -> dict[type[Operation], Callable[..., Any]]:
    """Which of the owner's methods serves which operation: `_on_ask` serves `Ask`. Others are not in the result."""
    methods = ((row.message, getattr(owner, f"_on_{row.message.__name__.lower()}", None)) for row in OPERATIONS)
    return {message: method for message, method in methods if method is not None}


# fields


def pack_hashes(hashes: Sequence[ChainHash]) -> bytes:
    """Names back to back."""
    return b"".join(hashes)


def unpack_hashes(data: Any) -> list[ChainHash]:
    if not isinstance(data, bytes) or len(data) % _HASH_BYTES or len(data) > MAX_HASHES * _HASH_BYTES:
        raise FormatError(f"names: not {_HASH_BYTES} bytes for each of at most {MAX_HASHES}")
    hashes: list[ChainHash] = np.frombuffer(data, f"V{_HASH_BYTES}").tolist()
    return hashes


def pack_numbers(numbers: NDArray[np.int64]) -> bytes:
    """i64 little-endian, back to back."""
    return numbers.astype("<i8", copy=False).tobytes()


def unpack_numbers(data: Any, below: int, *, least: int = 0) -> NDArray[np.int64]:
    """Inverse of `pack_numbers`; each must be in [least, below)."""
    if not isinstance(data, bytes) or len(data) % 8:
        raise FormatError("numbers: not eight bytes for each")
    numbers = np.frombuffer(data, "<i8").astype(np.int64)
    if len(numbers) and not (numbers.min() >= least and numbers.max() < below):
        raise FormatError(f"numbers: not all in [{least}, {below})")
    return numbers


def number(value: Any, below: int = 1 << 63) -> int:
    """A whole number in [0, below)."""
    if type(value) is not int or not 0 <= value < below:
        raise FormatError(f"{value!r:.40}: not a whole number in [0, {below})")
    return value


def numbers(values: Any) -> list[int]:
    """A list of whole numbers in [0, 2**63), looked at in one go."""
    if type(values) is not list or not all(type(each) is int and 0 <= each < 1 << 63 for each in values):
        raise FormatError(f"{values!r:.40}: not a list of whole numbers in [0, {1 << 63})")
    return values


def seconds(value: Any) -> float:
    """A time: finite and not negative."""
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise FormatError(f"{value!r:.40}: not a time in seconds")
    return float(value)


def flag(value: Any) -> bool:
    """True or False, nothing that merely looks so."""
    if type(value) is not bool:
        raise FormatError(f"{value!r:.40}: neither true nor false")
    return value


def octets(value: Any, length: int) -> bytes:
    """Exactly `length` bytes."""
    if type(value) is not bytes or len(value) != length:
        raise FormatError(f"not {length} bytes: {value!r:.40}")
    return value


def octets_of_tokens(value: Any) -> bytes:
    """Whole tokens of a block, or none: u32 little-endian each."""
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * _MAX_BLOCK_SIZE:
        raise FormatError(f"not the tokens of a block: {value!r:.40}")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise FormatError(f"not a text: {value!r:.40}")
    return value

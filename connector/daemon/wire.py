"""The daemon's wire: frames of u32 length ‖ msgpack, cut from a stream, and the messages in them, field by field.

A client's frame is `[number, [operation, …]]`, an operation `[code, *fields]`; the daemon's is
`[number, epoch, answers, news]`. Every field is checked when it is decoded. docs/format.md has them one by one.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, Final, NamedTuple

import msgpack

from kvtier.connector.daemon.fields import (
    ID_BYTES,
    MAX_BLOCK_SIZE,
    MAX_HASHES,
    decoded,
    flag,
    number,
    numbers,
    octets,
    octets_of_blocks,
    octets_of_tokens,
    pack_hashes,
    pack_numbers,
    seconds,
    text,
    unpack_hashes,
    unpack_numbers,
)
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
    RequestEnded,
    Reserve,
    Reset,
    Seal,
    Take,
)
from kvtier.connector.daemon.versions import VERSION, tiers_of, tiers_with
from kvtier.tiers import ChildBlock, FormatError, Outcome
from kvtier.tiers.hierarchy import Attribution, Ends, Meeting, Wanted
from kvtier.tiers.pool import MAX_CHILDREN
from kvtier.tiers.reuse import Hint, RequestEnd

MAX_HELLO: Final = 8 << 10  # bytes of a frame from a client that has not said yet who it is
MAX_ENDED: Final = 512  # names of an ended request, its last ones
MAX_REQUEST_ID: Final = 256  # characters
MAX_FRAME: Final = 16 << 20  # bytes of any other
MAX_ITEMS: Final = 4096  # of one array: a decoder makes room for as many as an array claims to have
MAX_CHILDREN_BYTES: Final = 1 << 20  # of the tokens of children that a client is told at once
MAX_TEXT: Final = 1024  # bytes of one text

_LENGTH: Final = struct.Struct("<I")
_HASH_BYTES: Final = 32
_MAX_SLOTS: Final = 1 << 32
_MAX_FOUND: Final = 1024  # answers of which the decoded form is kept: it is the same for most of a client's requests


class FrameReader:
    """Cuts a stream of bytes into frames. Holds less than `limit` bytes besides what it was last fed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes of one frame; may be changed between two calls of `feed`
        self._rest = bytearray()  # of the frame that is not whole yet
        self.num_waiting = 0  # bytes of it

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """The bodies of the frames that these bytes complete, decoded; nothing of `data` is kept.

        Raises FormatError for a length over the limit, as soon as its four bytes are there, and for what is no msgpack.
        """
        if self._rest:
            self._rest += data
        stream = memoryview(self._rest or data)
        bodies, at, size = [], 0, len(stream)
        while size - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(stream, at)
            if not 0 < length <= self.limit:
                raise FormatError(f"frame of {length} bytes: this side takes 1 to {self.limit}")
            end = at + _LENGTH.size + length
            if end > size:
                break
            bodies.append(_unpack(stream[at + _LENGTH.size : end]))
            at = end
        if at or not self._rest:
            self._rest = bytearray(stream[at:])
        self.num_waiting = len(self._rest)
        return bodies


def pack_frame(body: object) -> bytes:
    """One frame. ValueError if it would be longer than any reader takes."""
    packed: bytes = msgpack.packb(body)
    if len(packed) > MAX_FRAME:
        raise ValueError(f"frame of {len(packed)} bytes: at most {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


def _unpack(body: memoryview) -> Any:
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


def pack_request(request: int, operations: Sequence[Operation]) -> bytes:
    """A client's frame. `request` is 0 if nobody waits for an answer."""
    packed = []
    for each in operations:
        row = _BY_MESSAGE[type(each)]
        packed.append([row.code, *(each if row.pack is None else row.pack(each))])
    return pack_frame([request, packed])


@decoded
def unpack_request(body: Any) -> tuple[int, list[Operation]]:
    request, packed = body
    operations = []
    for code, *fields in packed:
        if type(code) is not int:  # true would be 1
            raise FormatError(f"{code!r:.40}: not an operation's code")
        operations.append(_BY_CODE[code].unpack(*fields))
    return number(request), operations


def pack_reply(reply: Reply, room: int = MAX_CHILDREN_BYTES, version: int = VERSION) -> bytes:
    """The daemon's frame. Of a claim whose children's tokens take more than what is left of `room`, none are told."""
    news = []
    for each in reply.news:
        if each.children:
            num_bytes = sum(len(child.tokens) for child in each.children)
            each = each if num_bytes <= room else each._replace(children=())
            room -= num_bytes if each.children else 0
        news.append(_pack_news(each, version))
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
    counts, made = [-1 if grant is None else len(grant[0]) for grant in grants], [grant for grant in grants if grant]
    columns = [[each for grant in made for each in grant[column]] for column in range(3)]
    return [pack_numbers(column) for column in (counts, *columns)]


@decoded
def unpack_grants(answer: Any, num_wanted: Sequence[int], num_slots: int) -> list[Granted | None]:
    """Inverse of `pack_grants`, for `Wanted` of so many hashes each and a region of `num_slots`."""
    counts, *columns = answer
    how_many = unpack_numbers(counts, 1 << 32, least=-1)
    most = max(num_wanted, default=0)
    indices, slots, generations = map(unpack_numbers, columns, (most, num_slots, 1 << 62))
    if not len(indices) == len(slots) == len(generations) == sum(n for n in how_many if n > 0):
        raise FormatError("a grant's columns differ in length")
    if len(indices) == len(how_many) == len(num_wanted) and most == 1 and min(how_many) == min(num_wanted) == 1:
        return [([0], [slot], [time]) for slot, time in zip(slots, generations, strict=True)]  # a decoding step
    grants: list[Granted | None] = []
    first = 0
    for count, wanted in zip(how_many, num_wanted, strict=True):
        end = first + max(0, count)
        if count > 0 and not max(indices[first:end]) < wanted:
            raise FormatError("a slot for a block that nobody asked for")
        grants.append(None if count < 0 else (indices[first:end], slots[first:end], generations[first:end]))
        first = end
    return grants


def pack_found(found: Attribution, version: int = VERSION) -> list[int]:
    """Blocks, then how many of them in each tier of the table, nearest first, then the misses."""
    counts = [found.by_tier.get(tier, 0) for tier in tiers_of(version)]
    counts[-1] += found.blocks - found.miss - sum(counts)
    return [found.blocks, *counts, found.miss]


def unpack_found(found: Any) -> Attribution:
    return _attribution(tuple(numbers(found)))


@lru_cache(_MAX_FOUND)
def _attribution(found: tuple[int, ...]) -> Attribution:
    blocks, *counts, miss = found
    return Attribution(blocks, miss=miss, **dict(zip(tiers_with(len(counts)), counts, strict=True)))


def _pack_news(news: News, version: int) -> list[Any]:
    refusal = None if news.refusal is None else str(news.refusal)
    slots, generations = pack_numbers(news.slots), pack_numbers(news.generations)
    found = pack_found(news.found, version)
    return [news.claim, found, refusal, news.good_for, slots, generations, news.children, news.meeting]


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
    names, size = unpack_hashes(hashes), number(block_size, MAX_BLOCK_SIZE)
    return Ask(number(claim), octets(parent, 32), number(num_l1, len(names) + 1), size, names, Ends(number(ends)))


def _pack_reserve(op: Reserve) -> list[Any]:
    """Column by column: a step's stores are many, and have a block each."""
    wanted = op.wanted
    return [
        op.first,
        pack_numbers([len(each.hashes) for each in wanted]),
        pack_hashes(list(chain.from_iterable([each.hashes for each in wanted]))),
        pack_hashes([each.parent for each in wanted]),
        pack_hashes([each.tenant for each in wanted]),
        [i for i, each in enumerate(wanted) if each.is_tail],
    ]


def _reserve(first: Any, counts: Any, hashes: Any, parents: Any, tenants: Any, tails: Any) -> Reserve:
    how_many, names = unpack_numbers(counts, MAX_HASHES + 1), unpack_hashes(hashes)
    if sum(how_many) != len(names):
        raise FormatError(f"reserve: {len(names)} names, {sum(how_many)} are wanted")
    are_tails = [False] * len(how_many)
    for i in numbers(tails):
        are_tails[i] = True
    starts = [0, *accumulate(how_many)]
    chains = [names[start:end] for start, end in pairwise(starts)]
    wanted = list(map(Wanted, chains, unpack_hashes(parents), unpack_hashes(tenants), are_tails))
    if not len(chains) == len(wanted) == len(tenants) // _HASH_BYTES == len(parents) // _HASH_BYTES:
        raise FormatError("reserve: columns of different lengths")
    return Reserve(number(first), wanted)


def _seal(epoch: Any, reservations: Any, counts: Any, tokens: Any) -> Seal:
    sealed = Seal(number(epoch), numbers(reservations), numbers(counts), octets_of_blocks(tokens))
    if len(sealed.counts) != len(sealed.reservations) or sum(sealed.counts) != len(tokens):
        raise FormatError("seal: the counts are not those of the reservations' blocks")
    return sealed


def _pack_end(op: RequestEnded) -> list[Any]:
    """The names that count most: a prompt continues the last of another. Names before them are left out."""
    names, num_prompt, num_output_tokens, hint, *rest, request, num_prompt_tokens, ttft = op.end
    left_out = max(0, len(names) - MAX_ENDED)
    told = pack_hashes(names[left_out:]), max(0, num_prompt - left_out), num_output_tokens
    request = request[:MAX_REQUEST_ID].encode(errors="replace").decode()  # an engine may take anything for an id
    return [*told, hint or "", *rest, request, num_prompt_tokens, ttft]


def _end(
    hashes: Any, num_prompt: Any, num_output_tokens: Any, hint: Any, client: Any, is_derived: Any, lasted: Any,
    request: Any, num_prompt_tokens: Any, ttft: Any,
) -> RequestEnded:  # fmt: skip
    names, word, request_id = unpack_hashes(hashes), text(hint), text(request)
    if len(request_id) > MAX_REQUEST_ID:
        raise FormatError(f"request ended: an id of {len(request_id)} characters, at most {MAX_REQUEST_ID} are told")
    if len(names) > MAX_ENDED:
        raise FormatError(f"request ended: {len(names)} names, at most {MAX_ENDED} are told")
    said = Hint(word) if word else None
    end = RequestEnd(
        names,
        number(num_prompt, len(names) + 1),
        number(num_output_tokens),
        said,
        number(client, 1 << 32),
        flag(is_derived),
        seconds(lasted),
        request_id,
        number(num_prompt_tokens),
        seconds(ttft),
    )
    return RequestEnded(end)


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
    OperationRow(5, Reserve, _pack_reserve, _reserve),
    OperationRow(6, Seal, None, _seal),
    OperationRow(7, Abandon, None, lambda reason, numbered: Abandon(Outcome(text(reason)), numbers(numbered))),
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
    OperationRow(16, RequestEnded, _pack_end, _end),
)

_BY_CODE: Final = {row.code: row for row in OPERATIONS}
_BY_MESSAGE: Final = {row.message: row for row in OPERATIONS}


def handlers_of(owner: type) -> dict[type[Operation], Callable[..., Any]]:
    """Which of the owner's methods serves which operation: `_on_ask` serves `Ask`. Others are not in the result."""
    methods = ((row.message, getattr(owner, f"_on_{row.message.__name__.lower()}", None)) for row in OPERATIONS)
    return {message: method for message, method in methods if method is not None}

"""The daemon's wire: frames of u32 length ‖ msgpack, and the messages in them, which msgspec decodes and checks in C.

After the handshake a client's frame is `[number, [operation, …]]`, an operation `[code, *fields]`; traces of requests
may follow. The daemon's is
`[number, epoch, answers, news]`: the client's number (0 if no answer is expected), its epoch, the answers of those
operations that have one, and news of claims. docs/format.md lists the fields.

The first frame each way is `["kvtier", version, kind, *fields]`. The version precedes everything that may change with
it. Each side accepts the versions of the two releases before its own, and answers in the version of the other's frame.
A client that is answered in a lower version uses that one.

To add an operation: its class, its place in `Operation`, and the session's method for it.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar, get_args

import numpy as np
from msgspec import Meta, Raw, Struct
from msgspec.msgpack import Decoder, Encoder, decode
from msgspec.structs import astuple, replace

from kvtier.tiers import L1, L2, TIERS, ChainHash, ChildBlock, FormatError, Outcome
from kvtier.tiers.hierarchy import Attribution, Overlap, SplitPoint, Wanted
from kvtier.tiers.naming import PROBE_BYTES
from kvtier.tiers.pool import MAX_CHILDREN
from kvtier.tiers.reuse import Hint, RequestEnd

T = TypeVar("T")

VERSION: Final = 10
OLDEST: Final = 6
RELEASES: Final = {OLDEST: "0.1", VERSION: "0.2"}
"""The release of kvtier that speaks each version."""

MAX_HELLO: Final = 8 << 10  # bytes of a frame before the handshake
MAX_FRAME: Final = 16 << 20  # bytes of any other
MAX_ITEMS: Final = 4096  # of one array
MAX_HASHES: Final = 1 << 17  # names in one message
MAX_PREALLOCATED: Final = 256  # slots of one client, …
CLIENT_SHARE: Final = 16  # … and 1/16 of L2 at most
MAX_ENDED: Final = 512  # names of a finished request, its last ones
MAX_REQUEST_ID: Final = 256  # characters
MAX_CHILDREN_BYTES: Final = 1 << 20  # of children's tokens in one reply
MAX_BLOCK_SIZE: Final = 1 << 20  # tokens
MAX_TEXT: Final = 1024  # characters of one text
ID_BYTES: Final = 16  # of the random names of clients and of a namespace's opening

_MAGIC: Final = "kvtier"
_LENGTH: Final = struct.Struct("<I")
_HASH_BYTES: Final = 32
_MAX_SLOTS: Final = 1 << 32
_MAX_FOUND: Final = 1024  # decoded answers that are cached: most requests of a client have equal ones
_FIELDS: Final[dict[int, dict[str, int]]] = {OLDEST: {"Hello": 6, "Refused": 1}}  # where fewer
_TIERS: Final[dict[int, tuple[str, ...]]] = {OLDEST: (L1, L2, "file", "redis")}  # of versions with fewer tiers

Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Numbers: TypeAlias = Annotated[list[Number], Meta(max_length=MAX_ITEMS)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Hash: TypeAlias = Annotated[bytes, Meta(min_length=_HASH_BYTES, max_length=_HASH_BYTES)]
Hashes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_HASHES * _HASH_BYTES)]  # back to back
Column: TypeAlias = bytes  # i64 little-endian, back to back
Tokens: TypeAlias = Annotated[bytes, Meta(max_length=4 * MAX_BLOCK_SIZE)]  # of a block: u32 little-endian each
Id: TypeAlias = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Found: TypeAlias = Annotated[tuple[Number, ...], Meta(max_length=64)]  # as `pack_found`
Grants: TypeAlias = tuple[Column, Column, Column, Column]  # as `pack_grants`
Offered: TypeAlias = tuple[Raw, bool]  # `Grants`, and whether some blocks found no room
Traces: TypeAlias = Annotated[
    list[tuple[Number, Annotated[str, Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\Z")]]],
    Meta(max_length=MAX_ITEMS),
]
"""Numbers of claims and reservations, and the span that each belongs to: a `traceparent` of the W3C."""
Preallocated: TypeAlias = tuple[Number, Seconds, Column, Column]
"""`round` and `at` of the `Preallocate`, more slots for this client, and their generations."""
Granted: TypeAlias = tuple[list[int], list[int], list[int]]
"""Slots reserved for one `Wanted`: for its hashes at these indices, these slots, of these generations."""


class _Message(Struct, array_like=True, forbid_unknown_fields=True):
    """Encoded as an array of its fields in order."""


# from clients


class Ask(_Message, tag=0):
    """Look up these blocks and claim those beyond the first `num_l1`. News of the claim follows."""

    claim: Number
    parent: Hash  # of the first block
    num_l1: Number
    block_size: Annotated[int, Meta(ge=0, lt=MAX_BLOCK_SIZE)]
    hashes: Hashes
    overlap: Overlap


class Renew(_Message, tag=1):
    """These claims are still in use."""

    claims: Numbers


class Cancel(_Message, tag=2):
    """These claims are cancelled."""

    claims: Numbers


class Take(_Message, tag=3):
    """These claims become leases with the same numbers."""

    claims: Numbers


class Release(_Message, tag=4):
    """The copies out of these leases have ended."""

    leases: Numbers


class Reserve(_Message, tag=5):
    """Slots for what a step stores, column by column, since a step has many stores of one block each.

    Answered by `pack_grants`. Reservations are numbered from `first`.
    """

    first: Number
    counts: Column  # names of each
    hashes: Hashes
    parents: Hashes
    tenants: Hashes
    partial: Annotated[list[Number], Meta(max_length=MAX_ITEMS)]  # indices of partial blocks

    @classmethod
    def of(cls, first: int, wanted: Sequence[Wanted]) -> "Reserve":
        return cls(
            first,
            array("q", [len(each.hashes) for each in wanted]).tobytes(),
            b"".join(chain.from_iterable([each.hashes for each in wanted])),
            b"".join([each.parent for each in wanted]),
            b"".join([each.tenant for each in wanted]),
            [i for i, each in enumerate(wanted) if each.is_partial],
        )

    def wanted(self) -> list[Wanted]:
        """Inverse of `of`. FormatError if the columns do not match."""
        counts = unpack_numbers(self.counts, MAX_HASHES + 1)
        names, num = unpack_hashes(self.hashes + self.parents + self.tenants), len(counts)
        if len(self.parents) != num * _HASH_BYTES or len(self.tenants) != num * _HASH_BYTES:
            raise FormatError("reserve: columns of different lengths")
        if sum(counts) != (num_names := len(names) - 2 * num):
            raise FormatError(f"reserve: {num_names} names, {sum(counts)} are wanted")
        if self.partial and max(self.partial) >= num:
            raise FormatError("reserve: a partial block out of range")
        chains = [names[start:end] for start, end in pairwise([0, *accumulate(counts)])]
        wanted = list(map(Wanted, chains, names[num_names:], names[num_names + num :]))
        for i in self.partial:
            wanted[i].is_partial = True
        return wanted


class Offer(Reserve, tag=19):
    """As `Reserve`, by a client that learns whether some blocks find no room. Answered by `Offered`."""

    rest: Annotated[list[Number], Meta(max_length=MAX_ITEMS)]  # indices of what is offered again
    keeps: bool  # it offers such blocks again: the daemon does not count them as dropped

    @classmethod
    def of(cls, first: int, wanted: Sequence[Wanted], *, keeps: bool = False) -> "Offer":
        as_reserve = Reserve.of(first, wanted)
        columns = as_reserve.counts, as_reserve.hashes, as_reserve.parents, as_reserve.tenants
        rest = [i for i, each in enumerate(wanted) if each.is_rest]
        return cls(first, *columns, as_reserve.partial, rest, keeps)

    def wanted(self) -> list[Wanted]:
        """Inverse of `of`. FormatError as `Reserve`."""
        wanted = Reserve.wanted(self)
        if self.rest and max(self.rest) >= len(wanted):
            raise FormatError("offer: a rest out of range")
        for i in self.rest:
            wanted[i].is_rest = True
        return wanted


class Seal(_Message, tag=6):
    """These reservations' slots are filled; `tokens` has each of their blocks in turn."""

    epoch: Number
    reservations: Numbers
    counts: Numbers  # blocks of each
    tokens: Annotated[list[Tokens], Meta(max_length=MAX_ITEMS)]

    def filled(self) -> list[tuple[int, list[bytes]]]:
        """Each reservation with its blocks' tokens. FormatError if they do not match."""
        if len(self.counts) != len(self.reservations) or sum(self.counts) != len(self.tokens):
            raise FormatError("seal: the counts are not those of the reservations' blocks")
        if any(length % 4 for length in set(map(len, self.tokens))):
            raise FormatError("seal: not the tokens of a block")
        runs = pairwise([0, *accumulate(self.counts)])
        return [(number, self.tokens[start:end]) for number, (start, end) in zip(self.reservations, runs, strict=True)]


class Abandon(_Message, tag=7):
    """These reservations' slots will not be filled; no copy into them is under way."""

    reason: Outcome
    reservations: Numbers


class Computed(_Message, tag=8):
    """A step prefilled `num_tokens` in `seconds`."""

    num_tokens: Number
    seconds: Seconds
    position: Number  # tokens before them, on average


class Holds(_Message, tag=9):
    """Which of the blocks L2 holds. Answered by a byte for each, 1 or 0."""

    hashes: Hashes


class Lookup(_Message, tag=10):
    """Where these blocks are. Answered as `News.found`, within `timeout` seconds if a tier is shared."""

    hashes: Hashes
    timeout: Seconds


class Ended(_Message, tag=11):
    """The copies of this process's former connection have ended: its slots can be released."""

    client: Id


class Bye(_Message, tag=12):
    """The client closes; none of its copies is under way."""


class Reset(_Message, tag=13):
    """Forget everything in every tier. Answered by true when done."""


class Drain(_Message, tag=14):
    """Wait for stores. Answered by whether all were written within `timeout` seconds."""

    timeout: Seconds
    below: bool


class Check(_Message, tag=15):
    """Check every conservation law. Answered by what is broken, "" if nothing is."""


class RequestEnded(_Message, tag=16):
    """A request has finished: a `RequestEnd`, with at most the last MAX_ENDED of its names."""

    hashes: Annotated[bytes, Meta(max_length=MAX_ENDED * _HASH_BYTES)]
    num_prompt: Number
    num_output_tokens: Number
    hint: Text
    client: Annotated[int, Meta(ge=0, lt=1 << 32)]
    is_derived: bool
    seconds: Seconds
    request: Annotated[str, Meta(max_length=MAX_REQUEST_ID)]
    num_prompt_tokens: Number
    ttft: Seconds

    @classmethod
    def of(cls, end: RequestEnd) -> "RequestEnded":
        """Keeps the last names, which matter most: a prompt continues the last of another's."""
        left_out = max(0, len(end.names) - MAX_ENDED)
        return cls(
            b"".join(end.names[left_out:]),
            max(0, end.num_prompt - left_out),
            end.num_output_tokens,
            end.hint or "",
            end.client,
            end.is_derived,
            end.seconds,
            end.request[:MAX_REQUEST_ID].encode(errors="replace").decode(),  # engines accept any string as an id
            end.num_prompt_tokens,
            end.ttft,
        )

    def end(self) -> RequestEnd:
        """Inverse of `of`. FormatError for more prompt names than names, or an unknown hint."""
        names = unpack_hashes(self.hashes)
        if self.num_prompt > len(names):
            raise FormatError(f"request ended: {self.num_prompt} of {len(names)} names are its prompt's")
        try:
            hint = Hint(self.hint) if self.hint else None
        except ValueError as error:
            raise FormatError(f"request ended: {error!s:.80}") from None
        return RequestEnd(names, self.num_prompt, self.num_output_tokens, hint, *astuple(self)[4:])


class Preallocate(_Message, tag=17):
    """Keep up to `most` free slots for this client's next stores, for a lease deadline, and none of former rounds."""

    round: Number  # how often it has given all of them up, and …
    at: Seconds  # … when it sends this, on its clock: the reply repeats both
    most: Annotated[int, Meta(ge=0, le=MAX_PREALLOCATED)]


class ReserveAt(_Message, tag=18):
    """As `Reserve`, of one block each, in slots that the daemon has preallocated. No answer."""

    slots: Column
    stores: Reserve


Operation: TypeAlias = (
    Ask | Renew | Cancel | Take | Release | Reserve | Seal | Abandon | Computed | Holds | Lookup | Ended | Bye | Reset
    | Drain | Check | RequestEnded | Preallocate | ReserveAt | Offer
)  # fmt: skip
OPERATIONS: Final[tuple[type[Operation], ...]] = get_args(Operation)

# Lists of an operation that may be appended to those of the previous one, and the field that must be equal for that.
_LISTS: Final[dict[type[Any], tuple[str, ...]]] = {
    Seal: ("reservations", "counts", "tokens"),
    Abandon: ("reservations",),
    Cancel: ("claims",),
    Release: ("leases",),
}
_EQUAL: Final[dict[type[Any], str]] = {Seal: "epoch", Abandon: "reason"}


def coalesce(before: Operation, operation: Operation, most: int) -> bool:
    """Append the operation to the previous one, if they are of a kind: a step ends or seals many.

    Not if one of its lists would be longer than `most`. Both must be operations without an answer.
    """
    kind = type(before)
    if kind is not type(operation) or kind not in _LISTS:
        return False
    lists = [(getattr(before, name), getattr(operation, name)) for name in _LISTS[kind]]
    if any(len(mine) + len(other) > most for mine, other in lists):
        return False
    if kind in _EQUAL and getattr(before, _EQUAL[kind]) != getattr(operation, _EQUAL[kind]):
        return False
    for mine, other in lists:
        mine.extend(other)
    return True


# from the daemon


class News(_Message):
    """The outcome of a claim, sent once: the slots of the promised blocks, none without a promise."""

    claim: Number
    found: Found
    refusal: Outcome | None
    good_for: Seconds  # before a lookup that missed may be repeated
    slots: Column
    generations: Column
    children: Annotated[Sequence[ChildBlock], Meta(max_length=MAX_CHILDREN)]  # as `Claim.children`
    split: SplitPoint | None  # as `Claim.split`

    def check(self, found: Attribution) -> tuple[list[int], list[int]]:
        """The slots and their generations. FormatError if the fields contradict each other."""
        columns, num = self.slots + self.generations, len(self.slots) // 8
        numbers = unpack_numbers(columns, 1 << 62) if columns else []
        if len(numbers) != 2 * num or num > found.loadable:
            raise FormatError("more blocks promised than found, or columns of different lengths")
        if self.children:
            check_children(self.children)
        if self.split is not None:
            block, planned = self.split
            if not 0 < block < found.blocks - found.miss or not 0 <= planned < 1e9:
                raise FormatError(f"both ends meet at block {block} of {found.blocks - found.miss}")
        return numbers[:num], numbers[num:]


class Reply(_Message):
    """A reply: answers to a request, news of claims, and the current epoch."""

    request: Number  # 0: no request
    epoch: Number
    answers: Annotated[list[Raw], Meta(max_length=MAX_ITEMS)]  # of the operations that have one, in their order
    news: Annotated[list[News], Meta(max_length=MAX_ITEMS)]
    preallocated: Preallocated | None = None


class Request(_Message):
    """A request: operations, and the number for their answers."""

    number: Number
    operations: Annotated[list[Operation], Meta(max_length=MAX_ITEMS)]
    traces: Traces | None = None  # only if requests are traced


# the handshake


class Hello(_Message):
    """A client opens the tiers of one model."""

    fingerprint: Hash
    block_size: Annotated[int, Meta(gt=0, lt=1 << 20)]  # tokens
    block_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)]
    size: Number  # bytes of L2 requested for the model; 0: a share that the daemon chooses
    reset: bool  # the daemon missed a reset: it forgets everything first
    # the fingerprint's fields, shown to users; empty: unknown
    about: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=MAX_ITEMS)] = ()
    lossy: Text | None = None  # the encoding of blocks in shared tiers (`ModelIdentity.lossy`); None: as they are
    # the KV that the model computes for a few tokens, packed; None: not computed
    kv_probe: Annotated[bytes, Meta(max_length=PROBE_BYTES)] | None = None
    takes_parts: bool = True  # promises may end inside a block: else no children are sent


class Join(_Message):
    """A worker process of a client: the client's slots are kept until this process has ended too."""

    client: Id


class Welcome(_Message):
    """The tiers are open; the region's file descriptor is attached to this frame."""

    client: Id  # the client's id
    instance: Id  # id of this opening of the tiers: equal means the same region
    num_slots: Annotated[int, Meta(ge=0, lt=_MAX_SLOTS)]
    slot_bytes: Annotated[int, Meta(ge=0, lt=1 << 40)]
    epoch: Number
    has_lower: bool
    lease_deadline: Seconds  # after which a promise without renewal expires


class Joined(_Message):
    """The daemon watches the process from now on."""


class Refused(_Message):
    """A refusal with a one-line reason."""

    why: Text
    is_other_kv: bool = False  # the namespace has the KV of another model: KVMismatch


Handshake: TypeAlias = Hello | Join
HandshakeReply: TypeAlias = Welcome | Joined | Refused


class UnspokenVersion(FormatError):
    """The other side uses a protocol version that this one does not support."""


# packing and unpacking: malformed bytes are a FormatError

_ENCODER: Final = Encoder()
_UNTRACED: Final[Traces] = []  # never mutated
REQUESTS: Final = Decoder(Request)
"""For frames after the handshake; `REPLIES` for those of the daemon."""
REPLIES: Final = Decoder(Reply)
_GRANTS: Final = Decoder(Grants)
_PARTS: Final = Decoder(Annotated[list[Raw], Meta(min_length=3, max_length=15)])  # of a handshake
_TEXTS: Final = Decoder(Text)
_VERSIONS: Final = Decoder(Annotated[int, Meta(ge=0, lt=1 << 20)])
_HANDSHAKES: Final = {kind.__name__: Decoder(kind) for kind in get_args(Handshake)}
_HANDSHAKE_REPLIES: Final = {kind.__name__: Decoder(kind) for kind in get_args(HandshakeReply)}


def pack_request(request: int, operations: list[Operation], traces: Traces = _UNTRACED) -> bytes:
    """A client's frame. `request` is 0 if no answer is expected. ValueError as `pack_frame`."""
    packed = _ENCODER.encode([request, operations, traces] if traces else [request, operations])
    if len(packed) > MAX_FRAME:
        raise ValueError(f"frame of {len(packed)} bytes: at most {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


def pack_reply(
    request: int,
    epoch: int,
    answers: list[Any],
    news: list[News],
    room: int = MAX_CHILDREN_BYTES,
    preallocated: Preallocated | None = None,
) -> bytes:
    """The daemon's frame. Children whose tokens exceed what is left of `room` are left out, claim by claim."""
    for i, each in enumerate(news):
        if each.children:
            num_bytes = sum(len(child.tokens) for child in each.children)
            if num_bytes <= room:
                room -= num_bytes
            else:
                news[i] = replace(each, children=())
    body = (request, epoch, answers, news)
    packed = _ENCODER.encode(body if preallocated is None else (*body, preallocated))
    return _LENGTH.pack(len(packed)) + packed


def unpack_answer(answer: Raw, kind: Any) -> Any:
    """Decode an answer as that type. FormatError."""
    try:
        return decode(answer, type=kind)
    except ValueError as error:
        raise _malformed(answer, error) from None


def pack_frame(body: object) -> bytes:
    """One frame. ValueError if it is longer than MAX_FRAME."""
    packed = _ENCODER.encode(body)
    if len(packed) > MAX_FRAME:
        raise ValueError(f"frame of {len(packed)} bytes: at most {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


class FrameReader(Generic[T]):
    """Splits a stream of bytes into frames, and decodes them. Buffers less than `limit` bytes."""

    def __init__(self, limit: int, decoder: "Decoder[T] | None" = None) -> None:
        """`limit`: bytes of one frame. Without a decoder `feed` returns bodies. Both may be changed between calls."""
        self.limit = limit
        self.decoder = decoder
        self._rest = bytearray()  # of the incomplete frame
        self.num_waiting = 0  # bytes of it

    def feed(self, data: bytes | memoryview) -> list[T]:
        """The frames completed by these bytes. Without a decoder: bodies, which are views valid until `data` changes.

        FormatError for a length over the limit, as soon as its four bytes are there, and for what the decoder rejects.
        Consistency between a message's fields is checked by its methods, and by the code that unpacks answers.
        """
        if self._rest:
            self._rest += data
        stream = memoryview(self._rest or data)
        found, at, size = list[Any](), 0, len(stream)
        while size - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(stream, at)
            if not 0 < length <= self.limit:
                raise FormatError(f"frame of {length} bytes: this side takes 1 to {self.limit}")
            end = at + _LENGTH.size + length
            if end > size:
                break
            body = stream[at + _LENGTH.size : end]
            try:
                found.append(body if self.decoder is None else self.decoder.decode(body))
            except (ValueError, RecursionError) as error:  # an answer may be a deeply nested array
                raise _malformed(body, error) from None
            at = end
        if at or not self._rest:
            self._rest = bytearray(stream[at:])
        self.num_waiting = size - at
        return found


def pack_handshake(handshake: Handshake | HandshakeReply, version: int = VERSION) -> bytes:
    """Its frame, without fields that the version lacks."""
    kind = type(handshake).__name__
    return pack_frame([_MAGIC, version, kind, *astuple(handshake)[: _FIELDS.get(version, {}).get(kind)]])


def version_of(body: bytes | memoryview) -> int:
    """The version of a handshake. UnspokenVersion, with both versions and what to upgrade, if it is not supported.

    FormatError if it is not a handshake.
    """
    return _parts(body)[0]


def unpack_handshake(body: bytes | memoryview) -> Handshake:
    """A client's first frame. FormatError; UnspokenVersion."""
    handshake: Handshake = _handshake(body, _HANDSHAKES)
    return handshake


def unpack_handshake_reply(body: bytes | memoryview) -> HandshakeReply:
    """The daemon's first frame. FormatError; UnspokenVersion."""
    reply: HandshakeReply = _handshake(body, _HANDSHAKE_REPLIES)
    return reply


def _handshake(body: bytes | memoryview, kinds: Mapping[str, Decoder[Any]]) -> Any:
    version, kind, fields = _parts(body)
    if kind not in kinds:
        raise FormatError(f"unknown handshake {kind!r:.40}")
    if len(fields) > _FIELDS.get(version, {}).get(kind, len(fields)):
        raise FormatError(f"{kind!r:.40}: more fields than version {version} has")
    try:
        return kinds[kind].decode(b"".join([bytes([0x90 | len(fields)]), *fields]))  # an array of these
    except ValueError as error:
        raise _malformed(body, error) from None


def _parts(body: bytes | memoryview) -> tuple[int, str, list[Raw]]:
    try:
        magic, version, kind, *fields = _PARTS.decode(body)
        if _TEXTS.decode(magic) != _MAGIC:
            raise FormatError("not a handshake of kvtier")
        spoken = _VERSIONS.decode(version)
        if spoken not in RELEASES:
            ours = f"this side speaks {OLDEST} to {VERSION} (kvtier {RELEASES[OLDEST]} to {RELEASES[VERSION]})"
            which = "this side" if spoken > VERSION else "the other side"
            raise UnspokenVersion(f"protocol version {spoken}, {ours}: upgrade {which}; daemons before their engines")
        return spoken, _TEXTS.decode(kind), fields
    except (ValueError, RecursionError) as error:  # a part may be a deeply nested array
        raise _malformed(body, error) from None


def _malformed(body: bytes | memoryview | Raw, error: Exception) -> FormatError:
    return FormatError(f"frame of {len(memoryview(body))} bytes: not a message of this version ({error!s:.160})")


# parts of messages


def unpack_hashes(data: bytes) -> list[ChainHash]:
    """Concatenated names."""
    if len(data) % _HASH_BYTES:
        raise FormatError(f"names: not {_HASH_BYTES} bytes for each")
    hashes: list[ChainHash] = np.frombuffer(data, f"V{_HASH_BYTES}").tolist()
    return hashes


def unpack_numbers(data: bytes, below: int, *, least: int = 0) -> list[int]:
    """Concatenated i64, little-endian; each must be in [least, below)."""
    if len(data) % 8:
        raise FormatError("numbers: not eight bytes for each")
    numbers = array("q", data).tolist()
    if numbers and not (min(numbers) >= least and max(numbers) < below):
        raise FormatError(f"numbers: not all in [{least}, {below})")
    return numbers


def pack_grants(grants: Sequence[Granted | None]) -> Grants:
    """The answer to a `Reserve`: the number of slots of each `Wanted`, or -1, then the concatenated columns of all."""
    counts, made = [-1 if grant is None else len(grant[0]) for grant in grants], [grant for grant in grants if grant]
    indices, slots, generations = (
        array("q", chain.from_iterable([grant[column] for grant in made])).tobytes() for column in range(3)
    )
    return array("q", counts).tobytes(), indices, slots, generations


def unpack_grants(answer: Raw, num_wanted: Sequence[int], num_slots: int) -> list[Granted | None]:
    """Inverse of `pack_grants`, for `Wanted` of so many hashes each and a region of `num_slots`. FormatError."""
    try:
        counts, *columns = _GRANTS.decode(answer)
    except ValueError as error:
        raise _malformed(answer, error) from None
    how_many, numbers = unpack_numbers(counts, 1 << 32, least=-1), unpack_numbers(b"".join(columns), 1 << 62)
    num, most = sum([n for n in how_many if n > 0]), max(num_wanted, default=0)
    if not 8 * num == len(columns[0]) == len(columns[1]) == len(columns[2]):
        raise FormatError("a grant's columns differ in length")
    indices, slots, generations = numbers[:num], numbers[num : 2 * num], numbers[2 * num :]
    if num and (max(indices) >= most or max(slots) >= num_slots):
        raise FormatError(f"a grant not all in [0, {most}) and [0, {num_slots})")
    if len(how_many) != len(num_wanted):
        raise FormatError(f"grants for {len(how_many)}, {len(num_wanted)} are wanted")
    if len(indices) == len(how_many) and most == 1 and min(how_many) == min(num_wanted) == 1:
        return [([0], [slot], [time]) for slot, time in zip(slots, generations, strict=True)]  # a decoding step
    grants: list[Granted | None] = []
    first = 0
    for count, wanted in zip(how_many, num_wanted, strict=True):
        end = first + max(0, count)
        if count > 0 and not max(indices[first:end]) < wanted:
            raise FormatError("a slot for a block that was not requested")
        grants.append(None if count < 0 else (indices[first:end], slots[first:end], generations[first:end]))
        first = end
    return grants


def unpack_preallocated(columns: Preallocated, num_slots: int) -> list[tuple[int, int]]:
    """The slots, each with its generation. FormatError."""
    _, _, slots, generations = columns
    pairs = list(zip(unpack_numbers(slots, num_slots), unpack_numbers(generations, 1 << 62), strict=False))
    if len(slots) != len(generations) or len(pairs) > MAX_PREALLOCATED:
        raise FormatError(f"preallocated slots: columns of different lengths, or more than {MAX_PREALLOCATED}")
    return pairs


def pack_found(found: Attribution, version: int = VERSION) -> tuple[int, ...]:
    """Blocks, then their number in each tier of the version's table, nearest first, then the misses.

    Blocks of tiers that a version lacks count as those of its last one.
    """
    counts = [found.by_tier.get(tier, 0) for tier in _TIERS.get(version, TIERS)]
    counts[-1] += found.blocks - found.miss - sum(counts)
    return (found.blocks, *counts, found.miss)


@lru_cache(_MAX_FOUND)
def unpack_found(found: tuple[int, ...]) -> Attribution:
    """Inverse of `pack_found`. FormatError if no version has so many tiers, or if the sum is wrong."""
    for tiers in (tuple(TIERS), *_TIERS.values()):
        if len(tiers) == len(found) - 2:
            blocks, *counts, miss = found
            try:
                return Attribution(blocks, miss=miss, **dict(zip(tiers, counts, strict=True)))
            except AssertionError as error:
                raise FormatError(str(error)) from None
    raise FormatError(f"counts of {len(found) - 2} tiers, there are {len(TIERS)}: run one kvtier on both sides")


def check_children(children: Sequence[ChildBlock]) -> None:
    """FormatError unless all differ, and each has a name and at least one token."""
    for name, tokens in children:
        if len(name) != _HASH_BYTES or len(tokens) % 4 or len(tokens) > 4 * MAX_BLOCK_SIZE:
            raise FormatError("children: not names and the tokens of a block")
    if len({name for name, _ in children}) < len(children) or not all(tokens for _, tokens in children):
        raise FormatError("children: one is repeated, or has no tokens")

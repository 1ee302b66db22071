"""KV events on the wire, in vLLM's words (docs/routing.md): batches of stored, removed and cleared blocks. No I/O."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Raw, Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple, replace

from kvtier.tiers import ChainHash, FormatError
from kvtier.tiers.naming import token_array, unpack_tokens

MAX_PAYLOAD: Final = 16 << 20  # bytes of one batch
MAX_PARTS: Final = 1 << 18  # events and arrays of extra keys in one batch: an empty one takes 64 times its byte
MAX_BLOCK_SIZE: Final = 4096  # tokens
_MAX_NAME: Final = 64  # bytes of a block's name
_MAX_KEYS: Final = 4096  # extra keys of one block
_U64: Final = 2**64 - 1
_NAMESPACE_TAG: Final = b"kvtier-namespace-v1"

ExternalHash: TypeAlias = int | bytes
"""How an engine names a block: 64 bits, signed or not, or the digest they were cut from."""

EventForm: TypeAlias = Literal["maps", "arrays"]
ExtraKeys: TypeAlias = tuple[Any, ...]
"""What besides tokens shapes one block's KV, untagged: LoRA name, (image, offset) pairs, cache salt, embeddings."""


class BlockStored(Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive blocks of one chain are in a tier; the first one's parent is None at the chain's start.

    vLLM leaves out blocks that a sliding window has passed, but not their tokens: then the numbers don't fit.
    """

    block_hashes: Sequence[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: Sequence[int]  # of all blocks, back to back
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[ExtraKeys | None] | None = None  # one entry for each block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Struct, frozen=True, omit_defaults=True, tag=True):
    block_hashes: Sequence[ExternalHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True):
    """No block is in any tier of this publisher and topic."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    ts: float
    events: Sequence[KVEvent]
    dp_rank: int | None = None


def external_hash(digest: bytes) -> int:
    """A digest's 64 bits as events carry them: its last eight bytes, big-endian, unsigned."""
    return int.from_bytes(digest[-8:], "big")


def namespace_of(root: ChainHash) -> str:
    """Stands in events for a chain's root that is not its model's plain one; the salt cannot be computed from it."""
    return hashlib.sha256(_NAMESPACE_TAG + root).hexdigest()[:32]


def topic_of(fingerprint: bytes) -> str:
    return f"kv@{fingerprint.hex()[:16]}"


def as_u64(name: ExternalHash) -> int:
    """A block's name as one unsigned number, in whichever form it came: a digest, or 64 bits with or without sign."""
    return external_hash(name) if isinstance(name, bytes) else name & _U64


def pieces(event: KVEvent, most: int) -> Iterator[KVEvent]:
    """The event as several of at most `most` blocks each; whole if its tokens do not fill its blocks."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= most:
        yield event
        return
    names, size = event.block_hashes, 0
    if isinstance(event, BlockStored):
        size = event.block_size
        if len(event.token_ids) != len(names) * size:
            yield event
            return
    for first in range(0, len(names), most):
        here = names[first : first + most]
        if isinstance(event, BlockRemoved):
            yield replace(event, block_hashes=here)
            continue
        keys = event.extra_keys
        yield replace(
            event,
            block_hashes=here,
            parent_block_hash=names[first - 1] if first else event.parent_block_hash,
            token_ids=event.token_ids[first * size : (first + most) * size],
            extra_keys=None if keys is None else keys[first : first + most],
        )


def encode_batch(batch: EventBatch, form: EventForm = "maps") -> bytes:
    """The batch as a msgpack array of tagged maps, byte for byte as vLLM packs it; or of arrays, as it did before."""
    events = batch.events if form == "maps" else [_as_array(event) for event in batch.events]
    return _ENCODER.encode([batch.ts, events, batch.dp_rank])


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Inverse of `encode_batch`; events may also be positional arrays, as before mid-2026. Unknown fields are skipped.

    Raises FormatError for anything else, and before it makes room for what the payload only claims to hold, or for
    more events and keys than a batch may have: what is made is then at most some 20 times the payload.
    """
    if len(payload) > MAX_PAYLOAD:
        raise FormatError(f"batch of {len(payload)} bytes: at most {MAX_PAYLOAD}")
    try:
        batch = _BATCHES.decode(payload)  # passes over what events hold, so each is whole
        events, room = list[KVEvent](), MAX_PARTS - len(batch.events)
        for raw in batch.events:
            event, num_keys = _event(raw, room)
            room -= num_keys
            events.append(event)
        return EventBatch(batch.ts, events, batch.dp_rank)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"batch of {len(payload)} bytes: not one of this version ({error!s:.160})") from None


def _as_array(event: KVEvent) -> list[Any]:
    """Its type and all its fields, in their order, without those at the end that say nothing."""
    placed: list[Any] = [type(event).__name__, *astuple(event)]
    while placed[-1] is None:
        placed.pop()
    return placed


def _event(raw: Raw, room: int) -> tuple[KVEvent, int]:
    """An event, and how many arrays its extra keys are: at most `room`. ValueError; TypeError."""
    first = memoryview(raw)[0]
    is_map = first >> 4 == 8 or first in (0xDE, 0xDF)
    read: _Stored | _Removed | _Cleared = (_MAPS if is_map else _ARRAYS).decode(raw)
    if isinstance(read, _Cleared):
        return AllBlocksCleared(), 0
    if isinstance(read, _Removed):
        return BlockRemoved(*astuple(read)), 0
    names, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys, *rest = astuple(read)
    keys, num_arrays = list[ExtraKeys | None](), 0
    for each in extra_keys or ():
        keys.append(found := _key(each, 2))
        if found is not None and type(found) is not tuple:
            raise ValueError("extra_keys: an entry is neither nil nor an array")
        num_arrays += 0 if found is None else 1 + sum([type(key) is tuple for key in found])
        if num_arrays > room:
            raise ValueError(f"more than {MAX_PARTS} events and keys")
    if extra_keys is not None and len(keys) != len(names):
        raise ValueError(f"extra_keys: not an entry for each of {len(names)} blocks")
    packed = None if extra_keys is None else tuple(keys)
    ids = unpack_tokens(tokens)
    if ids is None:
        ids = token_array(_IDS.decode(tokens))
    stored = names, parent, ids, block_size, lora_id, medium, lora_name
    return BlockStored(*stored, packed, *rest), num_arrays


def _key(raw: Raw, depth: int) -> Any:
    """Of a block: a word or a pair of words. With `depth` 2 all keys of a block."""
    first = memoryview(raw)[0]
    if first >> 4 == 9 or first in (0xDC, 0xDD):
        if depth:
            return tuple([_key(each, depth - 1) for each in _KEYS.decode(raw)])
    elif not (first >> 4 == 8 or first in (0xDE, 0xDF) or 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8):
        return _WORDS.decode(raw)
    raise ValueError("extra_keys: neither a word nor a pair of words")


_Name: TypeAlias = int | Annotated[bytes, Meta(min_length=8, max_length=_MAX_NAME)]


class _Stored(Struct, tag="BlockStored"):
    block_hashes: tuple[_Name, ...]
    parent_block_hash: _Name | None
    token_ids: Raw
    block_size: Annotated[int, Meta(gt=0, le=MAX_BLOCK_SIZE)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[Raw], Meta(max_length=MAX_PARTS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(Struct, tag="BlockRemoved"):
    block_hashes: tuple[_Name, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_PARTS)]
    dp_rank: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


_ENCODER: Final = Encoder(enc_hook=array.tolist)  # of token ids
_BATCHES: Final = Decoder(_Batch)
_MAPS: Final = Decoder(_Stored | _Removed | _Cleared)
_ARRAYS: Final = Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_KEYS: Final = Decoder(Annotated[list[Raw], Meta(max_length=_MAX_KEYS)])
_IDS: Final = Decoder(list[int])
_WORDS: Final = Decoder()

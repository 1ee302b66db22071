"""KV events on the wire, in vLLM's words (docs/routing.md): batches of stored, removed and cleared blocks. No I/O."""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias

import msgpack

from kvtier.connector.daemon import decoded, number
from kvtier.tiers import ChainHash, FormatError
from kvtier.tiers.naming import token_array

MAX_PAYLOAD: Final = 16 << 20  # bytes of one batch
MAX_PARTS: Final = 1 << 18  # arrays and maps in one batch: an empty one takes 64 times its byte
MAX_BLOCK_SIZE: Final = 4096  # tokens
_MAX_NAME: Final = 64  # bytes of a block's name
_U64: Final = 2**64 - 1
_NAMESPACE_TAG: Final = b"kvtier-namespace-v1"

ExternalHash: TypeAlias = int | bytes
"""How an engine names a block: 64 bits, signed or not, or the digest they were cut from."""

EventForm: TypeAlias = Literal["maps", "arrays"]
ExtraKeys: TypeAlias = tuple[Any, ...]
"""What besides tokens shapes one block's KV, untagged: LoRA name, (image, offset) pairs, cache salt, embeddings."""


@dataclass(frozen=True, slots=True)
class BlockStored:
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


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[ExternalHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block is in any tier of this publisher and topic."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    ts: float
    events: Sequence[KVEvent]
    dp_rank: int | None = None


def external_hash(digest: bytes) -> int:
    """A digest's 64 bits as events carry them: its last eight bytes, big-endian, unsigned."""
    return int.from_bytes(digest[-8:], "big")


def namespace_of(root: ChainHash) -> str:
    """What stands for a chain's root in events: an extra key of its first block, unless it is its model's plain root.

    Nobody can compute the salt or the adapter from it.
    """
    return hashlib.sha256(_NAMESPACE_TAG + root).hexdigest()[:32]


def topic_of(fingerprint: bytes) -> str:
    return f"kv@{fingerprint.hex()[:16]}"


def as_u64(name: ExternalHash) -> int:
    """A block's name as one unsigned number, in whichever form it came: a digest, or 64 bits with or without sign."""
    return external_hash(name) if isinstance(name, bytes) else name & _U64


def pieces(event: KVEvent, most: int) -> Iterator[KVEvent]:
    """The event as several of at most `most` blocks each, which say the same one after another.

    The whole event if its tokens do not fill its blocks: then it cannot be cut.
    """
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
    as_form = _as_map if form == "maps" else _as_array
    packed: bytes = msgpack.packb([batch.ts, [as_form(event) for event in batch.events], batch.dp_rank])
    return packed


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Inverse of `encode_batch`; events may also be positional arrays, as before mid-2026. Unknown fields are skipped.

    Raises FormatError for anything else, and before it makes room for what the payload only claims to hold, or for
    more arrays and maps than a batch may have: what is made is then at most some 20 times the payload.
    """
    if len(payload) > MAX_PAYLOAD:
        raise FormatError(f"batch of {len(payload)} bytes: at most {MAX_PAYLOAD}")
    try:
        walker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD)
        walker.feed(payload)
        walker.skip()  # makes nothing: an array that claims more items than there are ends here
        if walker.tell() != len(payload):
            raise FormatError(f"batch of {len(payload)} bytes: {len(payload) - walker.tell()} more behind its end")
        counted = _counted()
        body = msgpack.unpackb(payload, max_ext_len=0, strict_map_key=True, list_hook=counted, object_hook=counted)
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"batch of {len(payload)} bytes: not msgpack within bounds ({error!s:.80})") from None
    return _batch(body)


def _counted() -> Callable[[Any], Any]:
    """A hook for arrays and maps as they are made, that raises at one too many."""
    numbers = iter(range(MAX_PARTS))

    def counted(made: Any) -> Any:
        if next(numbers, None) is None:
            raise ValueError(f"more than {MAX_PARTS} arrays and maps")
        return made

    return counted


def _as_array(event: KVEvent) -> list[Any]:
    """Its type and all its fields, in their order, without those at the end that say nothing."""
    placed: list[Any] = [type(event).__name__]
    for field in fields(event):
        value = getattr(event, field.name)
        placed.append(value.tolist() if isinstance(value, array) else value)
    while placed[-1] is None:
        placed.pop()
    return placed


def _as_map(event: KVEvent) -> dict[str, Any]:
    named: dict[str, Any] = {"type": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.default is MISSING or value != field.default:
            named[field.name] = value.tolist() if isinstance(value, array) else value
    return named


@decoded
def _batch(body: Any) -> EventBatch:
    if type(body) is not list or not 2 <= len(body) <= 3:
        raise FormatError("batch: not an array of time, events and rank")
    ts, events, *rest = body
    if type(ts) not in (int, float) or type(events) is not list:
        raise FormatError("batch: not an array of time, events and rank")
    rank = rest[0] if rest else None
    return EventBatch(float(ts), [_event(event) for event in events], None if rank is None else number(rank))


def _event(body: Any) -> KVEvent:
    if type(body) is dict:
        named = body
        kind = named.get("type")
    elif type(body) is list and body and type(body[0]) is str:
        kind = body[0]
        named = dict(zip(_POSITIONS.get(kind, ()), body[1:], strict=False))
    else:
        raise FormatError("event: neither a map nor an array that begins with its type")
    if kind == "BlockStored":
        return _stored(named)
    if kind == "BlockRemoved":
        group = _optional(named.get("group_idx"), int)
        return BlockRemoved(_names(named["block_hashes"]), _optional(named.get("medium"), str), group)
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    raise FormatError(f"event type {kind!r:.40}: not one of {', '.join(_POSITIONS)}")


def _stored(named: dict[str, Any]) -> BlockStored:
    names = _names(named["block_hashes"])
    parent = named["parent_block_hash"]
    block_size = number(named["block_size"], MAX_BLOCK_SIZE + 1)
    if type(named["token_ids"]) is not list:
        raise FormatError("token_ids: not an array")
    tokens = token_array(named["token_ids"])
    if not block_size:
        raise FormatError("block_size 0: a block has tokens")
    extra_keys = named.get("extra_keys")
    return BlockStored(
        names,
        None if parent is None else _name(parent),
        tokens,
        block_size,
        _optional(named.get("lora_id"), int),
        _optional(named.get("medium"), str),
        _optional(named.get("lora_name"), str),
        None if extra_keys is None else _extra_keys(extra_keys, len(names)),
        _optional(named.get("group_idx"), int),
        _optional(named.get("kv_cache_spec_kind"), str),
        _optional(named.get("kv_cache_spec_sliding_window"), int),
    )


def _names(value: Any) -> tuple[ExternalHash, ...]:
    if type(value) is not list:
        raise FormatError("block_hashes: not an array")
    return tuple(map(_name, value))


def _name(value: Any) -> ExternalHash:
    if type(value) is int:  # msgpack has 64 bits, with a sign or without
        return value
    if type(value) is bytes and 8 <= len(value) <= _MAX_NAME:
        return value
    raise FormatError(f"{value!r:.40}: neither a number nor a digest")


def _extra_keys(value: Any, num_blocks: int) -> tuple[ExtraKeys | None, ...]:
    if type(value) is not list or len(value) != num_blocks:
        raise FormatError(f"extra_keys: not an entry for each of {num_blocks} blocks")
    if not all(keys is None or type(keys) is list for keys in value):
        raise FormatError("extra_keys: an entry is neither nil nor an array")
    return tuple(None if keys is None else _frozen(keys) for keys in value)


def _frozen(value: Any, depth: int = 2) -> Any:
    """The keys of a block, each a word or a pair of words."""
    if type(value) is list and depth:
        return tuple(_frozen(item, depth - 1) for item in value)
    if value is None or type(value) in (int, float, str, bytes, bool):
        return value
    raise FormatError(f"extra_keys: a {type(value).__name__} is no key")


def _optional(value: Any, kind: type) -> Any:
    if value is not None and type(value) is not kind:
        raise FormatError(f"{value!r:.40}: not of type {kind.__name__}")
    return value


_KINDS: Final = (BlockStored, BlockRemoved, AllBlocksCleared)
_POSITIONS: Final = {kind.__name__: tuple(field.name for field in fields(kind)) for kind in _KINDS}

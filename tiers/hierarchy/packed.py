"""Blocks that a tier has as fp8: packed on their way down, unpacked on their way up, both verified."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.tiers import BlockRecord, ChainHash, Fp8Codec, Outcome, Tier, checksum


@dataclass(frozen=True, slots=True)
class PackedShape:
    """What a tier is told of such blocks. Implements `BlockShape`."""

    block_size: int
    block_bytes: int


def read_packed(
    tier: Tier, codec: Fp8Codec, hashes: Sequence[ChainHash], into: Sequence[memoryview]
) -> list[BlockRecord | Outcome]:
    """`Tier.read`. The tier verifies what it stored; only then it is unpacked, in the buffer that received it.

    A record's checksum is that of the block as it is now.
    """
    results = tier.read(hashes, [buffer[: codec.packed_bytes] for buffer in into])
    return [
        result if isinstance(result, Outcome) else _unpacked(codec, result, buffer)
        for result, buffer in zip(results, into, strict=True)
    ]


def write_packed(
    tier: Tier, codec: Fp8Codec, records: Sequence[BlockRecord], payloads: Sequence[memoryview]
) -> list[Outcome]:
    """`Tier.write`. A block with a number that is not finite is UNSUPPORTED, and those behind it are not stored."""
    whole, packed = list[BlockRecord](), list[memoryview]()
    for record, payload in zip(records, payloads, strict=True):
        stored = codec.pack(payload)
        if stored is None:
            break
        whole.append(replace(record, checksum=checksum(stored)))
        packed.append(stored)
    outcomes = tier.write(whole, packed) if whole else []
    if (refused := len(records) - len(whole)) > 0:
        outcomes = [*outcomes, Outcome.UNSUPPORTED, *[Outcome.PARENT_FAILED] * (refused - 1)]
    return outcomes


def _unpacked(codec: Fp8Codec, record: BlockRecord, buffer: memoryview) -> BlockRecord | Outcome:
    if not codec.unpack(buffer[: codec.packed_bytes], buffer):
        return Outcome.CHECKSUM
    return replace(record, checksum=checksum(buffer))

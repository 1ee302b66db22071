"""The plan, the only object that crosses from the scheduler side to the worker side: this step's block copies."""

from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from kvtier.tiers import FormatError, value

_Number = Annotated[int, Meta(ge=0)]


class CopyOp(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copies of one request in one direction: `device_blocks[i]` (L1) ↔ `host_slots[i]` (L2).

    The slots are leased (loads) or reserved (stores) until the worker reports the op. The generations are the slots' at
    that time, so that a late report is recognised. A `layerwise` load's request computes in the same step, each layer
    as soon as its KV has arrived; the request of any other load waits until the op is reported.
    """

    op_id: _Number
    request_id: str
    device_blocks: tuple[_Number, ...]
    host_slots: tuple[_Number, ...]
    generations: tuple[_Number, ...]
    layerwise: bool = False

    def __len__(self) -> int:
        return len(self.device_blocks)


class StepPlan(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """One scheduling step's copies. `region` names the L2 region the slots belong to.

    It is the region's inode: 0 if the region is anonymous, or there is nothing to copy.
    """

    step: _Number
    region: _Number
    loads: tuple[CopyOp, ...] = ()
    stores: tuple[CopyOp, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)

    def encode(self) -> bytes:
        """msgpack: `[version, step, region, loads, stores]`, each op a list of CopyOp's fields in order."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "StepPlan":
        """Inverse of `encode`. FormatError for any other bytes."""
        try:
            plan = _DECODER.decode(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"not a step plan of this version: {error}") from error
        if any(
            len({*map(len, (op.device_blocks, op.host_slots, op.generations))}) > 1 for op in plan.loads + plan.stores
        ):
            raise FormatError("not a step plan: an op's columns differ in length")
        return plan


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(StepPlan)


@value
class WorkerReport:
    """The ops that have ended since the last report.

    The copies of `lost` ones, a subset of `failed`, may still run: the slots they write to must not be used again.
    """

    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

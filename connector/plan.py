"""The plan, the only object that crosses from the scheduler side to the worker side: this step's block copies."""

from typing import Any, Final

import msgpack

from kvtier.tiers import FormatError, value

_VERSION: Final = 1


@value
class CopyOp:
    """Copies of one request in one direction: `device_blocks[i]` (L1) ↔ `host_slots[i]` (L2).

    The slots are leased (loads) or reserved (stores) until the worker reports the op. The generations are the slots' at
    that time, so that a late report is recognised. A `layerwise` load's request computes in the same step, each layer
    as soon as its KV has arrived; the request of any other load waits until the op is reported.
    """

    op_id: int
    request_id: str
    device_blocks: tuple[int, ...]
    host_slots: tuple[int, ...]
    generations: tuple[int, ...]
    layerwise: bool = False

    def __len__(self) -> int:
        return len(self.device_blocks)


@value
class StepPlan:
    """One scheduling step's copies. `region` names the L2 region the slots belong to.

    It is the region's inode: 0 if the region is anonymous, or there is nothing to copy.
    """

    step: int
    region: int
    loads: tuple[CopyOp, ...] = ()
    stores: tuple[CopyOp, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)

    def encode(self) -> bytes:
        """msgpack: `[version, step, region, loads, stores]`, each op a list of CopyOp's fields in order."""
        packed: bytes = msgpack.packb([_VERSION, self.step, self.region, *map(_pack_ops, (self.loads, self.stores))])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> "StepPlan":
        """Inverse of `encode`. FormatError for any other bytes."""
        try:
            version, step, region, loads, stores = msgpack.unpackb(data, strict_map_key=True)
            if version != _VERSION:
                raise FormatError(f"step plan of version {version}: this side reads version {_VERSION}")
            return cls(_number(step), _number(region), _unpack_ops(loads), _unpack_ops(stores))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FormatError(f"not a step plan: {error}") from error


@value
class WorkerReport:
    """The ops that have ended since the last report.

    The copies of `lost` ones, a subset of `failed`, may still run: the slots they write to must not be used again.
    """

    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


def _pack_ops(ops: tuple[CopyOp, ...]) -> list[list[Any]]:
    return [[op.op_id, op.request_id, op.device_blocks, op.host_slots, op.generations, op.layerwise] for op in ops]


def _unpack_ops(ops: Any) -> tuple[CopyOp, ...]:
    result = []
    for op_id, request_id, *columns, layerwise in ops:
        device_blocks, host_slots, generations = (tuple(map(_number, column)) for column in columns)
        if not isinstance(request_id, str) or not isinstance(layerwise, bool):
            raise ValueError("an op's request id or kind is of the wrong type")
        if not len(device_blocks) == len(host_slots) == len(generations):
            raise ValueError("an op's columns differ in length")
        result.append(CopyOp(_number(op_id), request_id, device_blocks, host_slots, generations, layerwise))
    return tuple(result)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a number ≥ 0 belongs")
    return value

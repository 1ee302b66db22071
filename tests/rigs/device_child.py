"""Stories on a device that need a process of their own: a rank beside another one, and a device that breaks down.

`python device_child.py rank KIND RANK FD FOLDER` or `… broken KIND FOLDER`; says JSON lines.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from device_rig import DeviceRig, ended_well, pairs, rig_of

from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.host.host import HostRegion

NUM_BLOCKS: Final = 16
LAYERS, PART = 3, 8192  # bytes of a rank's layer in a block
SLOT: Final = 2 * LAYERS * PART  # of both ranks


def kv_of(rank: int) -> list[torch.Tensor]:
    """A rank's KV, of the host: every block and layer has bytes of its own."""
    generator = torch.Generator().manual_seed(rank + 1)
    shape = (NUM_BLOCKS, PART)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(LAYERS)]


def slot_table() -> list[int]:
    """Which slot a block is stored to: both ranks have the same tables."""
    return [int(slot) for slot in np.random.default_rng(4).permutation(NUM_BLOCKS)]


def rank_story(rig: DeviceRig, rank: int, region: HostRegion) -> None:
    """One of two tensor-parallel ranks: its part of every slot. Each line that it reads lets it go on."""
    tensors = [rig.upload(tensor) for tensor in kv_of(rank)]
    start = rank * LAYERS * PART
    parts = [BlockPart(tensor, layer, start + layer * PART) for layer, tensor in enumerate(tensors)]
    rig.pin(region, slots_per_piece=5)
    with rig.stream(EngineBlocks(parts, SLOT), region, "batch") as stream:
        blocks, slots = list(range(NUM_BLOCKS)), slot_table()
        _say(ready=region.pinned)
        ended_well(*(stream.store(pairs([block], [slot])) for block, slot in zip(blocks, slots, strict=True)))
        _say(stored=NUM_BLOCKS)
        for tensor in tensors:
            rig.compute(tensor.zero_, writes=[tensor])
        loaded = stream.load(pairs(blocks[::-1], slots))  # into other blocks
        assert stream.fence(loaded, 30)
        back = [torch.equal(rig.read(tensor).flip(0), kv) for tensor, kv in zip(tensors, kv_of(rank), strict=True)]
        ended_well(loaded)
        _say(right=all(back))


def broken_story(rig: DeviceRig) -> dict[str, Any]:
    """Copies of a device that has broken down: each fails by its deadline, says why, and all is closed in the end."""
    region = HostRegion.allocate(8, PART)
    rig.pin(region)
    l1 = rig.upload(torch.zeros((8, 4, PART // 4), dtype=torch.uint8))
    with rig.stream(l1, region, "batch") as stream:
        ended_well(stream.store(pairs([1], [1])))
        under_way = stream.load(pairs([2], [2]))
        rig.break_down()
        behind = [stream.store(pairs([3], [3])), stream.load(pairs([4], [4]), after=under_way)]
        ended = [event.wait(30) for event in (under_way, *behind)]
        errors = [event.error for event in behind]
        drained = stream.drain(30)
    region.close()
    return {"ended": ended, "errors": errors, "drained": drained, "closed": True}


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


def main(story: str, kind: str, *rest: str) -> None:
    """Tell one story on that kind of device."""
    with pytest.MonkeyPatch.context() as patch:
        if story == "broken":
            with rig_of(kind, 0, patch, Path(rest[0])) as rig:
                print(json.dumps(broken_story(rig)), flush=True)
                os._exit(0)  # what CUDA's own end makes of it is another story
        rank, fd = int(rest[0]), int(rest[1])
        with rig_of(kind, rank, patch, Path(rest[2])) as rig:
            region = HostRegion.attach(fd, NUM_BLOCKS, SLOT)
            rank_story(rig, rank, region)
            region.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

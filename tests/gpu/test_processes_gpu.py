"""Two processes that copy from and to one region, each pinning it for itself; and one whose device breaks down."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_child import LAYERS, NUM_BLOCKS, PART, SLOT, broken_story, kv_of, slot_table
from device_rig import CudaRig, DeviceRig

from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

ROOT = Path(__file__).resolve().parents[2]
CHILD = ROOT / "tests" / "rigs" / "device_child.py"


class Child:
    """The program, one line at a time."""

    def __init__(self, *arguments: object, fds: tuple[int, ...] = ()) -> None:
        paths = [ROOT, *(ROOT / folder for folder in ("tests/rigs", "benchmarks"))]
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended; what it says of it stands above"
        told: dict[str, Any] = json.loads(line)
        return told

    def go_on(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()


@pytest.mark.exhaustive  # each rank alone: test_cuda_transfer_gpu.py, `second_rank`
def test_two_ranks_store_and_load_their_halves_of_the_same_slots(rig: DeviceRig, tmp_path: Path) -> None:
    kind = "cuda" if isinstance(rig, CudaRig) else "lazy"
    region = HostRegion.allocate(NUM_BLOCKS, SLOT, shared=True)
    assert region.fd is not None
    with ExitStack() as closing:
        closing.callback(region.close)
        ranks = []
        for rank in (0, 1):
            folder = tmp_path / str(rank)
            folder.mkdir()
            ranks.append(Child("rank", kind, rank, region.fd, folder, fds=(region.fd,)))
            closing.callback(ranks[-1].close)
        for told in ({"ready": True}, {"stored": NUM_BLOCKS}):
            assert [child.says() for child in ranks] == [told, told]
            if "stored" in told:  # both halves of every slot, as a third process sees them
                wanted = np.concatenate([kv.numpy() for rank in (0, 1) for kv in kv_of(rank)], axis=1)
                assert wanted.shape == (NUM_BLOCKS, 2 * LAYERS * PART)
                assert np.array_equal(region.array[slot_table(), :SLOT], wanted)
            for child in ranks:
                child.go_on()
        assert [child.says() for child in ranks] == [{"right": True}] * 2
        for child in ranks:
            child.go_on()


def test_copies_of_a_broken_device_fail_in_time_and_say_why(rig: DeviceRig, tmp_path: Path) -> None:
    if isinstance(rig, CudaRig):  # no call of this process would work any more
        child = Child("broken", "cuda", tmp_path)
        told = child.says()
        child.close()
    else:
        told = broken_story(rig)
    assert told["ended"] == [True] * 3
    assert all("CUDA" in error for error in told["errors"])
    assert told["drained"]
    assert told["closed"]

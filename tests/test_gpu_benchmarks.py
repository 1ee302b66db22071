"""The benchmarks of a GPU, run on this CPU by the very code that a GPU runs; and what they say where there is none."""

import json
import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import _gpu
import _readme
import _report
import gpu_bandwidth
import gpu_decode
import gpu_ttft
import pytest
import torch
from _claims import CLAIMS
from _readme import figures
from device_rig import WAYS, LazyRig, ended_well, pairs, rig_of

from kvtier.tiers.host.host import HostRegion

PROGRAMS: list[ModuleType] = [gpu_bandwidth, gpu_decode, gpu_ttft]


@cache
def dry_run(program: Any) -> dict[str, Any]:
    """What a program prints; each runs once."""
    printed = StringIO()
    with patch("sys.argv", [program.__name__, "--dry", "--json"]), redirect_stdout(printed):
        assert program.main() == 0
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


@pytest.fixture(params=PROGRAMS, ids=lambda program: str(program.__name__))
def program(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_dry_run_is_the_whole_program(program: Any) -> None:
    document = dry_run(program)
    assert "no figure of a GPU" in document["setup"]["dry"]
    # each goal of the page is a target, with its own limit
    patterns = [claim.pattern for claim in CLAIMS if claim.benchmark == program.__name__]
    for target in document["targets"]:
        assert sum(bool(re.search(pattern, target["name"])) for pattern in patterns) == 1, target
    limits = [
        {target["target"] for target in document["targets"] if re.search(pattern, target["name"])}
        for pattern in patterns
    ]
    assert all(len(each) == 1 for each in limits), limits


def test_without_a_gpu_a_program_says_so_and_ends(
    program: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, told in ((["--json"], "torch finds no GPU"), (["--dry", "--save"], "--save with --dry")):
        monkeypatch.setattr("sys.argv", [program.__name__, *options])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == 2
        told_on = capsys.readouterr()
        assert told in told_on.err
        assert not told_on.out


def test_bandwidth_has_every_size_direction_and_step() -> None:
    rows = dry_run(gpu_bandwidth)["results"]  # pyrefly: ignore[bad-argument-type] # modules have a hash
    moved = {(row["pieces"], row["KiB"], row["direction"]) for row in rows if "of one copy" in row}
    assert len(moved) == (4 + 2) * 3
    assert all(row["GB/s"] >= 0 and row["of one copy"] > 0 for row in rows if "of one copy" in row)
    steps = {(row["layout"], row["stores of a step"]) for row in rows if "layout" in row}
    assert steps == {(layout, count) for layout in _gpu.LAYOUTS for count in (1, 16, 64)}
    assert [row["phase"] for row in rows if "phase" in row] == ["before", "first use", "behind it"]


def test_decoding_was_measured_beside_every_kind_of_copies() -> None:
    rows = dry_run(gpu_decode)["results"]  # pyrefly: ignore[bad-argument-type] # modules have a hash
    assert [(row["layout"], row["beside"]) for row in rows] == [
        (layout, kind) for layout in _gpu.LAYOUTS for kind in gpu_decode.BESIDE
    ]
    assert all(row["slowdown"] == 1 for row in rows if row["beside"] == "alone")
    assert not any(row["CUDA graph"] for row in rows)


def test_each_tier_gave_the_same_first_token() -> None:
    rows = dry_run(gpu_ttft)["results"]  # pyrefly: ignore[bad-argument-type] # modules have a hash
    assert [(row["loading"], row["tokens"]) for row in rows] == [
        (loading, length) for loading in ("async", "layerwise") for length in (128, 256)
    ]
    assert all(row["same token"] for row in rows)


def test_what_no_gpu_has_run_is_told_and_claims_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(_readme, "ROOT", tmp_path)
    assert "Not run on a GPU yet: `gpu_bandwidth`, `gpu_decode`, `gpu_ttft`" in figures()
    document = dry_run(gpu_decode)  # pyrefly: ignore[bad-argument-type] # as above
    machine = document["machine"] | {"gpu": "NVIDIA H200", "driver": "580.1"}
    (results / "gpu_decode.json").write_text(json.dumps(document | {"machine": machine}))
    page = figures()
    assert "Not run on a GPU yet: `gpu_bandwidth`, `gpu_ttft`" in page
    assert "NVIDIA H200 with driver 580.1" in page
    assert "| a decode step beside stores, loads, both ÷ alone | ≤1.02 |" in page


def test_a_copy_of_a_checkout_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "ROOT", tmp_path)
    assert _report.commit() == "unknown"
    (tmp_path / ".gpu").mkdir()
    (tmp_path / ".gpu" / "commit").write_text("0123456789ab\n")
    assert _report.commit() == "0123456789ab"


@pytest.mark.parametrize("way", WAYS)
def test_a_forced_way_is_the_one_that_copies_go(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with rig_of("lazy", 1, monkeypatch, tmp_path) as rig:
        assert isinstance(rig, LazyRig)
        for num_bytes in (4 << 10, 2 << 20):
            batches, launches = rig.driver.num_batches, len(rig.cupy.streams)
            l1 = rig.upload(_gpu.piece_tensor("own", 4, num_bytes, 1, rig.device))
            region = HostRegion.allocate(4, num_bytes)
            rig.pin(region)
            with rig.stream(l1, region, way) as stream:
                ended_well(_gpu.enqueue(stream, "store", pairs([0, 2], [3, 1])))
            region.close()
            taken = {"batch": rig.driver.num_batches - batches, "kernel": len(rig.cupy.streams) - launches}
            assert taken == {"batch": 0, "kernel": 0} | ({way: 1} if way in taken else {})

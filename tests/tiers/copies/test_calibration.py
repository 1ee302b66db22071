"""What is measured of a device's copies, what follows from it, and what is kept: over scripted rates and files."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.tiers.config.environment import cache_directory
from kvtier.tiers.config.sections import HostConfig
from kvtier.tiers.copies.copy_probe import GRIDS, SIZES, Calibration, measured
from kvtier.tiers.copies.copy_ways import DEFAULT, ChoiceKey, CopyChoice, CopyWay, CopyWays, KeptChoices
from kvtier.tiers.metrics import Metrics

KEY = ChoiceKey("NVIDIA H200", "12.8", "12.8", "14.0", "0.1.0", "own", "batch+kernel+torch")
KIB = 1 << 10

Script = Callable[[CopyWay, int, int], float]


class ScriptedProbe:
    """Answers with a script's rates, and notes what it was asked."""

    def __init__(self, script: Script, ways: Sequence[CopyWay] = ("batch", "kernel", "torch")) -> None:
        self.script = script
        self.ways = ways
        self.asked: list[tuple[CopyWay, int, int]] = []

    def rate(self, way: CopyWay, piece_bytes: int, grid: int) -> float:
        self.asked.append((way, piece_bytes, grid))
        return self.script(way, piece_bytes, grid)

    @contextmanager
    def open(self) -> Iterator["ScriptedProbe"]:
        yield self


def h200(way: CopyWay, size: int, grid: int) -> float:
    """As published: batches from 64 KiB on, the kernel's rate up to a grid of 16, torch's by its call."""
    batch = 51e9 if size >= 64 * KIB else 5e9
    return {"batch": batch, "kernel": 41e9 * min(1, grid / 16), "torch": size / (6e-6 + size / 51e9)}[way]


def never(way: CopyWay, size: int, grid: int) -> float:
    return 5e9 if way == "batch" else h200(way, size, grid)


@pytest.fixture
def kept(tmp_path: Path) -> KeptChoices:
    return KeptChoices(tmp_path / "copies")


def calibrated(
    kept: KeptChoices, probe: ScriptedProbe, ways: CopyWays | None = None, key: ChoiceKey = KEY, deadline: float = 60
) -> CopyWays:
    ways = ways or CopyWays()
    calibration = Calibration(ways, key, probe.open, kept=kept, deadline=deadline)
    assert calibration.wait(60)
    assert calibration.close(1)
    return ways


def test_batches_count_from_where_they_are_as_fast(kept: KeptChoices) -> None:
    choice = calibrated(kept, ScriptedProbe(h200)).choice
    assert (choice.batch_from, choice.grid, choice.source) == (64 * KIB, 16, "measured")
    assert choice.reason == "pieces of 64KiB: batch 51.0, kernel 41.0, torch 9.0 GB/s"
    has: Mapping[str, bool] = {"has_batch": True, "has_kernel": True}
    assert [choice.way(size * KIB, **has) for size in (4, 63, 64, 1024)] == ["kernel", "kernel", "batch", "batch"]


def test_batches_that_are_never_as_fast_are_never_taken(kept: KeptChoices) -> None:
    choice = calibrated(kept, ScriptedProbe(never)).choice
    assert choice.batch_from is None
    assert choice.torch_from == 1024 * KIB
    assert choice.way(32 * KIB, has_batch=True, has_kernel=True) == "kernel"
    assert choice.way(1 << 20, has_batch=True, has_kernel=True) == "torch"


def test_batches_that_are_always_as_fast_take_everything() -> None:
    choice = measured(ScriptedProbe(lambda way, size, grid: 50e9 if way == "batch" else 40e9))
    assert choice.batch_from == 0
    assert choice.way(1, has_batch=True, has_kernel=True) == "batch"


def test_one_lucky_size_is_no_break_even() -> None:
    """Batches are faster at 8 KiB, then slower up to 128 KiB: only from where it stays so."""
    quick = {8 * KIB, *(size for size in SIZES if size >= 256 * KIB)}
    choice = measured(ScriptedProbe(lambda way, size, _: 50e9 if way != "batch" or size in quick else 5e9))
    assert choice.batch_from == 256 * KIB


def test_an_old_driver_has_the_kernel_and_torch(kept: KeptChoices) -> None:
    probe = ScriptedProbe(h200, ["kernel", "torch"])
    choice = calibrated(kept, probe, key=replace(KEY, driver="12.4", ways="kernel+torch")).choice
    assert "batch" not in {way for way, _, _ in probe.asked}
    assert (choice.batch_from, choice.source) == (None, "measured")
    assert choice.reason == "this driver has no batched copies (they need driver 570)"
    assert choice.way(4 * KIB, has_batch=False, has_kernel=True) == "kernel"
    assert choice.way(1 << 20, has_batch=False, has_kernel=True) == "torch"


def test_where_there_is_one_way_nothing_is_measured(kept: KeptChoices) -> None:
    probe = ScriptedProbe(h200, ["torch"])
    choice = calibrated(kept, probe, key=replace(KEY, ways="torch")).choice
    assert not probe.asked
    assert choice.reason.startswith("nothing to choose from: this driver has no batched copies")
    assert [each.choice for each in kept.all()] == [choice]


def test_the_least_grid_that_does_not_cost_copies(kept: KeptChoices) -> None:
    for enough in GRIDS:
        probe = ScriptedProbe(lambda way, size, grid: 41e9 * min(1, grid / enough))  # noqa: B023
        assert measured(probe).grid == enough
        assert {grid for way, _, grid in probe.asked[len(GRIDS) :]} == {enough}  # the rest by that one


def test_a_measurement_that_fails_midway_leaves_the_defaults_and_says_why(
    kept: KeptChoices, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(way: CopyWay, size: int, grid: int) -> float:
        if size > 64 * KIB:
            raise RuntimeError("CUDA error: out of memory")
        return h200(way, size, grid)

    ways = calibrated(kept, ScriptedProbe(failing))
    why = "not measured: RuntimeError: CUDA error: out of memory"
    assert ways.choice == replace(DEFAULT, reason=why)
    assert "published figures count: not measured: RuntimeError: CUDA error: out of memory" in caplog.text
    assert [each.choice.reason for each in kept.all()] == [why]  # for `doctor`
    assert calibrated(kept, ScriptedProbe(h200)).choice.batch_from == 64 * KIB  # the next start tries again


def test_a_probe_that_cannot_be_made_leaves_the_defaults(kept: KeptChoices) -> None:
    def none() -> AbstractContextManager[ScriptedProbe]:
        raise OSError("no memory")

    ways = CopyWays()
    assert Calibration(ways, KEY, none, kept=kept).wait(60)
    assert ways.choice == replace(DEFAULT, reason="not measured: OSError: no memory")


def test_past_its_deadline_nothing_more_is_measured(kept: KeptChoices) -> None:
    probe = ScriptedProbe(h200)
    ways = calibrated(kept, probe, deadline=0)
    assert not probe.asked
    assert ways.choice == replace(DEFAULT, reason="not measured: past its deadline of 0.0 s")


def test_closing_ends_a_measurement_and_keeps_nothing_of_it(kept: KeptChoices) -> None:
    holder: list[Calibration] = []

    def closing(way: CopyWay, size: int, grid: int) -> float:
        holder[0]._closing.set()
        return h200(way, size, grid)

    probe, ways = ScriptedProbe(closing), CopyWays()

    @contextmanager
    def late() -> Iterator[ScriptedProbe]:
        while not holder:
            pass
        yield probe

    holder.append(Calibration(ways, KEY, late, kept=kept))
    assert holder[0].wait(60)
    assert len(probe.asked) == 1
    assert ways.choice.reason == "not measured: closed while it was measured"
    assert not kept.all()


def test_the_next_start_measures_nothing(kept: KeptChoices) -> None:
    first = calibrated(kept, ScriptedProbe(h200)).choice
    probe = ScriptedProbe(never)
    assert calibrated(kept, probe).choice == first
    assert not probe.asked


@pytest.mark.parametrize("field", ["device", "driver", "cuda", "cupy", "kvtier", "kind", "ways"])
def test_another_set_up_is_measured_anew(kept: KeptChoices, field: str) -> None:
    calibrated(kept, ScriptedProbe(h200))
    probe = ScriptedProbe(never)
    assert calibrated(kept, probe, key=replace(KEY, **{field: "kernel+another"})).choice.batch_from is None
    assert probe.asked
    assert len(kept.all()) == 2


def spoil_truncated(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def spoil_foreign(path: Path) -> None:
    content = json.loads(path.read_text())
    content["key"]["device"] = "NVIDIA A100"
    path.write_text(json.dumps(content))


def spoil_grid(path: Path) -> None:
    content = json.loads(path.read_text())
    content["choice"]["grid"] = 4096
    path.write_text(json.dumps(content))


def spoil_kind(path: Path) -> None:
    content = json.loads(path.read_text())
    content["choice"]["batch_from"] = "64KiB"
    path.write_text(json.dumps(content))


def spoil_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(2048))


def spoil_deep(path: Path) -> None:
    path.write_text("[" * 60_000)


def spoil_field(path: Path) -> None:
    content = json.loads(path.read_text())
    content["choice"]["speed"] = 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "spoil", [spoil_truncated, spoil_foreign, spoil_grid, spoil_kind, spoil_bytes, spoil_deep, spoil_field]
)
def test_a_file_that_is_not_ours_is_measured_anew(
    kept: KeptChoices, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    calibrated(kept, ScriptedProbe(h200))
    [path] = (tmp_path / "copies").glob("*.json")
    spoil(path)
    probe = ScriptedProbe(never)
    assert calibrated(kept, probe).choice.batch_from is None
    assert probe.asked
    assert kept.load(KEY) is not None  # and written anew


def test_a_directory_that_takes_no_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "copies").write_text("a file where the directory belongs")
    kept = KeptChoices(tmp_path / "copies")
    for _ in range(2):
        assert calibrated(kept, ScriptedProbe(h200)).choice.batch_from == 64 * KIB  # measured all the same
    assert caplog.text.count("is not kept, and measured at every start") == 1
    assert not kept.all()


def test_only_one_process_measures_at_a_time(kept: KeptChoices) -> None:
    """The other waits, and takes what the first has found."""
    ways, probe = CopyWays(), ScriptedProbe(never)
    with kept.alone(KEY, lambda: False) as alone:
        assert alone
        waiting = Calibration(ways, KEY, probe.open, kept=kept, deadline=60)
        assert not waiting.wait(0.1)
        assert ways.choice == DEFAULT
        kept.keep(KEY, measured(ScriptedProbe(h200)))
    assert waiting.wait(60)
    assert not probe.asked
    assert ways.choice.batch_from == 64 * KIB
    kept.keep(KEY, DEFAULT)  # as after a failure
    with kept.alone(KEY, lambda: False):
        late = Calibration(ways, KEY, probe.open, kept=kept, deadline=0.1)
        assert late.wait(60)
    assert ways.choice.reason == "not measured: another process measures, for too long"


def test_what_the_operator_decided_stays(kept: KeptChoices) -> None:
    host = HostConfig(batch_copies_from=4096, copy_grid=8)
    ways = CopyWays.to_measure(host)
    assert not ways.wants_measuring
    assert (ways.choice.batch_from, ways.choice.grid, ways.choice.source) == (4096, 8, "configured")
    half = CopyWays.to_measure(HostConfig(batch_copies_from=4096))
    assert half.wants_measuring
    calibrated(kept, ScriptedProbe(h200), half)
    assert (half.choice.batch_from, half.choice.grid, half.choice.source) == (4096, 16, "configured")
    assert half.choice.reason.startswith("[host] batch_copies_from; the rest: pieces of 64KiB: batch 51.0")
    kept_choice = kept.load(KEY)
    assert kept_choice is not None
    assert kept_choice.batch_from == 64 * KIB  # what was measured, not what was configured


def test_metrics_show_the_choice_and_what_went_which_way(kept: KeptChoices) -> None:
    metrics = Metrics()
    ways = calibrated(kept, ScriptedProbe(h200), CopyWays(metrics=metrics))
    ways.count("batch", 1000)
    ways.count("batch", 24)
    ways.count("torch", 1)
    shown = metrics.snapshot()
    assert shown['kvtier_copy_batch_from_bytes{device="NVIDIA H200"}'] == 64 * KIB
    assert shown['kvtier_copy_grid{device="NVIDIA H200"}'] == 16
    assert shown['kvtier_copies_total{way="batch"}'] == 2
    assert shown['kvtier_copy_bytes_total{way="batch"}'] == 1024
    assert shown['kvtier_copy_bytes_total{way="torch"}'] == 1
    ways.choose(CopyChoice(batch_from=None))
    ways.show("NVIDIA H200")
    assert metrics.snapshot()['kvtier_copy_batch_from_bytes{device="NVIDIA H200"}'] == -1


def test_the_cache_directory_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    KeptChoices().keep(KEY, measured(ScriptedProbe(h200)))
    assert len(list((tmp_path / "kvtier" / "copies").glob("*.json"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # such a value counts as none, by the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "kvtier"
    monkeypatch.setenv("HOME", "")  # nor is it the folder that one happens to stand in
    assert cache_directory() == Path("/.cache/kvtier")


def test_a_measurement_is_logged_with_its_reason(kept: KeptChoices, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    calibrated(kept, ScriptedProbe(h200))
    assert "copies by the driver: from 65536 bytes on (pieces of 64KiB: batch 51.0" in caplog.text

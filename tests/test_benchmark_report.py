"""What benchmarks print and save: one JSON object, a table for people, the verdict on every target."""

import json
from pathlib import Path

import _report
import pytest
from _goals import Target
from _report import Given, report
from serving import OfferedLoad, ServedArm, TimedAnswer

ROWS: list[dict[str, object]] = [
    {"size": "128 KiB", "gb_per_s": 1.23456, "ok": True},
    {"size": "1 MiB", "gb_per_s": None, "ok": False},
]
TARGETS = [Target("time", 1.6, 1.2), Target("bandwidth", 0.9, 0.8, at_most=False)]


def test_a_target_has_a_direction() -> None:
    assert Target("time", 1.6, 1.6).met
    assert not Target("time", 1.6, 1.61).met
    assert Target("bandwidth", 0.9, 0.9, at_most=False).met
    assert not Target("bandwidth", 0.9, 0.89, at_most=False).met
    assert not Target("nothing measured", 0.9, float("nan")).met


def test_json_is_one_object_and_what_is_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_report, "RESULTS", tmp_path)
    assert report(Given(name="copy", json=True, save=True), ROWS, TARGETS) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["benchmark"] == "copy"
    assert printed["results"] == ROWS
    assert printed["targets"] == [
        {"name": "time", "target": "<= 1.6", "measured": 1.2, "met": True},
        {"name": "bandwidth", "target": ">= 0.9", "measured": 0.8, "met": False},
    ]
    assert printed["machine"]["cores"] >= 1
    assert printed["commit"]
    assert json.loads((tmp_path / "copy.json").read_text()) == printed


def test_the_setup_is_told_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        report(Given(name="copy", json=as_json, save=False), ROWS, TARGETS, {"trace": "a.jsonl", "replicas": 4})
        told = capsys.readouterr().out
        assert json.loads(told)["setup"] == {"trace": "a.jsonl", "replicas": 4} if as_json else "trace a.jsonl" in told


def test_a_load_is_told_by_ratios_within_a_round() -> None:
    load = OfferedLoad(2, 8, 128, 16, 4, 8, 2)
    assert (load.prefix_blocks, load.l1_blocks) == (8, 22)
    off, warm = ServedArm("cache off", 1), ServedArm("L2", 2)
    # the machine is half as fast in the second round, for both
    for arm, rates, firsts in ((off, [2.0, 1.0], [3.0, 6.0]), (warm, [8.0, 4.0], [1.0, 2.0])):
        arm.rates = rates
        arm.answers = [[TimedAnswer(first, 0.1, {"L2": 0.5} if arm is warm else {})] * 3 for first in firsts]
    row = warm.row(off)
    assert (row["requests/s of a round"], row["off / TTFT of a round"]) == (4, 3)
    assert (row["in L1"], row["in L2"], row["between tokens p50 ms"]) == (0, 0.5, 100)

"""A new result of a long run is put into docs/faults.md."""

import json
import subprocess
import sys
from pathlib import Path

import figures
import pytest


def test_a_new_result_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a page and results of our own, as after a short run
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{figures.BEGIN}old\n{figures.END}after\n")
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    run = [sys.executable, "tests/endurance/crash_images.py", "--count", "20", "--seed", "5"]
    done = subprocess.run([*run, "--json", str(tmp_path / "x.json")], cwd=figures.ROOT, timeout=110, check=True)
    assert done.returncode == 0
    monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path / "x.json")])
    assert figures.main() == 0
    assert json.loads((tmp_path / "results" / "crash-images.json").read_text())["count"] == 20
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `make crash-images` | 20: " in text
    assert "(seed 5)" in text

"""Parsers of bytes that strangers send, fuzzed by coverage: a value or a typed error, in bounded memory (FAULTS 39)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="no atheris for this Python or machine")


@pytest.mark.parametrize("target", ["frames", "record", "events", "plan", "archive", "trace"])
def test_any_bytes_are_a_value_or_a_typed_error(target: str, tmp_path: Path) -> None:
    child = Path(__file__).with_name("_fuzz_child.py")
    limits = ["-max_total_time=4", "-max_len=4096", "-rss_limit_mb=1024", "-timeout=5", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, str(child), target, *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE" in done.stderr

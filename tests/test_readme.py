"""The README's example, run as printed, twice, and its figures: those that the benchmarks saved."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from _readme import BEGIN, END, figures
from tiny_models import config_of
from transformers import AutoModelForCausalLM

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_api_example_runs_as_printed(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    auto: Any = AutoModelForCausalLM
    auto.from_config(config_of("llama")).save_pretrained(tmp_path / "path" / "to" / "checkpoint")
    (tmp_path / "example.py").write_text(example.replace('"4GiB"', '"64MiB"').replace('"1GiB"', '"64MiB"'))
    first, second = (
        subprocess.run(
            [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    answers = [run.stdout.splitlines()[0] for run in (first, second)]
    assert answers[0].endswith(" 0 0")  # nothing in L1, nothing below
    assert answers[1].endswith(" 0 384")  # 400 tokens: 24 full blocks of 16 can be loaded, the last is computed
    tokens = [run.stdout.splitlines()[0].split("]")[0] for run in (first, second)]
    assert tokens[0] == tokens[1]  # and the greedy text is the same


def test_its_figures_are_those_the_benchmarks_saved() -> None:
    """After a benchmark was saved: `python benchmarks/_readme.py`."""
    assert README.read_text().partition(BEGIN)[2].partition(END)[0] == figures()

"""What the pages print to be typed, run as printed."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _stories import script, typed
from service_rig import patient_options
from tiny_models import config_of
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parent.parent
# What begins a block is told only if the slab's table is in the page cache. A busy machine drops it from there: wait.
WAITS = "from kvtier.tiers.file.file_io import FileIO, read_each\nFileIO.peek = read_each\n"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run as printed says nothing of deadlines, prices and of L1's size, and the machine may be busy."""
    own = {"l1__size": "64MiB", "cache__load_or_recompute": "load"}  # of so small a model computing may be cheaper
    for name, value in (patient_options() | own).items():
        monkeypatch.setenv(f"KVTIER_{name.upper()}", value)


def examples(path: Path) -> list[str]:
    """Its Python blocks, in order."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def environment() -> dict[str, str]:
    """Small tiers, and all the patience that what is printed does not speak of."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    options = patient_options() | {
        "l1__size": "64MiB",
        "host__size": "64MiB",
        "file__size": "64MiB",
        "service__deadline": "60s",
        "cache__load_or_recompute": "load",  # of so small a model computing is always faster
    }
    return others | {f"KVTIER_{name.upper()}": value for name, value in options.items()}


def is_taken(port: int) -> bool:
    """Whether somebody listens there on loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_quickstarts_example_runs_as_printed(tmp_path: Path, programs: Path) -> None:
    [example] = examples(ROOT / "docs" / "quickstart.md")
    auto: Any = AutoModelForCausalLM
    auto.from_config(config_of("llama")).save_pretrained(tmp_path / "path" / "to" / "checkpoint")
    (tmp_path / "example.py").write_text(WAITS + example.replace('"4GiB"', '"64MiB"').replace('"1GiB"', '"64MiB"'))
    first, second = (
        subprocess.run(
            [programs / "python", "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    answers = [run.stdout.splitlines()[0] for run in (first, second)]
    assert answers[0].endswith(" 0 0")  # nothing in L1, nothing below
    assert answers[1].endswith(" 0 399")  # of 400 tokens the last is computed
    tokens = [run.stdout.splitlines()[0].split("]")[0] for run in (first, second)]
    assert tokens[0] == tokens[1]  # and the greedy text is the same


def test_the_transformers_page_runs_as_printed(tmp_path: Path, programs: Path) -> None:
    auto: Any = AutoModelForCausalLM
    auto.from_config(config_of("llama")).save_pretrained(tmp_path / "path" / "to" / "checkpoint")
    page = "\n".join(examples(ROOT / "docs" / "transformers.md"))
    (tmp_path / "page.py").write_text(WAITS + page.replace('"4GiB"', '"64MiB"').replace('"1GiB"', '"64MiB"'))
    for found in (0, 384):
        run = subprocess.run(
            [programs / "python", "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert run.returncode == 0, run.stderr
        lines = run.stdout.splitlines()
        assert lines[0] == f"found {found} of 400"
        assert "loaded 384" in lines
        assert 'kvtier_lookup_blocks_total{tier="file"} 6.0' in lines
        assert "engine found 400" in lines
        assert "from segments 256 computed anew 38" in lines
        assert "back 384" in lines  # whole blocks of 401 + 32 tokens and one more


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_and_a_cluster_run_as_printed(home: Path, programs: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here: install Debian's redis-server")
    if taken := [port for port in (7001, 7002, 7003, 9401, 9402) if is_taken(port)]:
        pytest.skip(f"ports {taken}, which docs/storage.md names, are somebody's")
    try:
        lines = typed(script("storage.md"), home, environment(), 500, programs.parent)
    finally:
        for port in (7001, 7002, 7003):  # where it ended early
            subprocess.run(["redis-cli", "-p", str(port), "shutdown", "nosave"], capture_output=True, check=False)
    told = [(lines[i - 1], line) for i, line in enumerate(lines) if "tokens of prompt: L1" in line]
    assert len({text for text, _ in told}) == 1  # three engines, one answer
    computed, shared, remote = (line for _, line in told)
    held = int(re.findall(r"^\[([\d,]+) tokens", computed)[0].replace(",", "")) - 1  # one is computed
    assert "L2 0 · file 0 · peers 0 · redis 0" in computed
    assert f"L2 {held:,} · file 0 · peers 0 · redis 0" in shared  # the daemon's memory
    assert (
        f"L2 0 · file 0 · peers 0 · redis {held // 64 * 64:,}" in remote
    )  # the other node, whole blocks through the cluster


@pytest.mark.exhaustive  # its page; that engines die in a cluster is told in test_fault_cluster.py
@pytest.mark.timeout(600)
def test_a_cluster_whose_engines_die_runs_as_printed(home: Path, programs: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here: install Debian's redis-server")
    if taken := [port for port in range(7400, 7500) if is_taken(port)]:
        pytest.skip(f"ports {taken}, of those docs/operate.md names, are somebody's")
    try:
        lines = typed(script("operate.md"), home, environment(), 500, programs.parent)
    finally:
        if (home / "kvtier-cluster").exists():  # where it ended early
            subprocess.run([programs / "kvtier", "cluster", "down", "--purge"], cwd=home, check=False)
    told = [re.match(r"(\w+): (\S+) had of (\d+) tokens: (.+)$", line) for line in lines]
    turns = [match.groups() for match in told if match]
    for chat in ("one", "two"):
        first, second, third = (
            (int(asked), {tier: int(count) for tier, count in re.findall(r"(\w+) (\d+)", found)})
            for name, _, asked, found in turns
            if name == chat
        )
        where = [at for name, at, *_ in turns if name == chat]
        assert where[1] != where[0]  # it was killed
        assert first[1] == {}
        assert second[1]["redis"] > 0.9 * first[0], turns  # from Valkey: nobody on its node had computed it
        assert sum(third[1].values()) > 0.9 * second[0], turns
    # The router's page: what it knew of the prompt, and that there was nobody else.
    decisions = [line.split() for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert [reason for _, _, _, reason, *_ in decisions].count("only") == 2

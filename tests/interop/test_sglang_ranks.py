"""Tensor-parallel ranks of an MLA model over the node's daemon: the first one stores the latents, all of them load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang; run `make test-sglang`")

from node_rig import Node
from sglang_rig import wait_until
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtier.tiers.naming.key_schemes import sglang_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = [name.hex() for name in sglang_hashes(list(range(5 * 4)), 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    auto: Any = AutoModelForCausalLM
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    auto.from_config(config).save_pretrained(path)
    return path


def rank(number: int, do: str, model: Path, daemon: Node, size: int = 2) -> dict[str, Any]:
    """What a process of its own tells of it."""
    asked = {"rank": number, "size": size, "do": do, "keys": KEYS, "model": str(model), "service": dict(daemon.section)}
    command = [sys.executable, str(Path(__file__).with_name("_sglang_rank.py")), json.dumps(asked)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("=")]
    told: dict[str, Any] = json.loads(line[1:])
    return told


def test_ranks_share_latents_and_have_states_of_their_own(model: Path, daemon: Node) -> None:
    first = rank(0, "store", model, daemon)
    assert (first["exists"], first["latents"], first["states"]) == (0, [True] * 5, [True])
    wait_until(lambda: daemon.num_written > len(KEYS), "the daemon to write")
    written = daemon.num_written
    # The latents are there for the second rank, its own state is not: no hit.
    second = rank(1, "store", model, daemon)
    assert (second["exists"], second["latents"], second["states"]) == (0, [True] * 5, [True])
    # One copy of the latents, also where a second rank hands them over: only its state is written.
    wait_until(lambda: daemon.num_written >= 2 * written - len(KEYS), "the daemon to write")
    assert daemon.num_written == 2 * written - len(KEYS)
    for number, stored in ((0, first), (1, second)):
        again = rank(number, "load", model, daemon)
        assert (again["exists"], again["latents"], again["states"]) == (5, [True] * 5, [True])
        assert again["bytes"] == [first["bytes"][0], stored["bytes"][1]]
    assert first["bytes"][1] != second["bytes"][1]
    alone = rank(0, "load", model, daemon, size=1)  # the latents are those of any number of ranks
    assert (alone["latents"], alone["states"], alone["bytes"][0]) == ([True] * 5, [False], first["bytes"][0])

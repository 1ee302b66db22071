"""SGLang's example in the README and in docs/sglang.md, run as printed: a server, and the next one after kill -9."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("sglang", reason="needs SGLang; run `make test-sglang`")

import torch
from sglang_rig import Slab, variables, wait_until
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT: Final = Path(__file__).resolve().parents[2]
START: Final = 240  # seconds for a server to come up on a busy machine
# What a CPU and a model without a tokenizer need beside what is printed.
HERE: Final = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--hicache-io-backend", "direct"),
    *("--max-total-tokens", "2048", "--mem-fraction-static", "0.1", "--disable-cuda-graph"),
    *("--skip-tokenizer-init", "--skip-server-warmup"),
]
PROMPT: Final = [1, 17, 42, 7] * 100


def example(path: Path) -> str:
    [printed] = re.findall(r"```\n(python -m sglang\.launch_server .*?)```", path.read_text(), re.DOTALL)
    return str(printed)


def test_it_runs_as_printed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path / "path" / "to" / "checkpoint")
    first = ask_server(tmp_path)
    assert (first["meta_info"]["cached_tokens_details"] or {}).get("storage", 0) == 0
    second = ask_server(tmp_path)
    assert second["meta_info"]["cached_tokens_details"]["storage"] == 384  # of 400: six pages of 64
    assert second["output_ids"] == first["output_ids"]


def ask_server(home: Path) -> Any:
    """Start the example in `home`, ask, wait until what it computed is stored, kill it."""
    command = example(ROOT / "README.md").replace("\\\n", "").replace('"64GiB"', '"64MiB"')
    _, _, _, *options = shlex.split(command)  # python -m sglang.launch_server
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = Path(__file__).with_name("_sglang_server.py")
    with (home / "server.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, str(server), *options, *HERE, "--port", url.rpartition(":")[2]],
            cwd=home,
            env={**os.environ, **variables(home / "path" / "to" / "checkpoint")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(url, process, home / "server.log"), "the server to be up", START)
        answer = ask(url, PROMPT)
        wait_until(lambda: len(Slab(home / "kv-cache").names()) >= 6, "pages to be written")
        return answer
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        time.sleep(0.5)


def answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, prompt: list[int]) -> Any:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    asked = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.load(response)

"""A prefill and a decode vLLM server side by side, started as docs/vllm.md prints it, and what a proxy does between."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from node_rig import ROOT, free_port
from vllm_rig import BLOCK

SECTION: Final = "## Prefill and decode on different nodes"
ASKED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's own proxies send to the prefill server as `kv_transfer_params`."""

_START: Final = 400.0  # seconds: processes that import torch and vLLM, beside other tests


def variables(**more: str) -> dict[str, str]:
    """The environment of vLLM's own processes. They log to stderr."""
    path = os.pathsep.join([str(ROOT / "tests" / "interop"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    return {**os.environ, "PYTHONPATH": path, **settings, **more}


class Answer(NamedTuple):
    tokens: list[int]
    cached: int  # tokens of the prompt that were not computed


class Server:
    """One `vllm serve`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """`command` is as a user types it, model and options behind `vllm serve`; it starts in the background."""
        assert list(command[:2]) == ["vllm", "serve"]
        _, _, path, *arguments = command
        self.port = int(arguments[arguments.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        usual = {"--max-model-len": "1024", "--num-gpu-blocks-override": "128", "--served-model-name": "m"}
        arguments += chain.from_iterable(each for each in usual.items() if each[0] not in arguments)
        arguments += ["--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
        arguments += ["--block-size", str(BLOCK), "--enable-prompt-tokens-details"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                # what `vllm serve` runs; the CPU build's command wants a package by the name of the GPU build's
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *arguments],
                env=variables(VLLM_SERVER_DEV_MODE="1"),  # /reset_prefix_cache
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_ready(self) -> None:
        end = time.monotonic() + _START
        while True:
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=1).status_code == 200:
                    return
            time.sleep(0.2)

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        params: Mapping[str, Any] | None = None,
        *,
        replica: int | None = None,
    ) -> tuple[Answer, dict[str, Any] | None]:
        """The answer, and the `kv_transfer_params` in it. `replica`: by which data-parallel one, not by any."""
        asked = {"model": "m", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        asked |= {"return_token_ids": True, **({"kv_transfer_params": dict(params)} if params else {})}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        got = httpx.post(f"{self.url}/v1/completions", json=asked, headers=headers, timeout=120)
        assert got.status_code == 200, got.text
        said = got.json()
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(said["choices"][0]["token_ids"], details.get("cached_tokens") or 0), said.get(
            "kv_transfer_params"
        )

    def forget_l1(self) -> None:
        """vLLM's own prefix cache is empty."""
        assert httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).status_code == 200

    def kill(self) -> None:
        """kill -9, with its engine and worker processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()


class Pair(NamedTuple):
    prefill: Server
    decode: Server

    def ask(self, prompt: Sequence[int], num_tokens: int = 16) -> Answer:
        """As a proxy: have the prefill server compute the prompt, and the decode server go on, at once."""
        params = self.hand_over(prompt)
        return self.decode.ask(prompt, num_tokens, params)[0]

    def hand_over(self, prompt: Sequence[int]) -> dict[str, Any] | None:
        return self.prefill.ask(prompt, 1, ASKED)[1]


def printed_commands(over_daemon: bool) -> list[list[str]]:
    """The section's two `vllm serve …`, or the same with the extra config that it gives for one node's daemon."""
    section = (ROOT / "docs" / "vllm.md").read_text().split(SECTION)[1].split("\n## ")[0]
    block = next(part for part in section.split("```")[1::2] if "vllm serve" in part)
    commands = [shlex.split(f"vllm serve {part}") for part in block.split("vllm serve")[1:]]
    assert len(commands) == 2
    if over_daemon:
        [extra] = re.findall(r"`(\{\"service\".*?\}\})`", section, re.DOTALL)
        for command in commands:
            config = json.loads(command[-1])
            command[-1] = json.dumps({**config, "kv_connector_extra_config": json.loads(extra)})
    return commands


@contextlib.contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[Server]:
    """One server for a `with` block, ready to be asked."""
    server = Server(command, log)
    try:
        server.until_ready()
        yield server
    finally:
        server.close()


def pair(over_daemon: bool, changes: Mapping[str, str], logs: Path) -> contextlib.AbstractContextManager[Pair]:
    """Both servers as printed; `changes`: what is printed → what it is here. Ports are free ones."""
    ports, commands = {printed: str(free_port()) for printed in ("8100", "8200")}, []
    for command in printed_commands(over_daemon):
        for printed, here in changes.items():
            assert any(printed in word for word in command), printed
            command = [word.replace(printed, here) for word in command]
        commands.append([ports.get(word, word) for word in command])
    return running(commands, logs)


@contextlib.contextmanager
def running(commands: Iterable[Sequence[str]], logs: Path) -> Iterator[Pair]:
    """A prefill and a decode server, ready."""
    servers: list[Server] = []
    try:
        for command, name in zip(commands, ("prefill", "decode"), strict=True):
            servers.append(Server(command, logs / f"{name}.log"))
        for server in servers:
            server.until_ready()
        yield Pair(*servers)
    finally:
        for server in servers:
            server.close()

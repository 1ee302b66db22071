"""A daemon and an engine of different releases, each of its own code: blocks are found, and the newer side says so."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx2
import pytest
from node_rig import free_port
from release_rig import last_release
from server_rig import wait_for
from service_rig import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROMPT: Final = list(range(5, 105))
OPTIONS: Final = {
    "KVTIER_HOST__SIZE": "8MiB",
    "KVTIER_L1__NUM_BLOCKS": "128",
    "KVTIER_CACHE__LOAD_OR_RECOMPUTE": "load",  # of so small a model computing is always faster
    "KVTIER_CACHE__PREFETCH_DEADLINE": "60s",
}


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return last_release(tmp_path_factory.mktemp("release"))


@contextmanager
def running(tree: Path, log: Path, *arguments: object, **variables: str) -> Iterator[str]:
    """`kvtier ARGUMENTS` of a tree, ready; its address. It stops in order, without a traceback."""
    http = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "kvtier.cli", *map(str, arguments), "--http", http]
    env = {**os.environ, **OPTIONS, **variables, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out, subprocess.Popen(command, cwd=tree, env=env, stderr=out) as process:
        try:
            wait_for(lambda: is_ready(http) or process.poll() is not None, 100)
            assert process.poll() is None, log.read_text()
            yield f"http://{http}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
    assert "Traceback" not in log.read_text(), log.read_text()


def is_ready(http: str) -> bool:
    try:
        return httpx2.get(f"http://{http}/readyz", timeout=10, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def ask(url: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt came from L2."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["kvtier"]["L2"]


@pytest.mark.parametrize("newer", ["engine", "daemon"])
def test_an_engine_finds_its_blocks_with_another_releases_daemon(
    last: Path, model: Path, home: Path, newer: str
) -> None:
    daemons_tree, engines_tree = (last, ROOT) if newer == "engine" else (ROOT, last)
    log, socket = home / "engine.log", home / "s"
    answers = []
    with ExitStack() as node:
        node.enter_context(running(daemons_tree, home / "daemon.log", "serve", "--socket", socket))
        for _ in range(2):  # the second engine has nothing in L1
            engine = running(engines_tree, log, "engine", "--model", model, KVTIER_SERVICE__SOCKET=str(socket))
            with engine as url:
                answers.append(ask(url))
    text, found = answers[0]
    assert found == 0
    assert answers[1] == (text, len(PROMPT) - 1)  # the last token is computed
    if newer == "engine":
        assert "a daemon of kvtier 0.1; upgrade it when you can" in log.read_text()

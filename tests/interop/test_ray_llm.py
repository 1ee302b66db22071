"""`ray.serve.llm` with kvtier's connector, server and router: `make test-ray`, after `make test-vllm`."""

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any, Final

import pytest
from node_rig import ROOT
from redis_rig import standalone

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from ray_rig import SLOW, vllm_checkpoint

ENGINES: Final = (ROOT / ".venv-vllm", ROOT / ".venv-ray")  # what both have is vLLM's
CHILD: Final = Path(__file__).with_name("_ray_llm_child.py")
PREFIX: Final = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"
WHOLE: Final = 224  # of a prompt's first turn, in full blocks
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not ENGINES[0].exists(), reason="no vLLM here; run `make test-vllm` first"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the packages of vLLM and of Ray, as `pip install 'ray[llm]'` would."""
    folder = tmp_path_factory.mktemp("both")
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    below = packages.relative_to(folder)
    (packages / "engines.pth").write_text(
        "".join(f"import site; site.addsitedir({str(engine / below)!r})\n" for engine in ENGINES)
    )
    return folder / "bin" / "python"


def ran(python: Path, *, server: str | None = None, router: str | None = None, **given: Any) -> list[int]:
    given |= {"server": server, "router": router}
    command = [python, CHILD, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **SLOW})
    assert done.returncode == 0, done.stderr[-4000:]
    [line] = (line for line in done.stdout.splitlines() if line.startswith('{"cached"'))  # among Ray's own
    cached: list[int] = json.loads(line)["cached"]
    return cached


def test_with_rays_own_server_a_prompt_is_found_in_redis_wherever_it_goes(python: Path, tmp_path: Path) -> None:
    with standalone() as redis:
        tiers = {"host": {"size": "32MiB"}, "redis": {"url": redis.url}}
        cached = ran(python, model=str(vllm_checkpoint(tmp_path)), tiers=tiers)
    assert min(cached) >= WHOLE


def test_with_rays_own_prefix_router_a_prompt_goes_where_its_blocks_are(python: Path, tmp_path: Path) -> None:
    """As with ours, below: here the text alone leads it."""
    cached = ran(python, model=str(vllm_checkpoint(tmp_path)), router=PREFIX, tiers={"host": {"size": "32MiB"}})
    assert min(cached) >= WHOLE


def test_rays_kv_aware_router_is_for_an_older_vllm(python: Path) -> None:
    """As docs/ray.md says. Where this fails, it is time for a story with that router."""
    code = "import ray.llm._internal.serve.routing_policies.kv_aware.vllm.tokenizer"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600)
    assert "No module named 'vllm.entrypoints.chat_utils'" in done.stderr, done.stderr[-4000:]


def test_with_our_server_and_router_a_prompt_goes_where_its_blocks_are(python: Path, tmp_path: Path) -> None:
    """Each replica has its own memory, and nothing is shared. Chance would do this once in 2^12 tries."""
    server = "kvtier.service.ray.llm_server:KVTierLLMServer"
    cached = ran(python, model=str(vllm_checkpoint(tmp_path)), server=server, tiers={"host": {"size": "32MiB"}})
    assert min(cached) >= WHOLE

"""A vLLM of engine_conversations.py and engine_ttft.py: `_vllm_arm.py PIPE SETUP`.

SETUP is a JSON object: model, arm, folder (of its storage), num_blocks, host_bytes, max_len (tokens of a
prompt and its answer), step_tokens, packages (folders of LMCache's). Scheduler, worker and connector run in one
process, so a token's time is when a step hands it out.
"""

import atexit
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from _rig import be_engine, cpu_seconds, free_port, settle_cpu, stop

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "LMCACHE_LOG_LEVEL": "ERROR"}

CHUNK: Final = 64  # tokens of LMCache's chunks: its default of 256 is more than a turn adds
LOADED: Final = 'kvtier_bytes_total{tier="l2",direction="load"}'
SETTLING: Final = 30.0  # seconds the copies and files of an idle engine may take
RESTING: Final = 10.0  # seconds at most until no thread works any more on what a start leaves to do


def transfer(arm: str, folder: Path, host_bytes: int, port: int) -> dict[str, Any] | None:
    """vLLM's `kv_transfer_config` of an arm; None for `none`."""
    if arm == "none":
        return None
    file = {"path": str(folder), "size": "4GiB"}
    native: dict[str, Any] = {"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offloading"}
    native["cpu_bytes_to_use"] = host_bytes
    ours = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connector.vllm_tier", "file": file}
    lmcache = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    name, extra = {
        "kvtier": ("KVTierConnector", {"host": {"size": host_bytes}, "file": file}),
        "lmcache": ("LMCacheMPConnector", lmcache),
        "example": ("ExampleConnector", {"shared_storage_path": str(folder)}),
        "native": ("OffloadingConnector", native),
        "native files": (
            "OffloadingConnector",
            native | {"secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]},
        ),
        "kvtier below native": ("OffloadingConnector", native | {"secondary_tiers": [ours]}),
    }[arm]
    whole = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    whole |= {"kv_load_failure_policy": "recompute", "engine_id": f"benchmark-{os.getpid()}"}
    modules = {"kvtier": "kvtier.connector.vllm", "lmcache": "lmcache.integration.vllm.lmcache_mp_connector"}
    return whole | ({"kv_connector_module_path": modules[arm]} if arm in modules else {})


def lmcache_server(folder: Path, host_bytes: int, port: int) -> "subprocess.Popen[bytes]":
    """LMCache's own process, over host memory and files in `folder`."""
    options = ["--port", str(port), "--chunk-size", str(CHUNK), "--l1-size-gb", str(host_bytes / (1 << 30))]
    options += ["--supported-transfer-mode", "engine_driven", "--eviction-policy", "LRU", "--disable-observability"]
    options += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder)})]
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *options]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    atexit.register(server.kill)  # however this process ends
    return server


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """A module is not among the loaded ones: vLLM 0.32's start on a CPU looks at all and fails over llvmlite's ffi."""
    import_module("numba")  # LMCache loads it; what it loads is there before it is hidden
    module = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules[name] = module


class VllmArm:
    def __init__(self, setup: dict[str, Any]) -> None:
        sys.path[:0] = setup["packages"]
        os.environ["PYTHONPATH"] = os.pathsep.join([*setup["packages"], os.environ["PYTHONPATH"]])
        folder, host_bytes, port = Path(setup["folder"]), int(setup["host_bytes"]), free_port()
        self.server = lmcache_server(folder, host_bytes, port) if setup["arm"] == "lmcache" else None
        from vllm_rig import Engine

        options = {"num_gpu_blocks_override": setup["num_blocks"], "max_model_len": setup["max_len"]}
        options |= {"max_num_seqs": 16, "max_num_batched_tokens": setup["step_tokens"]}
        with hidden("llvmlite.binding.ffi"):
            wanted = transfer(setup["arm"], folder, host_bytes, port)
            self.engine = Engine(Path(setup["model"]), transfer=wanted, **options)
        self.llm: Any = self.engine.llm.llm_engine
        self.core: Any = self.engine.core.engine_core
        self.ids, self.cpu = 0, 0.0

    # engine_conversations.py

    def converse(self, prompts: list[list[int]], num_tokens: int, clients: int) -> dict[str, Any]:
        """Ask the prompts in their order, `clients` of them at a time; each answer has `num_tokens` tokens.

        Returns of each prompt its seconds to the first token, from token to token, its cached tokens and its text.
        """
        self.cpu = self._cpu_seconds()
        waiting, places = deque(enumerate(prompts)), dict[str, int]()
        asked, came = [0.0] * len(prompts), [list[float]() for _ in prompts]
        texts, cached = [list[int]() for _ in prompts], [0] * len(prompts)
        begun = time.perf_counter()
        while waiting or places:
            while waiting and len(places) < clients:
                place, prompt = waiting.popleft()
                asked[place] = time.perf_counter()
                places[self._add(prompt, num_tokens)] = place
            outputs = self.llm.step()
            now = time.perf_counter()
            for output in outputs:
                place = places[output.request_id]
                if output.outputs and output.outputs[0].token_ids:
                    came[place].append(now)
                    texts[place] += output.outputs[0].token_ids
                if output.finished:
                    cached[place] = output.num_cached_tokens or 0
                    del places[output.request_id]
        seconds = time.perf_counter() - begun
        firsts = [times[0] - start for times, start in zip(came, asked, strict=True)]
        gaps = [[b - a for a, b in pairwise(times)] for times in came]
        return {"seconds": seconds, "ttft": firsts, "itl": gaps, "cached": cached, "texts": texts}

    def warm(self, prompts: list[list[int]]) -> None:
        """Ask prompts that have nothing to do with the others, twice: the second time from the tiers.

        Then wait for what goes on behind the start in every way, such as the first touch of host memory.
        """
        for _ in range(2):
            self.converse(prompts, 4, 2)
            self._forget()
        settle_cpu(self._cpu_seconds, RESTING)

    def close(self) -> float:
        """Copies and files end, and the engine with them. CPU seconds since the conversations began, all processes."""
        self._settle()
        self.engine.core.shutdown()
        return self._cpu_seconds() - self.cpu

    # engine_ttft.py

    def ttft(self, prompt: list[int]) -> tuple[float, int | None]:
        """Of a prompt, alone: seconds to the first token, and cached tokens."""
        self._forget()
        begun, cached = time.perf_counter(), None
        self._add(prompt, 1)
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                cached = output.num_cached_tokens
        return time.perf_counter() - begun, cached

    def work(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Serve a batch: seconds of CPU, with its copies."""
        self._forget()
        cpu = time.process_time()
        for prompt in prompts:
            self._add(prompt, num_tokens)
        self._finish()
        self._forget()
        return time.process_time() - cpu

    def decode(self, stems: list[list[int]], hits: list[list[int]], num_cycles: int) -> dict[str, list[float]]:
        """Times of eight steps of unrelated decoding requests, every other time with a load of a long hit beside them.

        The request that loads is aborted before it computes: what is left of it is its lookup and its copies.
        """
        self._forget()
        before = self.engine.stats()[LOADED]
        for stem in stems:
            self._add(stem, 8 * num_cycles + 16)
        for _ in range(8):
            self.llm.step()
        times: dict[str, list[float]] = {"loading": [], "quiet": []}
        for number in range(num_cycles):
            begun = time.perf_counter()
            guest = self._add(hits[number // 2 % len(hits)], 1) if number % 2 else None
            for step in range(8):
                self.llm.step()
                if guest is not None and step == 0:
                    self.llm.abort_request([guest])
            times["loading" if guest else "quiet"].append(time.perf_counter() - begun)
        self._finish()
        assert self.engine.stats()[LOADED] > before, "the hits are not loaded"
        return times

    def end(self) -> None:
        """LMCache's process ends, if there is one. Idempotent."""
        if self.server is not None:
            stop(self.server)

    def _add(self, tokens: list[int], num_tokens: int) -> str:
        from vllm.sampling_params import RequestOutputKind
        from vllm_rig import greedy

        self.ids += 1
        options = greedy(num_tokens)
        options.output_kind = RequestOutputKind.DELTA
        self.llm.add_request(str(self.ids), {"prompt_token_ids": tokens}, options)
        return str(self.ids)

    def _finish(self) -> None:
        while self.llm.has_unfinished_requests():
            self.llm.step()

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLING
        while self.core.scheduler.has_requests() and time.monotonic() < deadline:
            self.core.step()

    def _forget(self) -> None:
        """Copies have ended, and vLLM's own cache is as good as too small: it is empty."""
        self._settle()
        self.llm.reset_prefix_cache()

    def _cpu_seconds(self) -> float:
        """So far, of this process and of LMCache's."""
        return time.process_time() + (0.0 if self.server is None else cpu_seconds(self.server.pid))


if __name__ == "__main__":
    for name in ("numba", "vllm_rig", "host_offloading", "kvtier.connector.vllm"):  # what every engine needs
        import_module(name)
    be_engine(VllmArm)

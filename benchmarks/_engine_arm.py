"""One vLLM of benchmarks/engine_ttft.py, in a process of its own: JSON commands on stdin, a line of JSON for each.

`_engine_arm.py MODEL ARM FOLDER NUM_BLOCKS MAX_LEN`; ARM is "none", "kvtier", "native" or "example".
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

REPLIES: Final = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the engine prints is no reply
HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "interop")]
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm_rig import Engine, greedy  # noqa: E402


def transfer(arm: str, folder: Path) -> dict[str, Any] | None:
    """vLLM's `kv_transfer_config` of an arm."""
    common: dict[str, Any] = {"kv_role": "kv_both"}
    extra: dict[str, Any]
    if arm == "kvtier":
        extra = {"host": {"size": "2GiB"}, "file": {"path": str(folder), "size": "4GiB"}}
        module = {"kv_connector_module_path": "kvtier.connector.vllm", "kv_load_failure_policy": "recompute"}
        return {**common, **module, "kv_connector": "KVTierConnector", "kv_connector_extra_config": extra}
    if arm == "native":
        spec = {"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offloading"}
        extra = {**spec, "cpu_bytes_to_use": 2 << 30}
        return {**common, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if arm == "example":
        extra = {"shared_storage_path": str(folder)}
        return {**common, "kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
    return None


class EngineArm:
    """The engine and what can be asked of it."""

    def __init__(self, model: Path, arm: str, folder: Path, num_blocks: int, max_len: int) -> None:
        options: dict[str, Any] = {"num_gpu_blocks_override": num_blocks, "max_model_len": max_len, "max_num_seqs": 16}
        self.engine = Engine(model, transfer=transfer(arm, folder), **options, max_num_batched_tokens=max_len)
        self.llm: Any = self.engine.llm.llm_engine
        self.ids = 0

    def add(self, tokens: list[int], num_tokens: int) -> str:
        self.ids += 1
        self.llm.add_request(str(self.ids), {"prompt_token_ids": tokens}, greedy(num_tokens))
        return str(self.ids)

    def finish(self) -> None:
        while self.llm.has_unfinished_requests():
            self.llm.step()

    def forget(self) -> None:
        """Copies have ended, and vLLM's own cache is as good as too small: it is empty."""
        core = self.engine.core.engine_core
        deadline = time.monotonic() + 20
        while core.scheduler.has_requests() and time.monotonic() < deadline:
            core.step()
        self.llm.reset_prefix_cache()

    def ttft(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to the first token of a prompt, alone."""
        self.forget()
        begun = time.perf_counter()
        self.add(prompt, 1)
        cached = None
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                cached = output.num_cached_tokens
        return {"seconds": time.perf_counter() - begun, "cached": cached}

    def work(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Serve a batch: seconds of wall and of CPU, its copies included."""
        self.forget()
        wall, cpu = time.perf_counter(), time.process_time()
        for prompt in prompts:
            self.add(prompt, num_tokens)
        self.finish()
        seconds = time.perf_counter() - wall
        self.forget()
        return {"seconds": seconds, "cpu": time.process_time() - cpu}

    def decode(self, stems: list[list[int]], hits: list[list[int]], num_cycles: int) -> dict[str, list[float]]:
        """Times of eight steps of unrelated decoding requests, every other time with a load of a long hit beside them.

        The request that loads is aborted before it computes: what is left of it is its lookup and its copies.
        """
        self.forget()
        for stem in stems:
            self.add(stem, 8 * num_cycles + 16)
        for _ in range(8):
            self.llm.step()
        times: dict[str, list[float]] = {"loading": [], "quiet": []}
        for number in range(num_cycles):
            begun = time.perf_counter()
            guest = self.add(hits[number // 2 % len(hits)], 1) if number % 2 else None
            for step in range(8):
                self.llm.step()
                if guest is not None and step == 0:
                    assert self._copies(), "the hit is not loaded"
                    self.llm.abort_request([guest])
            times["loading" if guest else "quiet"].append(time.perf_counter() - begun)
        self.finish()
        return times

    def _copies(self) -> bool:
        connector = self.engine.scheduler.connector
        return bool(connector is not None and hasattr(connector, "_scheduler") and connector._scheduler._ops)


def main() -> None:
    """Answer commands until stdin ends."""
    model, arm, folder, num_blocks, max_len = sys.argv[1:]
    served = EngineArm(Path(model), arm, Path(folder), int(num_blocks), int(max_len))
    print(json.dumps({"ready": True}), file=REPLIES, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(served, command.pop("do"))(**command)
        print(json.dumps(reply), file=REPLIES, flush=True)
    served.engine.core.shutdown()


if __name__ == "__main__":
    main()

"""A vLLM engine with native offloading in a process of its own: takes the steps of a job on stdin, prints JSON."""

import errno
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.tiers.file.file_io import FileIO

LABELS = ("tier", "direction", "reason")
ATTEMPTS = 30  # of a request, until the tier is in use again


class Disk:
    """Stands before every payload transfer of the file tier: well, failing, or silent until it is well again."""

    def __init__(self) -> None:
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()

    def become(self, state: str) -> None:
        self.failing = state == "failing"
        (self.gate.clear if state == "silent" else self.gate.set)()

    def before(self, call: Callable[..., int]) -> Callable[..., int]:
        def guarded(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.gate.wait(60)
            return call(io, fd, buffers, offset)

        return guarded


def main() -> None:
    from vllm import LLM

    disk = Disk()
    FileIO.preadv = disk.before(FileIO.preadv)  # type: ignore[method-assign]
    FileIO.pwritev = disk.before(FileIO.pwritev)  # type: ignore[method-assign]
    job = json.load(sys.stdin)
    faulthandler.dump_traceback_later(job["deadline"], exit=True)  # a hang tells where it is
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": job["engine_id"],
        "kv_connector_extra_config": job["extra"],
    }
    events = _listen(job["options"]) if job["options"].pop("events", False) else []
    llm = LLM(
        model=job["model"],
        kv_transfer_config=transfer if job["extra"] else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        dtype="float32",
        max_model_len=1024,
        disable_log_stats=False,
        **job["options"],
    )
    results = [_told(events) if step["do"] == "events" else _step(llm, disk, step) for step in job["steps"]]
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(results))


def _listen(options: dict[str, Any]) -> list[Any]:
    """Have vLLM publish its KV events, to nobody but this list."""
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import NullEventPublisher

    told: list[Any] = []
    NullEventPublisher.publish = lambda self, batch: told.extend(batch.events)
    options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return told


def _told(events: list[Any]) -> list[dict[str, Any]]:
    """What was told of storage, in words that JSON has."""
    return [
        {
            "is": type(event).__name__,
            "locality": event.locality,
            "hashes": [repr(each) for each in event.block_hashes],
            "tokens": list(getattr(event, "token_ids", ())),
        }
        for event in events
        if getattr(event, "medium", None) == "STORAGE"
    ]


def _generate(llm: Any, step: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    salt = {"cache_salt": step["salt"]} if "salt" in step else {}
    outputs = llm.generate([{"prompt_token_ids": prompt, **salt} for prompt in step["prompts"]], params)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def _step(llm: Any, disk: Disk, step: dict[str, Any]) -> Any:
    from prometheus_client import REGISTRY

    match step["do"]:
        case "generate":
            return _generate(llm, step)
        case "recover":  # ask until that many tokens come from the tier: its probes run in the engine's own steps
            answers: list[dict[str, Any]] = []
            while len(answers) < ATTEMPTS and not (answers and answers[-1]["cached"] == step["cached"]):
                llm.reset_prefix_cache(reset_connector=True)
                answers.append(_generate(llm, step))
            return answers
        case "forget":  # in L1 and in vLLM's own CPU tier
            return llm.reset_prefix_cache(reset_connector=True)
        case "disk":
            return disk.become(step["state"])
        case "truncate":
            return os.truncate(step["path"], step["size"])
        case "metrics":
            samples = [sample for family in REGISTRY.collect() for sample in family.samples]
            return {
                " ".join(
                    [sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)]
                ): sample.value
                for sample in samples
                if sample.name.startswith(("vllm:kvtier_", "vllm:kv_offload_tiering_chunk"))
            }
    raise ValueError(step["do"])


if __name__ == "__main__":
    main()

"""A real SGLang engine in a process of its own: options as JSON in argv, then a JSON request a line, an answer each.

Requests: {"generate": [[token, …], …], …cache_salt and the like}, {"flush": true} empties SGLang's own two tiers,
{"clear": true} its storage, {"detach": true} closes the storage, {"attach": {…}} opens one as its administrator does,
{"update": checkpoint, "flush_cache": bool} changes its weights.
"""

import json
import multiprocessing
import sys
import time
from typing import Any

import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401 -- imported once, for all processes
from sglang.srt.managers.io_struct import GenerateReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.mem_cache.utils import get_hash_str

SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def generated(engine: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    sampling = {**SAMPLING, "max_new_tokens": request.pop("num_tokens", 8)}
    prompts, timed = request.pop("generate"), request.pop("timed", False)
    prompts = prompts[0] if timed else prompts
    asked = GenerateReqInput(input_ids=prompts, sampling_params=sampling, stream=timed, **request)
    started, first = time.monotonic(), 0.0
    outputs: list[dict[str, Any]] = []
    async for output in engine.tokenizer_manager.generate_request(asked, None):
        first = first or time.monotonic() - started
        outputs = [output] if timed else output
    told = []
    for output in outputs:
        where = output["meta_info"]["cached_tokens_details"] or {}
        told.append(
            {
                "tokens": output["output_ids"],
                "storage": where.get("storage", 0),
                "device": where.get("device", 0),
                "first_token": first,
            }
        )
    return told


def answer(engine: Any, request: dict[str, Any]) -> Any:
    if "generate" in request:
        return engine.loop.run_until_complete(generated(engine, request))
    if "flush" in request:
        return engine.flush_cache().success
    manager = engine.tokenizer_manager
    if "update" in request:
        update = UpdateWeightFromDiskReqInput(model_path=request["update"], flush_cache=request["flush_cache"])
        return engine.loop.run_until_complete(manager.update_weights_from_disk(update, None))[0]
    if "attach" in request:
        attached = engine.loop.run_until_complete(manager.attach_hicache_storage(**request["attach"]))
        return [attached.success, attached.message]
    call = manager.clear_hicache_storage if "clear" in request else manager.detach_hicache_storage
    return engine.loop.run_until_complete(call()).success


def main() -> None:
    get_hash_str(list(range(16)), None, page_size=16)  # builds SGLang's extension, before anything waits for it
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for "spawn"
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print("=" + json.dumps(answer(engine, json.loads(line))), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()

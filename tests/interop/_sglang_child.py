"""A real SGLang engine in a process of its own: options as JSON in argv, then a JSON request a line, an answer each.

Requests: {"generate": [[token, …], …], …cache_salt and the like}, {"flush": true} empties SGLang's own two tiers,
{"clear": true} its storage, {"detach": true} closes the storage.
"""

import json
import multiprocessing
import sys
from typing import Any

import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401 -- imported once, for all processes
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.mem_cache.utils import get_hash_str

SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def answer(engine: Any, request: dict[str, Any]) -> Any:
    if "generate" in request:
        asked = GenerateReqInput(input_ids=request.pop("generate"), sampling_params=SAMPLING, **request)
        outputs = engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(asked, None)))
        cached = [output["meta_info"]["cached_tokens_details"] or {} for output in outputs]
        return [
            {"tokens": output["output_ids"], "storage": where.get("storage", 0), "device": where.get("device", 0)}
            for output, where in zip(outputs, cached, strict=True)
        ]
    if "flush" in request:
        return engine.flush_cache().success
    manager = engine.tokenizer_manager
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

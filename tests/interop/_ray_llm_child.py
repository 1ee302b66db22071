"""An application of `ray.serve.llm` with two replicas of vLLM; prints what its answers say of cached tokens, as JSON.

Argument: JSON of `model`, `server` and `router` (a class each, or null for Ray's own) and `tiers`. It runs where Ray
and vLLM both are.
"""

import json
import sys
import time
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

BLOCK = 32  # tokens: vLLM on a CPU has multiples of this alone
TEXT = "What stands in the document that all of us have read so often? " * 4


def main() -> None:
    given = json.loads(sys.argv[1])
    connector = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",  # never another test's cluster
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    router = {"request_router_config": {"request_router_class": given["router"]}} if given["router"] else {}
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": given["model"]},
        server_cls=given["server"],
        deployment_config={"num_replicas": 2, **router},
        placement_group_config={"bundles": [{"CPU": 1}]},
        engine_kwargs={
            **{"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": BLOCK},
            "num_gpu_blocks_override": 40,  # fewer than a replica's prompts have: later turns are read from the tiers
            "enable_prompt_tokens_details": True,
            "kv_transfer_config": {**connector, "kv_connector_extra_config": given["tiers"]},
        },
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [config], "ingress_deployment_config": {"num_replicas": 1}}))
    print(json.dumps({"cached": asked(int(time.time()))}))
    serve.shutdown()
    ray.shutdown()


def asked(seed: int) -> list[int]:
    """Cached tokens of twelve prompts' second turns. A plain prompt has no session, so that only its blocks lead it."""
    prompts = [f"{seed}, text {number}: {TEXT}" for number in range(12)]
    later = [f"{prompt}{completed(prompt)['choices'][0]['text']} And then?" for prompt in prompts]
    time.sleep(3)  # until the router has read the events
    return [completed(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for prompt in later]


def completed(prompt: str) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0.0}
    return httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=120).raise_for_status().json()


if __name__ == "__main__":
    main()

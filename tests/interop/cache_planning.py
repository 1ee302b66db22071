"""vLLM's own planning of a worker's KV cache, which has another place in each release that is tested."""

from collections.abc import Mapping
from typing import Any


def planned(vllm_config: Any, specs: Mapping[str, Any], num_bytes: int = 1 << 30) -> Any:
    """vLLM's KVCacheConfig of one worker with these layers and so much memory."""
    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    except ImportError:  # 0.33 plans the groups of all workers first
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

        groups = get_global_kv_cache_groups(vllm_config, [dict(specs)])
        [worker] = get_kv_cache_configs(vllm_config, [dict(specs)], [num_bytes], groups)
    else:
        [worker] = get_kv_cache_configs(vllm_config, [dict(specs)], [num_bytes])
    return worker

"""Says of a vLLM configuration whether kvtier can serve it: vLLM's version, the set-up, and what kernels can do."""

from typing import Any, Final

import vllm

from kvtier.connector.vllm.drafts import require_known_method
from kvtier.tiers import ConfigError

SUPPORTED: Final = ((0, 32), (0, 34))  # from, below: releases whose connector interface this code is written for


def require_supported_version() -> None:
    """Raise ConfigError if this version of vLLM is not supported."""
    numbers = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        oldest, newest = (".".join(map(str, version)) for version in SUPPORTED)
        raise ConfigError(f"vLLM {vllm.__version__}: this kvtier works with {oldest} up to below {newest}; install one")


def require_supported(vllm_config: Any) -> None:
    """Raise ConfigError, which ends with what does work, for a set-up that kvtier cannot serve right."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            fix = "set it to 1, and divide the model by tensor_parallel_size or pipeline_parallel_size"
            raise ConfigError(f"{name} {size}: a rank's blocks would not hold consecutive tokens; {fix}")
    require_known_method(vllm_config.speculative_config)
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError('load_format "dummy": random weights have no name for their blocks; load a checkpoint')
    if model.is_encoder_decoder:
        fix = "start it without --kv-transfer-config; decoder-only models are kept"
        raise ConfigError(f"model {model.model!r}: vLLM has no KV connectors for encoder-decoder models; {fix}")


def why_none(vllm_config: Any) -> str | None:
    """Why loaded KV could not be used with this configuration; None if it can."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if vllm_config.model_config.use_mla and not (cache.enable_prefix_caching or scheduler.enable_chunked_prefill):
        fix = "use a GPU, or a CPU with AMX"
        return f"vLLM's MLA kernel on this platform computes whole prompts, and cannot go on after a prefix; {fix}"
    return None

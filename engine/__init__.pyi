from .config import EngineConfig
from .llm import Engine, engine_config, open_engine
from .model import Model
from .prefill_time import REPEATS, measure_prompts
from .requests import FinishReason, Guide, NamedPrompt, Output, SamplingParams, TokenLogprobs
from .segments import wanted_reuse
from .sequence import Completion, Sequence

__all__ = [
    "REPEATS",
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Guide",
    "Model",
    "NamedPrompt",
    "Output",
    "SamplingParams",
    "Sequence",
    "TokenLogprobs",
    "engine_config",
    "measure_prompts",
    "open_engine",
    "wanted_reuse",
]

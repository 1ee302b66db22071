from .completion import Completion
from .config import EngineConfig
from .guided import Guide
from .llm import Engine
from .local import engine_config, open_engine
from .model import Model
from .prefill_time import REPEATS, measure_prompts
from .segment_requests import wanted_reuse
from .sequence import FinishReason, NamedPrompt, Output, SamplingParams, Sequence, TokenLogprobs

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

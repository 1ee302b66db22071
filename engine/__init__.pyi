from .completion import Completion
from .config import EngineConfig
from .llm import Engine
from .local import engine_config, open_engine
from .model import Model
from .segment_requests import SEGMENT_OUTCOMES, wanted_reuse
from .sequence import FinishReason, NamedPrompt, Output, SamplingParams, Sequence

__all__ = [
    "SEGMENT_OUTCOMES",
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Model",
    "NamedPrompt",
    "Output",
    "SamplingParams",
    "Sequence",
    "engine_config",
    "open_engine",
    "wanted_reuse",
]

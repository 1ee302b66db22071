from .completion import Completion
from .config import EngineConfig
from .llm import Engine
from .local import engine_config, open_engine
from .model import Model
from .segment import Repair, Segment
from .sequence import FinishReason, NamedPrompt, Output, RequestError, SamplingParams, Sequence

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Model",
    "NamedPrompt",
    "Output",
    "Repair",
    "RequestError",
    "SamplingParams",
    "Segment",
    "Sequence",
    "engine_config",
    "open_engine",
]

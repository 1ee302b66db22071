from .config import EngineConfig
from .llm import Completion, Engine
from .local import engine_config, open_engine
from .model import Model
from .sequence import FinishReason, NamedPrompt, Output, RequestError, SamplingParams, Sequence

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Model",
    "NamedPrompt",
    "Output",
    "RequestError",
    "SamplingParams",
    "Sequence",
    "engine_config",
    "open_engine",
]

from .completion import Completion
from .config import EngineConfig
from .llm import Engine
from .local import engine_config, open_engine
from .model import Model
from .sequence import FinishReason, NamedPrompt, Output, SamplingParams, Sequence

__all__ = [
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
]

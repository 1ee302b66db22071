from .generation import GenerateOptions, generate, save_model
from .story import DemoOptions, demo, require_checkpoint, train_tokenizer
from .worker import BLOCK_SIZE, DemoEngine, demo_model

__all__ = [
    "BLOCK_SIZE",
    "DemoEngine",
    "DemoOptions",
    "GenerateOptions",
    "demo",
    "demo_model",
    "generate",
    "require_checkpoint",
    "save_model",
    "train_tokenizer",
]

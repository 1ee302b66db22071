"""For a parent of forks to import: `kvtier model` makes a tiny model there, with the context of the real one."""

from typing import Any

from tiny_models import SIZES
from transformers import LlamaConfig

from kvtier.engine.demo import generation, worker

_REAL = worker.demo_model()


def small_model() -> LlamaConfig:
    """Its vocabulary and context are the real one's, and a token takes a thousandth of its work."""
    own: dict[str, Any] = {"vocab_size": _REAL.vocab_size, "max_position_embeddings": _REAL.max_position_embeddings}
    return LlamaConfig(**SIZES | own)


for module in (generation, worker):
    vars(module)["demo_model"] = small_model

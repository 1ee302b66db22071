"""Engines over tiny models for the stories, with and without tiers, and what is asked of all of them at the end."""

from collections.abc import Callable
from typing import Any

from tiny_models import config_of

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.config.config import Config

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
KEEP = SamplingParams(max_tokens=8, ignore_eos=True, keep_logits=True)

Make = Callable[..., Engine]


def small_engine(
    family: str = "llama",
    dtype: str = "float32",
    tiers: bool = False,
    cache: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """An engine of whole blocks; `options` are EngineConfig's, `cache` our configuration's section of that name.

    Stories of what a hit does tell blocks apart by counts; those of hits inside a block are in test_partial_blocks.
    """
    chosen: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "partial_blocks": False,
        **options,
    }
    settings = EngineConfig(**chosen)
    connect = None
    if tiers:
        section = {"block_size": settings.block_size, "load_or_recompute": "load", **(cache or {})}
        connect = LocalConnector.connect(Config(host={"size": "4MiB"}, cache=section))
    return Engine.from_config(config_of(family), settings, connect, dtype=dtype)


def settled(engine: Engine) -> None:
    """Every block computed so far is in L2."""
    assert engine.drain(60)
    assert isinstance(engine.connector, LocalConnector)
    assert engine.connector.hierarchy.drain(60)


def end(engine: Engine) -> None:
    """Close it; its laws hold and nothing leaked."""
    assert engine.drain(60)
    if isinstance(engine.connector, LocalConnector):
        engine.connector.hierarchy.drain(60)
        engine.connector.hierarchy.check()
    engine.close()
    engine.close()
    engine.pool.check()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks

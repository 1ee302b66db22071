"""Engines over tiny models for the stories, with and without tiers, and what is asked of all of them at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import config_of, plain, plain_logits

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.config.config import Config
from kvtier.tiers.naming.chain import TokenChain, root_hash

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


def over_slab(home: Path, cache: dict[str, Any] | None = None, **options: Any) -> Engine:
    """An engine over host memory and the slab in `home`. It loads what is stored, however long that takes."""
    section = {"block_size": 16, "load_or_recompute": "load", "prefetch_deadline": "60s", **(cache or {})}
    file = {"path": str(home), "size": "64MiB", "deadline": "60s"}
    config = Config.load(host={"size": "8MiB"}, file=file, cache=section)
    chosen: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options}
    return Engine.from_config(config_of("llama"), EngineConfig(**chosen), LocalConnector.connect(config))


def names_of(engine: Engine, tokens: list[int], salt: str | None = None) -> list[bytes]:
    """What a prompt's full blocks are called."""
    chain = TokenChain(root_hash(engine.identity.fingerprint(), cache_salt=salt), engine.config.block_size)
    chain.extend(tokens)
    return chain.hashes


def off_full_prefill(logits: list[Any], tokens: list[int], num_prompt: int, family: str = "llama") -> float:
    """How far an answer's logits are from those of a full prefill, relative to these. `tokens`: prompt and answer."""
    full = plain_logits(plain(family), tokens[:-1])[num_prompt - 1 :]
    return float(np.abs(np.stack(logits) - full.numpy()).max() / full.abs().max())


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

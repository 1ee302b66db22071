"""Engines in `exact` mode over tiers that forget what the story says, and the bits that their answers must have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_engines import settled
from tiny_models import config_of

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers.config.config import Config

EXACT: dict[str, Any] = {"exact": True, "exact_rows": 128, "max_num_batched_tokens": 100, "max_num_seqs": 4}


def keep(max_tokens: int = 2) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, keep_logits=True)


class Bits:
    """The logits of an engine without any cache, for any prompt."""

    def __init__(self, family: str = "llama") -> None:
        settings = EngineConfig(num_blocks=80, enable_prefix_caching=False, **EXACT)
        self._engine = Engine.from_config(config_of(family), settings)
        self._known: dict[tuple[int, ...], bytes] = {}

    def of(self, tokens: list[int], max_tokens: int = 2) -> bytes:
        key = (max_tokens, *tokens)
        if key not in self._known:
            self._known[key] = bits(self._engine.generate([tokens], keep(max_tokens))[0])
        return self._known[key]


def bits(answer: Completion) -> bytes:
    return np.stack(answer.logits).tobytes()


def engine_over(
    home: Path | None, block_size: int, family: str = "llama", host: dict[str, Any] | None = None, **options: Any
) -> Engine:
    """An engine over L2, and a slab where a home is given."""
    cache = {"block_size": block_size, "load_or_recompute": "load", "prefetch_deadline": "60s"}
    sections: dict[str, Any] = {"host": host or {"size": "8MiB"}, "cache": cache}
    if home is not None:
        sections["file"] = {"path": str(home), "size": "64MiB"}
    chosen = EXACT | {"block_size": block_size, "num_blocks": 2560 // block_size} | options
    config = EngineConfig(**chosen)
    return Engine.from_config(config_of(family), config, LocalConnector.connect(Config(**sections)))


Over = Callable[..., Engine]  # the fixture: `engine_over`, and each engine ends by its laws


def forget(engine: Engine, down_to: str) -> None:
    """Drop the tiers above this one."""
    settled(engine)
    if down_to != "L1":
        engine.pool.reset()
    if down_to == "slab":
        assert isinstance(engine.connector, LocalConnector)
        engine.connector.hierarchy.host.pool.reset()

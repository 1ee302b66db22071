"""From a configuration to a running engine with its tiers, in one call."""

from pathlib import Path
from typing import Any

from kvtier.connector import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.tiers.config import Config, ConfigSource


def engine_config(config: Config, **options: Any) -> EngineConfig:
    """What an engine takes from the configuration ([cache] and [l1]); `options` are EngineConfig's own fields."""
    return EngineConfig(
        **{
            "block_size": config.cache.block_size,
            "hash_scheme": config.cache.hash,
            "epoch": config.cache.epoch,
            "lossy": config.cache.lossy,
            "partial_blocks": config.cache.partial_blocks,
            "store_generated": config.cache.store_generated,
            "cache_salt": config.cache.cache_salt,
            "segments": config.cache.segments,
            "segment_min_tokens": config.cache.segment_min_tokens,
            "repair_share": config.cache.repair_share,
            "repair_rule": config.cache.repair_rule,
            "num_blocks": config.l1.num_blocks,
            "l1_bytes": config.l1.size,
            "enable_prefix_caching": config.l1.enable_prefix_caching,
            **options,
        }
    )


def open_engine(
    path: str | Path,
    config: ConfigSource | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    **options: Any,
) -> Engine:
    """An engine over a local checkpoint directory, its L2 and lower tiers as `config` says (default: the environment).

    `config` is a Config, `{section: {option: value}}` or the name of a TOML file.
    `device` "auto" is a GPU where there is one; `options` are further fields of EngineConfig. Raises ConfigError where
    checkpoint, memory or disk cannot be used.
    """
    settings = Config.of(config)
    model = Model.from_pretrained(path, dtype=dtype, device=device)
    return Engine(model, engine_config(settings, **options), LocalConnector.connect(settings))

"""What a prompt takes to its first token: computed, and with its KV in each tier. Measured through a whole engine."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from transformers import AutoConfig

from kvtier.connector import LocalConnector
from kvtier.engine.llm import Engine
from kvtier.engine.local import engine_config
from kvtier.engine.model import Model
from kvtier.engine.sequence import SamplingParams
from kvtier.tiers import ConfigError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy, evict_everywhere

_SALT: Final = "kvtier worth"  # nobody else finds what is measured here
_REPEATS: Final = 3  # of which the fastest counts: what disturbs only makes slower
_SPARE: Final = 8  # blocks of L1 beside a prompt's
_DEADLINE: Final = 60.0  # seconds for stores to reach the lowest tier


class PromptTimes(NamedTuple):
    """Seconds to the first token of a prompt of so many tokens."""

    num_tokens: int
    compute: float
    by_tier: dict[str, float]  # with its KV in that tier; only tiers that had all of it


class MeasuredModel(NamedTuple):
    name: str
    device: str
    bytes_per_token: float  # of KV
    times: list[PromptTimes]


def measure_prompts(
    path: Path, config: Config, lengths: Sequence[int], advance: Callable[[], None], *, device: str = "auto"
) -> MeasuredModel:
    """Measure prompts of these lengths, shortest first; a directory with a config.json alone gets random weights.

    `advance` is called behind each length. What was stored is dropped again. ConfigError where the model or a tier
    cannot be used, or a length is more than the model takes.
    """
    if any(path.glob("*.safetensors")) or not (path / "config.json").is_file():
        model = Model.from_pretrained(path, device=device)
    else:
        model = Model.from_config(AutoConfig.from_pretrained(path, local_files_only=True), device=device)
    always = {"load_or_recompute": "load", "prefetch_deadline": _DEADLINE}
    config = config.model_copy(update={"cache": config.cache.model_copy(update=always)})
    blocks = -(-max(lengths) // config.cache.block_size) + _SPARE
    settings = engine_config(config, num_blocks=blocks, max_num_seqs=1)
    with Engine(model, settings, LocalConnector.connect(config)) as engine:
        if max(lengths) >= engine.max_model_len:
            raise ConfigError(f"tokens {max(lengths)}: the model takes {engine.max_model_len - 1} at the most")
        times = []
        _first_token(engine, [0] * min(lengths))  # what is compiled or allocated once
        for number, length in enumerate(sorted(set(lengths))):
            times.append(_measured(engine, config, length, number))
            advance()
        per_token = engine.shape.block_bytes / engine.config.block_size
        return MeasuredModel(model.name, str(model.device), per_token, times)


def _measured(engine: Engine, config: Config, length: int, number: int) -> PromptTimes:
    """Each time another prompt: computed first, then from every tier it has reached by then."""
    taken: dict[str, list[float]] = {}
    dice = np.random.default_rng(number)
    for _ in range(_REPEATS):
        prompt = dice.integers(0, engine.model.vocab_size, length).tolist()
        names = list(engine.prompt(prompt, _SALT).chain.hashes)  # type: ignore[union-attr]
        taken.setdefault("compute", []).append(_first_token(engine, prompt)[0])
        tiers = engine.connector.tiers if isinstance(engine.connector, LocalConnector) else None
        engine.drain(_DEADLINE)
        if tiers is None or not tiers.drain(_DEADLINE):
            continue
        for tier in ("host", *_lower(config, tiers)):
            if tier != "host" and isinstance(tiers, Hierarchy):
                tiers.host.pool.evict(names)
            engine.pool.reset()
            seconds, num_loaded = _first_token(engine, prompt)
            if num_loaded >= (length - 1) // engine.config.block_size * engine.config.block_size:
                taken.setdefault(tier, []).append(seconds)
            engine.drain(_DEADLINE)
        if isinstance(tiers, Hierarchy):
            evict_everywhere(tiers, names, _DEADLINE)
        engine.pool.reset()
    fastest = {tier: min(seconds) for tier, seconds in taken.items()}
    return PromptTimes(length, fastest.pop("compute"), fastest)


def _lower(config: Config, tiers: object) -> list[str]:
    """The nearest tier below host memory, if it is this process's own."""
    if not isinstance(tiers, Hierarchy):
        return []
    return ["file"] if config.file.path is not None else ["redis"] if config.redis.url is not None else []


def _first_token(engine: Engine, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were loaded for it."""
    began = time.perf_counter()
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), cache_salt=_SALT)
    return answer.ttft or time.perf_counter() - began, answer.num_external_tokens

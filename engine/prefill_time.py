"""Measures a prompt's time to first token: computed, and with its KV in each tier, through a whole engine."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from transformers import AutoConfig

from kvtier.connector import LocalConnector
from kvtier.engine.llm import Engine, engine_config
from kvtier.engine.model import Model
from kvtier.engine.requests import NamedPrompt, SamplingParams
from kvtier.tiers import L2, ChainHash, ConfigError, KVTierError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy, evict_everywhere

_SALT: Final = "kvtier worth"  # separates these blocks from others
_SPARE: Final = 8  # blocks of L1 beside a prompt's
REPEATS: Final = 3  # the fastest counts, since disturbances only slow it down

Advance = Callable[[str], None]


class PromptTimes(NamedTuple):
    num_tokens: int
    compute: float
    by_tier: dict[str, float]  # with its KV in that tier; only tiers that had all of it


class MeasuredModel(NamedTuple):
    name: str
    device: str
    bytes_per_token: float  # of KV
    times: list[PromptTimes]


def measure_prompts(
    path: Path, config: Config, lengths: Sequence[int], advance: Advance, *, device: str = "auto", deadline: float = 60
) -> MeasuredModel:
    """Measure prompts of these lengths, shortest first; a directory with a config.json alone gets random weights.

    `deadline`: seconds for each prompt, and for its way into the tiers; past it no further repeat begins.
    `advance` is called before each of `REPEATS` with its title. What was stored is dropped again, except by a daemon.
    ConfigError if the model or a tier cannot be used, or a length exceeds the model's. KVTierError: a prompt was not
    computed in time.
    """
    if not config.l1.enable_prefix_caching:
        raise ConfigError("[l1] enable_prefix_caching: off, so nothing can be loaded; switch it on for kvtier worth")
    advance("loading the model")
    if any(path.glob("*.safetensors")) or not (path / "config.json").is_file():
        model = Model.from_pretrained(path, device=device)
    else:
        model = Model.from_config(AutoConfig.from_pretrained(path, local_files_only=True), device=device)
    if max(lengths) >= model.max_model_len:
        raise ConfigError(f"--tokens {max(lengths)}: the model takes {model.max_model_len - 1} at the most")
    always = {"load_or_recompute": "load", "prefetch_deadline": deadline}
    config = config.model_copy(update={"cache": config.cache.model_copy(update=always)})
    blocks = -(-max(lengths) // config.cache.block_size) + _SPARE
    settings = engine_config(config, num_blocks=blocks, max_num_seqs=1)
    with Engine(model, settings, LocalConnector.connect(config)) as engine:
        stopwatch = _Stopwatch(engine, deadline)
        stopwatch.times_of([0] * min(lengths))  # compilation and allocation
        times = [
            stopwatch.measured(length, number, advance) for number, length in enumerate(sorted(set(lengths)), start=1)
        ]
        per_token = engine.shape.block_bytes / engine.config.block_size
        return MeasuredModel(model.name, str(model.device), per_token, times)


class _Stopwatch:
    """Times prompts of one engine, each computed first, then loaded from every tier that has it by then."""

    def __init__(self, engine: Engine, deadline: float) -> None:
        self._engine, self._deadline = engine, deadline
        connector = engine.connector
        assert isinstance(connector, LocalConnector)
        self._tiers = connector.tiers
        self._own = self._tiers if isinstance(self._tiers, Hierarchy) else None  # else the daemon's

    def measured(self, length: int, seed: int, advance: Advance) -> PromptTimes:
        """A new prompt per repeat; fewer repeats if one takes long."""
        taken: dict[str, list[float]] = {}
        dice = np.random.default_rng(seed)
        until = time.monotonic() + self._deadline
        for repeat in range(REPEATS):
            advance(f"{length} tokens")
            if repeat and time.monotonic() > until:
                continue
            prompt = dice.integers(0, self._engine.model.vocab_size, length).tolist()
            for tier, seconds in self.times_of(prompt).items():
                taken.setdefault(tier, []).append(seconds)
        fastest = {tier: min(seconds) for tier, seconds in taken.items()}
        return PromptTimes(length, fastest.pop("compute"), fastest)

    def times_of(self, prompt: Sequence[int]) -> dict[str, float]:
        """Seconds to its first token: "compute", and by each tier that had all of it. Then its blocks are dropped."""
        engine = self._engine
        names = self._names(prompt)
        taken = {"compute": self._first_token(prompt)[0]}
        whole = (len(prompt) - 1) // engine.config.block_size * engine.config.block_size
        if self._settled():
            for tier in (L2, *(port.name for port in self._own.ports)) if self._own is not None else (L2,):
                self._leave_only(tier, names)
                seconds, num_loaded = self._first_token(prompt)
                if num_loaded >= whole:
                    taken[tier] = seconds
                engine.drain(self._deadline)
        if self._own is not None:
            evict_everywhere(self._own, names, self._deadline)
        engine.pool.reset()
        return taken

    def _first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were loaded for it. KVTierError past the deadline."""
        engine, began = self._engine, time.monotonic()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        request = engine.request(engine.add_request(prompt, params, cache_salt=_SALT))
        while not any(output.request_id == request.request_id for output in engine.step()):
            if time.monotonic() > began + self._deadline:
                engine.abort(request.request_id)
                fix = "use a longer --deadline, fewer --tokens or a smaller model"
                raise KVTierError(f"{len(prompt)} tokens: no first token within {self._deadline:g} s; {fix}")
        seconds = time.monotonic() - began if request.ttft is None else request.ttft
        return seconds, request.num_external_tokens

    def _settled(self) -> bool:
        return self._engine.drain(self._deadline) and self._tiers.drain(self._deadline)

    def _leave_only(self, tier: str, names: Sequence[ChainHash]) -> None:
        """Drop these blocks from L1, and from all tiers that would be used before this one."""
        if self._own is not None and tier != L2:
            self._own.host.pool.evict(names)
            for port in self._own.ports:
                if port.name == tier:
                    break
                if port.tier is not None:
                    port.tier.discard(names)
        self._engine.pool.reset()

    def _names(self, prompt: Sequence[int]) -> list[ChainHash]:
        named: NamedPrompt = self._engine.prompt(prompt, _SALT)
        return [] if named.chain is None else list(named.chain.hashes)

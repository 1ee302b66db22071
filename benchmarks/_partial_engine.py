"""For benchmarks/partial_blocks.py: times of kvtier's engine over prompts that part from a held one inside a block."""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from _report import progress

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.engine.demo import demo_model
from kvtier.tiers.config import Config

TIERS: Final = ("l1", "l2", "file")
_QUESTION: Final = 24  # tokens of the prompt behind what it shares
_DRAIN: Final = 60.0  # seconds
_LOADED: Final = 'kvtier_bytes_total{tier="l2",direction="load"}'


class Asked(NamedTuple):
    """What one prompt took."""

    ttft_ms: float
    cpu_ms: float  # of all threads, until the first token
    cached: int  # tokens
    copied: int  # blocks into L1


class PartialArm:
    """One engine, with partial blocks or without."""

    def __init__(self, model: Model, home: Path, block_size: int, length: int, *, partial: bool) -> None:
        config = Config.load(
            host={"size": "512MiB"},
            file={"path": str(home), "size": "1GiB"},
            cache={"block_size": block_size, "partial_blocks": partial, "load_or_recompute": "load"},
        )
        options = EngineConfig(
            block_size=block_size,
            num_blocks=4 * length // block_size,
            max_num_batched_tokens=1024,
            partial_blocks=partial,
        )
        self.engine = Engine(model, options, LocalConnector.connect(config))
        self.block_bytes = self.engine.shape.block_bytes

    def settle(self) -> None:
        """Every copy has ended, in every tier."""
        assert self.engine.drain(_DRAIN)
        assert self.engine.connector.hierarchy.drain(_DRAIN)  # type: ignore[attr-defined]

    def ask(self, prompt: Sequence[int], tier: str) -> Asked:
        """Ask while only `tier` and those below hold anything."""
        hierarchy = self.engine.connector.hierarchy  # type: ignore[attr-defined]
        self.settle()
        if tier != "l1":
            self.engine.pool.reset()
        if tier == "file":
            hierarchy.host.pool.reset()
        before = hierarchy.stats().get(_LOADED, 0.0)
        begun = time.process_time()
        [answer] = self.engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        cpu = time.process_time() - begun
        self.settle()
        loaded = int(hierarchy.stats().get(_LOADED, 0.0) - before) // self.block_bytes
        assert answer.ttft is not None
        copied = loaded + (answer.num_l1_tokens % self.engine.config.block_size > 0)  # in L1 a part is one copy
        return Asked(answer.ttft * 1e3, cpu * 1e3, answer.num_l1_tokens + answer.num_external_tokens, copied)


@contextmanager
def _arms(model: Model, block_size: int, length: int) -> Iterator[dict[bool, PartialArm]]:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=Path(__file__).parent) as home:
        arms = {
            partial: PartialArm(model, Path(home) / str(partial), block_size, length, partial=partial)
            for partial in (False, True)
        }
        try:
            yield arms
        finally:
            for arm in arms.values():
                arm.engine.close()


def timed(block_sizes: Sequence[int], *, length: int, rounds: int) -> list[dict[str, object]]:
    """A row for each block size, tier and arm: medians over prompts that share from half of a held one's tokens on."""
    model = Model.from_config(demo_model(), seed=0)
    rows: list[dict[str, object]] = []
    for block_size in block_sizes:
        draw = np.random.default_rng(1)
        with _arms(model, block_size, length) as arms:
            for arm in arms.values():
                arm.ask(_tokens(draw, 256), "l1")  # warm up
            seen: dict[tuple[str, bool], list[Asked]] = defaultdict(list)
            for number in range(rounds):
                progress(f"engine, blocks of {block_size}, round {number + 1}/{rounds}")
                for tier in TIERS:
                    _round(arms, draw, length, tier, seen)
        for (tier, partial), found in seen.items():
            ms, cpu, cached, copied = (statistics.median(column) for column in zip(*found, strict=True))
            row: dict[str, object] = {"workload": "engine", "block": block_size, "partial": "on" if partial else "off"}
            row |= {"tier": tier, "TTFT ms": ms, "CPU ms": cpu, "tokens cached": cached}
            rows.append(row | {"copies a request": copied})
    return rows


def _round(
    arms: dict[bool, PartialArm],
    draw: np.random.Generator,
    length: int,
    tier: str,
    seen: dict[tuple[str, bool], list[Asked]],
) -> None:
    """Both arms answer a fresh prompt and then, from a tier, one that parts from it. The order is drawn."""
    held = _tokens(draw, length)
    prompt = held[: int(draw.integers(length // 2, length - 1))]
    prompt += [(held[len(prompt)] + 1) % 8000, *_tokens(draw, _QUESTION)]
    for partial in draw.permutation([False, True]).tolist():
        arms[partial].ask(held, "l1")
        found = arms[partial].ask(prompt, tier)
        seen[tier, partial].append(found)


def _tokens(draw: np.random.Generator, length: int) -> list[int]:
    tokens: list[int] = draw.integers(0, 8000, length).tolist()
    return tokens

"""Time to first token on a GPU, cold and from each tier: kvtier's engine, a Llama-8B's geometry, random weights.

Prompts of 8,192 and 32,768 random tokens, each asked cold, from L1, from L2 (L1 emptied), and from the slab (L1 and L2
emptied, page cache dropped where that is allowed). Every answer is checked to come from the tier it is named after, and
its token against the cold one. With asynchronous loads (a request waits for its whole prefix) and with layerwise ones
(each layer is computed as it arrives). Figures are medians over fresh prompts; a ratio is of one prompt's times.
`--save` writes a plot too. `--dry` runs the same code on this CPU.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import _gpu
import matplotlib
import numpy as np
import torch
from _gpu import BenchRow
from _report import RESULTS, Target, progress, report
from transformers import LlamaConfig

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.tiers.config import Config

matplotlib.use("Agg")
from matplotlib import pyplot

BLOCK_SIZE: Final = 16
TIERS: Final = ("cold", "L1", "L2", "slab")
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
SETTLE: Final = 120.0  # seconds for everything stored to reach the slab
GOALS: Final = (("L2", 20), ("slab", 5))

Loading = Literal["async", "layerwise"]
LOADINGS: Final[tuple[Loading, ...]] = ("async", "layerwise")


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """Which model is asked how long prompts."""

    device: torch.device
    model: dict[str, int]
    dtype: str
    lengths: tuple[int, ...]
    rounds: int
    tier_size: str

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "AskedPrompts":
        """A GPU's, or this CPU's."""
        if device.type == "cpu":
            return cls(device, sizes(64, 128, 2, 4, 2, 512), "float32", (128, 256), 1, "64MiB")
        llama = sizes(4096, 14336, 32, 32, 8, 32000)
        return cls(device, llama, "bfloat16", (8192,) if quick else (8192, 32768), 1 if quick else 2, "12GiB")

    @property
    def vocabulary(self) -> int:
        """Tokens are numbers below it."""
        return self.model["vocab_size"]


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    """What a Llama's configuration calls its geometry."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 65536,
    }


def random_model(prompts: AskedPrompts) -> Model:
    """Made where it runs: a CPU would take minutes for as many random numbers."""
    with torch.device(prompts.device):
        config = LlamaConfig(**prompts.model)  # type: ignore[arg-type]
        model = Model.from_config(config, dtype=prompts.dtype, device=str(prompts.device))
    identity = model.identity(EngineConfig(block_size=BLOCK_SIZE))
    model.identity = lambda config: identity  # type: ignore[method-assign]  # reading all weights takes 16 s an engine
    return model


def opened(model: Model, prompts: AskedPrompts, loading: Loading, home: str) -> Engine:
    """An engine whose L2 is there, and pinned on a GPU, before anything is asked."""
    config = Config.load(
        host={"size": prompts.tier_size},
        file={"path": home, "size": prompts.tier_size, "deadline": "60s"},
        # All of a prompt reaches the slab, and not only what its disk takes while the prompt is computed.
        cache={"load_or_recompute": "load", "prefetch_deadline": "60s", "store_queue": prompts.tier_size},
    )
    settings = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=max(prompts.lengths) // BLOCK_SIZE + 64,
        max_num_batched_tokens=4096,
        max_num_seqs=1,
        loading=loading,
    )
    engine = Engine(model, settings, LocalConnector.connect(config))
    region = hierarchy_of(engine).host.region
    region.wait_prefaulted()
    if prompts.device.type == "cuda" and (region.pinning is None or not region.pinning.wait(600) or not region.pinned):
        engine.close()
        raise SystemExit("L2 could not be pinned, so its figures would be those of pageable memory; raise `ulimit -l`")
    return engine


def hierarchy_of(engine: Engine) -> Any:
    assert isinstance(engine.connector, LocalConnector)
    return engine.connector.hierarchy


def settle(engine: Engine) -> None:
    if not engine.drain(SETTLE) or not hierarchy_of(engine).drain(SETTLE):
        raise SystemExit(f"what was stored has not reached the slab in {SETTLE:.0f} s: the disk is too slow for this")


def ask_each_tier(engine: Engine, prompt: list[int]) -> tuple[dict[str, float], bool]:
    """Milliseconds to the first token from each tier, and whether all of them gave the same one."""
    length = len(prompt) - 1
    ms: dict[str, float] = {}
    tokens = set()
    for tier in TIERS:
        if tier in ("L2", "slab"):
            engine.pool.reset()
        if tier == "slab":
            hierarchy_of(engine).host.pool.reset()
            os.sync()
            if os.access("/proc/sys/vm/drop_caches", os.W_OK):
                Path("/proc/sys/vm/drop_caches").write_text("1")
        [answer] = engine.generate([prompt], ONE)
        wanted = {"cold": (0, 0), "L1": (length, 0)}.get(tier, (0, length))
        if (answer.num_l1_tokens, answer.num_external_tokens) != wanted or answer.ttft is None:
            raise SystemExit(f"{tier}: {answer.num_l1_tokens} tokens from L1, {answer.num_external_tokens} from below")
        ms[tier] = answer.ttft * 1e3
        tokens.add(answer.token_ids[0])
        settle(engine)
    return ms, len(tokens) == 1


def measure(model: Model, prompts: AskedPrompts, loading: Loading) -> Iterator[BenchRow]:
    """One row for each length."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix=".gpu-ttft-", dir=Path(__file__).parent) as home:
        started = time.monotonic()
        engine = opened(model, prompts, loading, home)
        progress(f"{loading}: engine and tiers are there after {time.monotonic() - started:.1f} s")
        try:
            for length in prompts.lengths:
                ask_each_tier(engine, rng.integers(0, prompts.vocabulary, 4 * BLOCK_SIZE + 1).tolist())  # warms up
                rounds = []
                for round_ in range(prompts.rounds):
                    progress(f"{loading}, {length} tokens: round {round_ + 1} of {prompts.rounds}")
                    rounds.append(ask_each_tier(engine, rng.integers(0, prompts.vocabulary, length + 1).tolist()))
                times = [ms for ms, _ in rounds]
                row: BenchRow = {"loading": loading, "tokens": length}
                row |= {f"{tier} ms": round(statistics.median(ms[tier] for ms in times), 2) for tier in TIERS}
                for tier in TIERS[1:]:
                    row[f"cold ÷ {tier}"] = round(statistics.median(ms["cold"] / ms[tier] for ms in times), 2)
                moved = length // BLOCK_SIZE * engine.pool.shape.block_bytes
                row["L2 GB/s"] = round(moved / float(str(row["L2 ms"])) / 1e6, 2)
                yield row | {"same token": all(same for _, same in rounds)}
        finally:
            engine.close()


def goals(rows: Sequence[BenchRow]) -> list[Target]:
    """Of the longest prompt, with each kind of loads."""
    longest = max(int(str(row["tokens"])) for row in rows)
    return [
        Target(f"{longest:,} tokens, {row['loading']}: cold ÷ {tier}", goal, float(str(row[f"cold ÷ {tier}"])), False)
        for tier, goal in GOALS
        for row in rows
        if row["tokens"] == longest
    ]


def draw(rows: Sequence[BenchRow], path: Path) -> None:
    """The times of every tier, by length and kind of loads."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for place, tier in enumerate(TIERS):
        heights = [float(str(row[f"{tier} ms"])) for row in rows]
        bars = axes.bar(np.arange(len(rows)) + 0.2 * (place - 1.5), heights, 0.19, label=tier)
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [f"{row['tokens']} tokens\n{row['loading']}" for row in rows], fontsize=8)
    axes.set_ylabel("time to first token, ms")
    axes.set_title("kvtier's engine on a GPU, a Llama-8B's geometry", fontsize=10)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    """Measure, print, and say whether the goals were met."""
    options = _gpu.arguments(__doc__)
    prompts = AskedPrompts.of(options.device, options.quick)
    progress(f"{prompts.device}: a model of random weights")
    model = random_model(prompts)
    rows = [row for loading in LOADINGS for row in _gpu.told(measure(model, prompts, loading))]
    if options.save:
        draw(rows, RESULTS / "gpu_ttft.png")
    return report("gpu_ttft", rows, goals(rows), options.json, options.save, _gpu.setup_of(options))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())

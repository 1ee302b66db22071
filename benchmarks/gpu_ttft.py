"""Time to first token on a GPU, cold and from each tier: kvtier's engine, a Llama-8B's geometry, random weights.

Prompts of 8,192 and 32,768 random tokens, each asked cold, from L1, from L2 (L1 emptied), and from the slab (L1 and L2
emptied, page cache dropped where allowed). Every answer is checked to come from the tier it is named after, and its
token against the cold one. With asynchronous loads (a request waits for its whole prefix) and with layerwise ones.
Figures are medians over fresh prompts, ratios of one prompt's times. `--dry` runs the same code on this CPU.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

import _gpu
import numpy as np
import torch
from _report import Given, Result, Row, program, progress
from _rig import leave_only, llama, over_slab, random_tokens, scratch, settle

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams

BLOCK_SIZE: Final = 16
TIERS: Final = {
    "cold": "l1",
    "L1": "l1",
    "L2": "l2",
    "slab": "file",
}  # what answers → the tier above which all is empty
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)

Loading = Literal["async", "layerwise"]
LOADINGS: Final[tuple[Loading, ...]] = ("async", "layerwise")


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """Which model is asked how long prompts."""

    device: torch.device
    model: Any
    dtype: str
    lengths: tuple[int, ...]
    rounds: int
    tier_size: str

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "AskedPrompts":
        sizes = {"max_position_embeddings": 65536}
        if device.type == "cpu":
            small = llama(64, 2, heads=4, kv_heads=2, intermediate_size=128, vocab_size=512, **sizes)
            return cls(device, small, "float32", (128, 256), 1, "64MiB")
        large = llama(4096, 32, heads=32, kv_heads=8, intermediate_size=14336, vocab_size=32000, **sizes)
        return cls(device, large, "bfloat16", (8192,) if quick else (8192, 32768), 1 if quick else 2, "12GiB")


def random_model(prompts: AskedPrompts) -> Model:
    """Made where it runs: a CPU would take minutes for as many random numbers."""
    with torch.device(prompts.device):
        model = Model.from_config(prompts.model, dtype=prompts.dtype, device=str(prompts.device))
    identity = model.identity(EngineConfig(block_size=BLOCK_SIZE))
    model.identity = lambda config: identity  # type: ignore[method-assign]  # reading all weights takes 16 s an engine
    return model


def opened(model: Model, prompts: AskedPrompts, loading: Loading, home: str) -> Any:
    """An engine whose L2 is there, and pinned on a GPU, before anything is asked."""
    # All of a prompt reaches the slab, and not only what its disk takes while the prompt is computed.
    config = over_slab(home, prompts.tier_size, prompts.tier_size, store_queue=prompts.tier_size)
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": max(prompts.lengths) // BLOCK_SIZE + 64, "max_num_seqs": 1}
    settings = EngineConfig(**sizes, max_num_batched_tokens=4096, loading=loading)
    engine: Any = Engine(model, settings, LocalConnector.connect(config))
    region = engine.connector.hierarchy.host.region
    region.wait_prefaulted()
    if prompts.device.type == "cuda" and (region.pinning is None or not region.pinning.wait(600) or not region.pinned):
        engine.close()
        raise SystemExit("L2 could not be pinned, so its figures would be those of pageable memory; raise `ulimit -l`")
    return engine


def ask_each_tier(engine: Engine, prompt: list[int]) -> tuple[dict[str, float], bool]:
    """Milliseconds to the first token from each tier, and whether all of them gave the same one."""
    length = len(prompt) - 1
    ms: dict[str, float] = {}
    tokens = set()
    for tier, lowest in TIERS.items():
        leave_only(engine, lowest)
        [answer] = engine.generate([prompt], ONE)
        wanted = {"cold": (0, 0), "L1": (length, 0)}.get(tier, (0, length))
        if (answer.num_l1_tokens, answer.num_external_tokens) != wanted or answer.ttft is None:
            raise SystemExit(f"{tier}: {answer.num_l1_tokens} tokens from L1, {answer.num_external_tokens} from below")
        ms[tier] = answer.ttft * 1e3
        tokens.add(answer.token_ids[0])
        settle(engine)
    return ms, len(tokens) == 1


def measure(model: Model, prompts: AskedPrompts, loading: Loading) -> Iterator[Row]:
    rng = np.random.default_rng(1)
    with scratch("gpu-ttft") as home:
        started = time.monotonic()
        engine = opened(model, prompts, loading, home)
        progress(f"{loading}: engine and tiers are there after {time.monotonic() - started:.1f} s")

        def asked(length: int) -> tuple[dict[str, float], bool]:
            return ask_each_tier(engine, random_tokens(rng, length + 1, 0, prompts.model.vocab_size))

        try:
            for length in prompts.lengths:
                asked(4 * BLOCK_SIZE)  # warms up
                rounds = []
                for number in range(prompts.rounds):
                    progress(f"{loading}, {length} tokens: round {number + 1} of {prompts.rounds}")
                    rounds.append(asked(length))
                times = [ms for ms, _ in rounds]
                row: Row = {"loading": loading, "tokens": length}
                row |= {f"{tier} ms": round(median(ms[tier] for ms in times), 2) for tier in TIERS}
                row |= {f"cold ÷ {t}": round(median(ms["cold"] / ms[t] for ms in times), 2) for t in [*TIERS][1:]}
                yield row | {"same token": all(same for _, same in rounds)}
        finally:
            engine.close()


@program(_gpu.DRY)
@torch.no_grad()
def main(options: Given) -> Result:
    prompts = AskedPrompts.of(_gpu.device(options), options.quick)
    progress(f"{prompts.device}: a model of random weights")
    model = random_model(prompts)
    rows = [row for loading in LOADINGS for row in _gpu.told(measure(model, prompts, loading))]
    return rows, [], _gpu.setup_of(options)

"""Time to first token, cold and from each tier, and what kvtier costs an engine that never hits.

The demo's model in an ordinary (not `exact`) engine, one request at a time, prompts of random tokens. Per length, each
round takes a fresh prompt: cold without kvtier; then with it cold (stores), from L1, from L2 (L1 emptied), from L3 (L1
and L2 emptied, page cache dropped). Rounds are interleaved over lengths; figures are medians. The overhead is CPU time
of the whole process, threads included, over interleaved pairs of the same fresh prompt with and without kvtier.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from _report import Target, parser, progress, report

from kvtier.engine import EngineConfig, Model, SamplingParams
from kvtier.engine.demo import BLOCK_SIZE, DemoEngine, demo_model
from kvtier.tiers.config import Config

LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS = 5
PAIRS = 24
PAIR_PROMPT, PAIR_ANSWER = 512, 32


def open_desk(home: str, lengths: tuple[int, ...]) -> DemoEngine:
    config = Config.load(
        host={"size": "2GiB"},
        file={"path": home, "size": "6GiB"},
        cache={"load_or_recompute": "load", "prefetch_deadline": "60s"},
    )
    num_blocks = 2 * max(lengths) // BLOCK_SIZE
    options = EngineConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_batched_tokens=1024)
    return DemoEngine(Model.from_config(demo_model(), seed=0, device="auto"), config, options)


def fresh_prompt(rng: np.random.Generator, length: int) -> list[int]:
    prompt: list[int] = rng.integers(0, 8192, length + 1).tolist()
    return prompt


def drop_page_cache() -> None:
    os.sync()
    if os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def ttft_of_each_tier(desk: DemoEngine, prompt: list[int]) -> dict[str, float]:
    """Milliseconds to the first token. Every warm run is checked to have come from the tier it is named after."""
    length = len(prompt) - 1
    ms = {"cold": desk.ask(prompt, 1, bare=True).ttft_ms}
    hierarchy = desk.connector.hierarchy
    stored = desk.ask(prompt, 1)
    assert sum(stored.cached_tokens.values()) == 0, stored.cached_tokens
    assert desk.settle()
    for tier in ("l1", "l2", "file"):
        if tier != "l1":
            desk.engine.pool.reset()
        if tier == "file":
            hierarchy.host.pool.reset()
            drop_page_cache()
        answer = desk.ask(prompt, 1)
        assert answer.cached_tokens[tier] == length, (tier, answer.cached_tokens)
        ms[tier] = answer.ttft_ms
        assert desk.settle()
    return ms


def overhead_pairs(desk: DemoEngine, rng: np.random.Generator, num_pairs: int) -> list[float]:
    """CPU time with kvtier (never hitting, storing everything) over CPU time without, of each interleaved pair."""
    ratios = []
    params = SamplingParams(max_tokens=PAIR_ANSWER, ignore_eos=True)
    for pair in range(num_pairs):
        prompt = fresh_prompt(rng, PAIR_PROMPT)
        cpu = {}
        for bare in (False, True) if pair % 2 else (True, False):
            engine = desk.bare if bare else desk.engine
            start = time.process_time()
            engine.generate([prompt], params)
            desk.settle()  # what kvtier does in the background counts too
            cpu[bare] = time.process_time() - start
        ratios.append(cpu[False] / cpu[True])
        progress(f"overhead pair {pair + 1}/{num_pairs}: {ratios[-1]:.4f}")
    return ratios


def main() -> int:
    args = parser(__doc__).parse_args()
    lengths, rounds, num_pairs = ((1024,), 1, 2) if args.quick else (LENGTHS, ROUNDS, PAIRS)
    rng = np.random.default_rng(1)
    times: dict[int, dict[str, list[float]]] = {length: defaultdict(list) for length in lengths}
    with tempfile.TemporaryDirectory(prefix=".ttft-", dir=Path(__file__).parent) as home:
        desk = open_desk(home, lengths)
        desk.ask(fresh_prompt(rng, 256), 2)  # warm up
        desk.ask(fresh_prompt(rng, 256), 2, bare=True)
        for round_ in range(rounds):
            for length in lengths:
                progress(f"round {round_ + 1}/{rounds}: {length} tokens")
                for tier, ms in ttft_of_each_tier(desk, fresh_prompt(rng, length)).items():
                    times[length][tier].append(ms)
        ratios = overhead_pairs(desk, rng, num_pairs)
        desk.engine.close()
    rows: list[dict[str, object]] = []
    for length in lengths:
        median = {tier: statistics.median(values) for tier, values in times[length].items()}
        speedup = {
            tier: statistics.median(c / w for c, w in zip(times[length]["cold"], times[length][tier], strict=True))
            for tier in ("l1", "l2", "file")
        }
        row: dict[str, object] = {"prompt tokens": length}
        row |= {f"{tier} ms": ms for tier, ms in median.items()}
        row |= {f"cold / {tier}": value for tier, value in speedup.items()}
        rows.append(row)
    mean, half = statistics.mean(ratios), 0.0
    if len(ratios) > 2:
        half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    rows.append({"never-hit CPU with / without": mean, "95 % interval ±": half, "pairs": len(ratios)})
    at_4k: dict[str, object] = next((row for row in rows if row.get("prompt tokens") == 4096), rows[0])
    targets = [
        Target(f"cold / L2 at {at_4k['prompt tokens']} tokens", 10, float(str(at_4k["cold / l2"])), at_most=False),
        Target(f"cold / L3 at {at_4k['prompt tokens']} tokens", 6, float(str(at_4k["cold / file"])), at_most=False),
        Target("never-hit overhead: lower end of the 95 % interval", 1.02, mean - half),
    ]
    return report("ttft", rows, targets, as_json=args.json, save=args.save)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())

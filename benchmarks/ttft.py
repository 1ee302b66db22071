"""Time to first token, cold and from each tier, and what kvtier costs an engine that never hits.

The demo's model in an ordinary (not `exact`) engine, one request at a time, prompts of random tokens. Per length, each
round takes a fresh prompt: cold without kvtier; then with it cold (stores), from L1, from L2 (L1 emptied), from L3 (L1
and L2 emptied, page cache dropped). Rounds are interleaved over lengths; figures are medians. The overhead is CPU time
of the whole process, threads included, over interleaved pairs of the same fresh prompt with and without kvtier.
"""

import statistics
import time
from collections import defaultdict
from statistics import median

import numpy as np
import torch
from _report import Given, Result, Row, Target, of_pairs, program, progress
from _rig import over_slab, random_tokens, scratch
from gpu_ttft import ask_each_tier

from kvtier.engine import EngineConfig, Model, SamplingParams
from kvtier.engine.demo import BLOCK_SIZE, DemoEngine, demo_model

LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS = 5
PAIRS = 24
PAIR_PROMPT, PAIR_ANSWER = 512, 32
WARM = ("l1", "l2", "file")


def fresh_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return random_tokens(rng, length + 1, 0)


def ttft_of_each_tier(desk: DemoEngine, prompt: list[int]) -> dict[str, float]:
    """Milliseconds to the first token, cold of the engine without kvtier."""
    cold = desk.ask(prompt, 1, bare=True).ttft_ms
    warm, _ = ask_each_tier(desk.engine, prompt)
    return {"cold": cold, "l1": warm["L1"], "l2": warm["L2"], "file": warm["slab"]}


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


@program()
@torch.no_grad()
def main(args: Given) -> Result:
    lengths, rounds, num_pairs = ((1024,), 1, 2) if args.quick else (LENGTHS, ROUNDS, PAIRS)
    rng = np.random.default_rng(1)
    times: dict[int, dict[str, list[float]]] = {length: defaultdict(list) for length in lengths}
    num_blocks = 2 * max(lengths) // BLOCK_SIZE
    options = EngineConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_batched_tokens=1024)
    with scratch("ttft") as home:
        model = Model.from_config(demo_model(), seed=0, device="auto")
        desk = DemoEngine(model, over_slab(home, "2GiB", "6GiB"), options)
        for bare in (False, True):
            desk.ask(fresh_prompt(rng, 256), 2, bare=bare)  # warm up
        for round_ in range(rounds):
            for length in lengths:
                progress(f"round {round_ + 1}/{rounds}: {length} tokens")
                for tier, ms in ttft_of_each_tier(desk, fresh_prompt(rng, length)).items():
                    times[length][tier].append(ms)
        ratios = overhead_pairs(desk, rng, num_pairs)
        desk.engine.close()
    rows: list[Row] = []
    for length, taken in times.items():
        row: Row = {"prompt tokens": length}
        row |= {f"{tier} ms": median(values) for tier, values in taken.items()}
        rows.append(row | {f"cold / {tier}": of_pairs(taken["cold"], taken[tier]) for tier in WARM})
    mean, half = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    rows.append({"never-hit CPU with / without": mean, "95 % interval ±": half, "pairs": len(ratios)})
    targets = [Target("never-hit overhead: lower end of the 95 % interval", 1.02, mean - half)]
    return rows, targets

"""A real vLLM on this CPU with kvtier, against (a) no offload, (b) its native offloading, (c) its example connector.

An 88 M parameter random Llama in fp32, one compute thread, so that copies have a core to themselves. Prompts are asked
again after vLLM's own cache is empty, as it is when L1 is too small for them: (a) computes, the others load. Each arm
is a process of its own; within a round all arms answer the same prompt, in a random order. "of a pair" is the ratio of
two arms' times in one round, its interval from a bootstrap over rounds. (b) is vLLM's tiering with a worker that copies
in host memory (tests/interop/host_offloading.py), since vLLM refuses a CPU there; (c) reads what the page cache holds
of the files it wrote. Decoding: eight steps of two unrelated requests with a load of the longest hit beside them
(lookup, copies; its request is aborted before it computes), over eight without. Never-hit: CPU time of fresh prompts,
all threads, with ÷ without. `--save` writes a plot too.
"""

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from _report import RESULTS, Given, Result, Row, Target, interval, program, progress
from _rig import VLLM, EngineProcess, random_tokens, saved_llama, scratch

from kvtier.service import Chart, Line, save_png
from kvtier.tiers import KVTierError

NAMES: Final = {"none": "(a) no offload", "kvtier": "kvtier", "native": "(b) vLLM's native offloading",
                "example": "(c) vLLM's example connector"}  # fmt: skip
LENGTHS: Final = (1024, 2048, 4096)

Arms = dict[str, EngineProcess]
Times = dict[int, dict[str, list[float]]]


def make_model(path: Path, *, small: bool, size: int = 768, layers: int = 12) -> None:
    """A random Llama: of that width and depth, or (`small`) as few parameters as a run that proves nothing needs."""
    size, layers = (128, 2) if small else (size, layers)
    saved_llama(path, size, layers, heads=size // 64, kv_heads=size // 64 // 3 or 1, head_dim=64)


def started(stack: ExitStack, home: Path, max_len: int) -> Arms:
    """A vLLM of each arm, until the stack ends."""
    log = stack.enter_context((home / "engine.log").open("wb"))
    arms: Arms = {}
    for name in NAMES:
        progress(f"starting {NAMES[name]}")
        (home / name).mkdir()
        setup: Row = {"model": str(home / "model"), "arm": name, "folder": str(home / name), "packages": []}
        setup |= {"num_blocks": max_len // 32 + 64, "max_len": max_len, "step_tokens": max_len, "host_bytes": 2 << 30}
        arms[name] = EngineProcess(VLLM, "_vllm_arm.py", setup, log)
        stack.callback(arms[name].close)
    return arms


def fresh(rng: np.random.Generator, length: int) -> list[int]:
    """A prompt of `length` tokens that can be cached and a few that cannot (two are the least, for (c))."""
    return random_tokens(rng, length + 16)


def ttft(arms: Arms, rng: np.random.Generator, rounds: tuple[int, int], lengths: tuple[int, ...]) -> Times:
    """Seconds by length and arm: of every prompt's first time ("cold"), then again. Hits are checked to be hits."""
    times: Times = {length: defaultdict(list) for length in lengths}
    num_cold, num_warm = rounds
    for length in lengths:
        prompts = [fresh(rng, length) for _ in range(num_cold)]
        for number in range(num_cold + num_warm):
            is_warm = number >= num_cold
            progress(f"{length} tokens, {'warm' if is_warm else 'cold'}: {number + 1}/{num_cold + num_warm}")
            for name in rng.permutation([name for name in arms if not is_warm or name != "none"]):
                seconds, cached = arms[name].ask("ttft", prompt=prompts[number % num_cold])
                assert cached == is_warm * length, (name, cached)
                times[length][name if is_warm or name == "none" else f"{name} cold"].append(seconds)
    return times


def never_hit(arms: Arms, rng: np.random.Generator, num_pairs: int) -> list[float]:
    """CPU time with kvtier, which stores and never hits, over CPU time without."""
    ratios = []
    for number in range(num_pairs):
        prompts = [fresh(rng, 512) for _ in range(2)]
        order = ("kvtier", "none") if number % 2 else ("none", "kvtier")
        cpu = {name: arms[name].ask("work", prompts=prompts, num_tokens=32) for name in order}
        ratios.append(cpu["kvtier"] / cpu["none"])
        progress(f"never-hit pair {number + 1}/{num_pairs}: {ratios[-1]:.4f}")
    return ratios


def concluded(times: Times, overhead: list[float], steps: dict[str, list[float]]) -> tuple[list[Row], list[Target]]:
    rows, targets = list[Row](), list[Target]()
    for length, arms in times.items():
        medians = {name: median(values) for name, values in arms.items()}
        for name, told in NAMES.items():
            row: Row = {"prompt tokens": length, "engine": told, "TTFT s": medians[name]}
            if name != "none":
                row |= {"first time s": medians[f"{name} cold"], "(a) / this": medians["none"] / medians[name]}
            if name in ("native", "example"):
                mean, low, high = interval([a / b for a, b in zip(arms["kvtier"], arms[name], strict=True)])
                row |= {"kvtier / this": mean, "95 %": f"{low:.3f} to {high:.3f}"}
                targets.append(Target(f"TTFT {length} tokens: kvtier over {name}, lower end of 95 %", 1, low))
            rows.append(row)
        speedup = medians["none"] / medians["kvtier"]
        targets.append(Target(f"TTFT {length} tokens: no offload over a hit of kvtier's", 5, speedup, at_most=False))
    slowdown = median(steps["loading"]) / median(steps["quiet"])
    mean, low, high = interval(overhead)
    span = f"{low:.4f} to {high:.4f}"
    rows.append({"engine": "kvtier, never hitting: CPU / (a)", "kvtier / this": mean, "95 %": span})
    rows.append({"engine": "kvtier, unrelated decoding: beside loads / quiet", "kvtier / this": slowdown})
    targets.append(Target("never-hit: CPU with over without, lower end of 95 %", 1.02, low))
    targets.append(Target("unrelated decoding beside loads over without", 1.03, slowdown))
    return rows, targets


@program()
def main(args: Given) -> Result:
    lengths, rounds, pairs = ((512,), (1, 2), 2) if args.quick else (LENGTHS, (2, 12), 12)
    if not VLLM.exists():
        raise KVTierError("vLLM is not installed beside kvtier: run `.ci/beside-engine vllm`")
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        home = Path(stack.enter_context(scratch("engine")))
        make_model(home / "model", small=args.quick)
        arms = started(stack, home, max(lengths) + 256)
        for arm in arms.values():
            arm.ask("ttft", prompt=fresh(rng, 256))  # warm up
        times = ttft(arms, rng, rounds, lengths)
        overhead = never_hit(arms, rng, pairs)
        stems, hits = [fresh(rng, 64) for _ in range(2)], [fresh(rng, lengths[-1]) for _ in range(2)]
        for prompt in hits:
            arms["kvtier"].ask("ttft", prompt=prompt)
        steps = arms["kvtier"].ask("decode", stems=stems, hits=hits, num_cycles=24)
    if args.save:
        lines = [Line(told, [*times], [median(arms[name]) for arms in times.values()]) for name, told in NAMES.items()]
        title = "vLLM on a CPU: a prompt seen before, no longer in vLLM's own cache"
        save_png(RESULTS / "engine_ttft.png", [Chart(title, "tokens", "time to first token, s", lines, log_y=True)])
    return concluded(times, overhead, steps)

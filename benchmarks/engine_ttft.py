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

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import torch
import transformers
from _engine_process import EngineArmProcess
from _report import RESULTS, Target, parser, progress, report

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT: Final = Path(__file__).resolve().parent.parent
ARMS: Final = ("none", "kvtier", "native", "example")
NAMES: Final = {
    "none": "(a) no offload",
    "kvtier": "kvtier",
    "native": "(b) vLLM's native offloading",
    "example": "(c) vLLM's example connector",
}
LENGTHS: Final = (1024, 2048, 4096)
COLD_ROUNDS, WARM_ROUNDS, PAIRS, CYCLES = 2, 12, 12, 24


def started(python: Path, model: Path, name: str, folder: Path, max_len: int) -> EngineArmProcess:
    """A vLLM in a process of its own."""
    return EngineArmProcess(
        python, "_engine_arm.py", [str(model), name, str(folder), str(max_len // 32 + 64), str(max_len)]
    )


def make_model(path: Path, *, small: bool, size: int = 768, layers: int = 12) -> None:
    """A random Llama: of that width and depth, or (`small`) as few parameters as a run that proves nothing needs."""
    size, layers = (128, 2) if small else (size, layers)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=size,
        intermediate_size=size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 64 // 3 or 1,
        head_dim=64,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval."""
    logs = np.log(np.array(ratios))
    draws = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def fresh(rng: np.random.Generator, length: int) -> list[int]:
    """A prompt of `length` tokens that can be cached and a few that cannot (two are the least, for (c))."""
    prompt: list[int] = rng.integers(3, 8192, length + 16).tolist()
    return prompt


Times = dict[int, dict[str, list[float]]]


def ttft(
    arms: dict[str, EngineArmProcess], rng: np.random.Generator, rounds: tuple[int, int], lengths: tuple[int, ...]
) -> Times:
    """Seconds by length and arm: of every prompt's first time ("cold"), then again. Hits are checked to be hits."""
    times: Times = {length: defaultdict(list) for length in lengths}
    num_cold, num_warm = rounds
    for length in lengths:
        prompts = [fresh(rng, length) for _ in range(num_cold)]
        for number, prompt in enumerate(prompts):
            progress(f"{length} tokens, cold {number + 1}/{num_cold}")
            for name in rng.permutation(list(arms)):
                reply = arms[name].ask("ttft", prompt=prompt)
                assert reply["cached"] == 0, (name, reply)
                times[length]["none" if name == "none" else f"{name} cold"].append(reply["seconds"])
        for number in range(num_warm):
            progress(f"{length} tokens, warm {number + 1}/{num_warm}")
            for name in rng.permutation([name for name in arms if name != "none"]):
                reply = arms[name].ask("ttft", prompt=prompts[number % num_cold])
                assert reply["cached"] == length, (name, reply)
                times[length][name].append(reply["seconds"])
    return times


def never_hit(arms: dict[str, EngineArmProcess], rng: np.random.Generator, num_pairs: int) -> list[float]:
    """CPU time with kvtier, which stores and never hits, over CPU time without."""
    ratios = []
    for number in range(num_pairs):
        prompts = [fresh(rng, 512) for _ in range(2)]
        order = ("kvtier", "none") if number % 2 else ("none", "kvtier")
        cpu = {name: arms[name].ask("work", prompts=prompts, num_tokens=32)["cpu"] for name in order}
        ratios.append(cpu["kvtier"] / cpu["none"])
        progress(f"never-hit pair {number + 1}/{num_pairs}: {ratios[-1]:.4f}")
    return ratios


def throughput(arms: dict[str, EngineArmProcess], rng: np.random.Generator, length: int) -> dict[str, float]:
    """Tokens a second, of answers to eight prompts with one long prefix known from before, 32 tokens each."""
    prefix = fresh(rng, length)
    for arm in arms.values():
        arm.ask("ttft", prompt=prefix)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        batch = [prefix[:length] + fresh(rng, 32) for _ in range(8)]
        for name in rng.permutation(list(arms)):
            rates[name].append(8 * 32 / arms[name].ask("work", prompts=batch, num_tokens=32)["seconds"])
    return {name: statistics.median(values) for name, values in rates.items()}


def plot(times: Times, path: Path) -> None:
    """Bars of median TTFT on a log scale, one group a length."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for place, name in enumerate(ARMS):
        heights = [statistics.median(times[length][name]) for length in times]
        bars = axes.bar(np.arange(len(times)) + 0.2 * (place - 1.5), heights, 0.19, label=NAMES[name])
        axes.bar_label(bars, [f"{height:.2g}" for height in heights], fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(times)), [f"{length} tokens" for length in times])
    axes.set_ylabel("time to first token, s")
    axes.set_title("vLLM on a CPU: a prompt seen before, no longer in vLLM's own cache", fontsize=10)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    args = parser(__doc__).parse_args()
    lengths, rounds, pairs = ((512,), (1, 2), 2) if args.quick else (LENGTHS, (COLD_ROUNDS, WARM_ROUNDS), PAIRS)
    subprocess.run([str(ROOT / ".ci" / "beside-engine"), "vllm"], check=True)
    python = ROOT / ".venv-vllm" / "bin" / "python"
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix=".engine-", dir=ROOT / "benchmarks") as home:
        make_model(Path(home) / "model", small=args.quick)
        arms = {}
        for name in ARMS:
            progress(f"starting {NAMES[name]}")
            folder = Path(home) / name
            folder.mkdir()
            arms[name] = started(python, Path(home) / "model", name, folder, max(lengths) + 256)
            arms[name].ask("ttft", prompt=fresh(rng, 256))  # warm up
        times = ttft(arms, rng, rounds, lengths)
        rates = throughput(arms, rng, lengths[-1] // 2)
        overhead = never_hit(arms, rng, pairs)
        stems, hits = [fresh(rng, 64) for _ in range(2)], [fresh(rng, lengths[-1]) for _ in range(2)]
        for prompt in hits:
            arms["kvtier"].ask("ttft", prompt=prompt)
        steps = arms["kvtier"].ask("decode", stems=stems, hits=hits, num_cycles=CYCLES)
        for arm in arms.values():
            arm.close()
    return conclude(args, times, rates, overhead, steps)


def conclude(
    args: Any, times: Times, rates: dict[str, float], overhead: list[float], steps: dict[str, list[float]]
) -> int:
    """Rows, targets, the plot."""
    rows: list[dict[str, object]] = []
    targets = []
    for length, arms in times.items():
        medians = {name: statistics.median(values) for name, values in arms.items()}
        for name in ARMS:
            row: dict[str, object] = {"prompt tokens": length, "engine": NAMES[name], "TTFT s": medians[name]}
            if name != "none":
                row |= {"first time s": medians[f"{name} cold"], "(a) / this": medians["none"] / medians[name]}
            if name in ("native", "example"):
                mean, low, high = interval(
                    [ours / theirs for ours, theirs in zip(arms["kvtier"], arms[name], strict=True)]
                )
                row |= {"kvtier / this": mean, "95 %": f"{low:.3f} to {high:.3f}"}
                targets.append(Target(f"TTFT {length} tokens: kvtier over {name}, lower end of 95 %", 1, low))
            rows.append(row)
        speedup = medians["none"] / medians["kvtier"]
        targets.append(Target(f"TTFT {length} tokens: no offload over a hit of kvtier's", 5, speedup, at_most=False))
    rows += [{"engine": NAMES[name], "tokens/s": rate} for name, rate in rates.items()]
    slowdown = statistics.median(steps["loading"]) / statistics.median(steps["quiet"])
    mean, low, high = interval(overhead)
    rows.append(
        {"engine": "kvtier, never hitting: CPU / (a)", "kvtier / this": mean, "95 %": f"{low:.4f} to {high:.4f}"}
    )
    rows.append({"engine": "kvtier, unrelated decoding: beside loads / quiet", "kvtier / this": slowdown})
    targets.append(Target("never-hit: CPU with over without, lower end of 95 %", 1.02, low))
    targets.append(Target("unrelated decoding beside loads over without", 1.03, slowdown))
    if args.save:
        plot(times, RESULTS / "engine_ttft.png")
    return report("engine_ttft", rows, targets, args.json, args.save)


if __name__ == "__main__":
    sys.exit(main())

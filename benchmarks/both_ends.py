"""Time to first token of a held prompt: loaded, computed, or both at once from its two ends, over the tier's rate.

kvtier's own engine, connector, L2 and slab, with a tiny model. The accelerator is emulated: a step takes as long as a
formula says, a token at position 8,192 being twice as dear as the first. The slab is throttled: its reads together come
at a fixed rate. So compute and storage cost what the row says, and everything between them is real. For each rate the
tiers start with nothing known and `load_or_recompute = "auto"`: a prompt that nobody holds is computed, the next one is
loaded since the tier's rate is unknown, and from then on auto decides. Every answer's logits are compared, bit by bit.
"ideal" is 1 / (1 / compute + 1 / load): no step, no group, no copy. Figures are medians over rounds.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import torch
from _report import RESULTS, Target, parser, progress, report
from transformers import LlamaConfig

from kvtier.connector import LocalConnector
from kvtier.engine import Completion, Engine, EngineConfig, Model, SamplingParams
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Rates

matplotlib.use("Agg")
from matplotlib import pyplot

BLOCK_SIZE: Final = 16
STEP: Final = 256  # tokens
TOKENS_PER_SECOND: Final = 2000.0  # of the emulated accelerator, at position 0
RATIOS: Final = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # load alone ÷ compute alone
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)


def seconds_of(start: int, end: int) -> float:
    """What computing these tokens costs."""
    return (end - start) * (1 + (start + end) / 2 / 8192) / TOKENS_PER_SECOND


class SlowTier:
    """A tier whose reads together come at so many bytes a second, however many threads read."""

    def __init__(self, tier: Any) -> None:
        self.bytes_per_second = float("inf")
        self._read = tier.read
        self._free_at, self._lock = 0.0, threading.Lock()
        tier.read = self.read

    def read(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> Any:
        """As the tier's, not before the line was free for so long."""
        results = self._read(hashes, into)
        with self._lock:
            took = sum(buffer.nbytes for buffer in into) / self.bytes_per_second
            self._free_at = due = max(self._free_at, time.monotonic()) + took
        time.sleep(max(0.0, due - time.monotonic()))
        return results


class Bench:
    """The engine, its throttled slab, and a prompt that the slab holds."""

    def __init__(self, home: Path, num_tokens: int) -> None:
        config = Config.load(
            host={"size": "512MiB"},
            file={"path": str(home), "size": "1GiB", "deadline": "60s"},
            cache={"load_or_recompute": "auto", "prefetch_deadline": "120s"},
        )
        model = LlamaConfig(
            vocab_size=8192,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        )
        options = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=2 * num_tokens // BLOCK_SIZE + 64,
            max_num_batched_tokens=STEP,
            exact=True,
            exact_rows=STEP,
        )
        self.engine = Engine(Model.from_config(model, seed=0), options, LocalConnector.connect(config))
        assert isinstance(self.engine.connector, LocalConnector)
        self.hierarchy = self.engine.connector.hierarchy
        self.slab = SlowTier(self.hierarchy.ports[0].tier)
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens // BLOCK_SIZE * self.engine.shape.block_bytes
        self._emulate()
        self._salts = iter(range(1 << 30))
        drawn: list[int] = np.random.default_rng(0).integers(5, 8192, num_tokens + 1).tolist()
        self.prompt = drawn
        self.bits = self._ask(None)[1]

    def _emulate(self) -> None:
        run = self.engine.runner.run

        def slow(batch: Any) -> Any:
            begun = time.perf_counter()
            logits = run(batch)
            cost = sum(seconds_of(chunk.start, chunk.end) for chunk in batch.chunks)
            time.sleep(max(0.0, cost - (time.perf_counter() - begun)))
            return logits

        self.engine.runner.run = slow  # type: ignore[method-assign]

    def _ask(self, salt: str | None) -> tuple[Completion, bytes]:
        [answer] = self.engine.generate([self.prompt], ONE, cache_salt=salt)
        assert self.engine.drain(60)
        assert self.hierarchy.drain(60)
        self.engine.pool.reset()
        self.hierarchy.host.pool.reset()
        os.sync()
        if os.access("/proc/sys/vm/drop_caches", os.W_OK):
            Path("/proc/sys/vm/drop_caches").write_text("1")
        return answer, np.stack(answer.logits).tobytes()

    def ask(self, *, held: bool = True) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were loaded."""
        answer, bits = self._ask(None if held else str(next(self._salts)))
        assert bits == self.bits, "not the logits of a full prefill"
        assert answer.ttft is not None
        return answer.ttft, answer.num_external_tokens

    def round(self, ratio: float) -> dict[str, float]:
        """Every way once, at a rate at which loading takes `ratio` times as long as computing."""
        rates = self.hierarchy.rates = Rates("auto")
        for port in self.hierarchy.ports:
            port._rates = rates
        self.slab.bytes_per_second = self.num_bytes / (ratio * seconds_of(0, self.num_tokens))
        compute, loaded = self.ask(held=False)
        assert not loaded
        load, loaded = self.ask()
        assert loaded == self.num_tokens
        both, loaded = self.ask()
        return {"compute": compute, "load": load, "auto": both, "loaded": loaded}


def measured(bench: Bench, ratios: Sequence[float], rounds: int) -> list[dict[str, object]]:
    """A row for each rate."""
    found: dict[float, dict[str, list[float]]] = {ratio: defaultdict(list) for ratio in ratios}
    for number in range(rounds):
        for ratio in ratios:
            progress(f"round {number + 1}/{rounds}: load ÷ compute {ratio:g}")
            for name, value in bench.round(ratio).items():
                found[ratio][name].append(value)
    rows: list[dict[str, object]] = []
    for ratio, columns in found.items():
        median = {name: statistics.median(values) for name, values in columns.items()}
        best = min(median["load"], median["compute"])
        row: dict[str, object] = {"load ÷ compute": ratio}
        row |= {f"{name} s": median[name] for name in ("load", "compute", "auto")}
        row |= {
            "ideal s": 1 / (1 / median["load"] + 1 / median["compute"]),
            "auto ÷ best single": median["auto"] / best,
        }
        row |= {"tokens loaded": median["loaded"], "tokens": bench.num_tokens}
        rows.append(row)
    return rows


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time to first token over what loading alone takes."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    places = [row["load s"] for row in rows]
    for column, style in (("load s", "s--"), ("compute s", "^--"), ("auto s", "o-"), ("ideal s", ":")):
        axes.plot(places, [row[column] for row in rows], style, label=column.removesuffix(" s"))
    axes.set(xscale="log", yscale="log", xlabel="load alone, s", ylabel="time to first token, s")
    axes.set_title(f"{rows[0]['tokens']} held tokens in a slow slab", fontsize=10)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    args = parser(__doc__).parse_args()
    num_tokens, ratios, rounds = (1024, (1.0,), 1) if args.quick else (4096, RATIOS, 3)
    with tempfile.TemporaryDirectory(prefix=".both-ends-", dir=Path(__file__).parent) as home:
        bench = Bench(Path(home), num_tokens)
        rows = measured(bench, ratios, rounds)
        bench.engine.close()
    targets = []
    for row in rows:
        ratio, gain = float(str(row["load ÷ compute"])), float(str(row["auto ÷ best single"]))
        if 0.5 <= ratio <= 2:
            targets.append(Target(f"balanced, load ÷ compute {ratio:g}: both ends ÷ the best single way", 0.8, gain))
        else:
            targets.append(Target(f"elsewhere, load ÷ compute {ratio:g}: auto ÷ the best single way", 1.05, gain))
    if args.save:
        plot(rows, RESULTS / "both_ends.png")
    setup = {"tokens": num_tokens, "rounds": rounds, "tokens/s": TOKENS_PER_SECOND, "step": STEP}
    return report("both_ends", rows, targets, args.json, args.save, setup)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    sys.exit(main())

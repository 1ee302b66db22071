"""Time to first token of a held prompt: loaded, computed, or both at once from its two ends, over the tier's rate.

kvtier's own engine, connector, L2 and slab, with a tiny model. The accelerator is emulated: a step takes as long as a
formula says, a token at position 8,192 being twice as dear as the first. The slab is throttled: its reads together come
at a fixed rate. So compute and storage cost what the row says, and everything between them is real. For each rate the
tiers start with nothing known and `load_or_recompute = "auto"`: a prompt that nobody holds is computed, the next one is
loaded since the tier's rate is unknown, and from then on auto decides. Every answer's logits are compared, bit by bit.
"ideal" is 1 / (1 / compute + 1 / load): no step, no group, no copy. Figures are medians over rounds.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from _races import Row, in_turns
from _report import RESULTS, Target, parser, progress, report
from transformers import LlamaConfig

from kvtier.connector import LocalConnector
from kvtier.engine import Completion, Engine, EngineConfig, Model, SamplingParams
from kvtier.service import Chart, Line, save_png
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Rates

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
            vocab_size=8192, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=16384, tie_word_embeddings=True,
        )  # fmt: skip
        options = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=2 * num_tokens // BLOCK_SIZE + 64, max_num_batched_tokens=STEP,
            exact=True, exact_rows=STEP,
        )  # fmt: skip
        self.engine = Engine(Model.from_config(model, seed=0), options, LocalConnector.connect(config))
        assert isinstance(self.engine.connector, LocalConnector)
        self.hierarchy = self.engine.connector.hierarchy
        self.slab = SlowTier(self.hierarchy.ports[0].tier)
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens // BLOCK_SIZE * self.engine.shape.block_bytes
        self._emulate()
        self._salts = count()
        self.prompt: list[int] = np.random.default_rng(0).integers(5, 8192, num_tokens + 1).tolist()
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
        compute, none = self.ask(held=False)
        load, every = self.ask()
        assert (none, every) == (0, self.num_tokens)
        both, loaded = self.ask()
        return {"compute": compute, "load": load, "auto": both, "loaded": loaded}


def measured(bench: Bench, ratios: Sequence[float], rounds: int) -> list[Row]:
    """A row for each rate."""

    def turn(ratio: float) -> dict[str, float]:
        progress(f"load ÷ compute {ratio:g}")
        return bench.round(ratio)

    rows = []
    for ratio, found in in_turns({ratio: partial(turn, ratio) for ratio in ratios}, rounds).items():
        load, compute, auto, loaded = (
            median(each[name] for each in found) for name in ("load", "compute", "auto", "loaded")
        )
        row = {"load ÷ compute": ratio, "load s": load, "compute s": compute, "auto s": auto}
        row |= {"ideal s": 1 / (1 / load + 1 / compute), "auto ÷ best single": auto / min(load, compute)}
        rows.append(row | {"tokens loaded": loaded, "tokens": bench.num_tokens})
    return rows


def chart(rows: Sequence[Row]) -> Chart:
    """Time to first token over what loading alone takes."""
    places = [row["load s"] for row in rows]
    lines = [Line(each, places, [row[f"{each} s"] for row in rows]) for each in ("load", "compute", "auto", "ideal")]
    title = f"{rows[0]['tokens']} held tokens in a slow slab"
    return Chart(title, "load alone, s", "time to first token, s", lines, log_x=True, log_y=True)


def main() -> int:
    args = parser(__doc__).parse_args()
    num_tokens, ratios, rounds = (1024, (1.0,), 1) if args.quick else (4096, RATIOS, 3)
    with tempfile.TemporaryDirectory(prefix=".both-ends-", dir=Path(__file__).parent) as home:
        bench = Bench(Path(home), num_tokens)
        rows = measured(bench, ratios, rounds)
        bench.engine.close()
    targets = []
    for row in rows:
        balanced = 0.5 <= row["load ÷ compute"] <= 2
        where, way, most = ("balanced", "both ends", 0.8) if balanced else ("elsewhere", "auto", 1.05)
        name = f"{where}, load ÷ compute {row['load ÷ compute']:g}: {way} ÷ the best single way"
        targets.append(Target(name, most, row["auto ÷ best single"]))
    if args.save:
        save_png(RESULTS / "both_ends.png", [chart(rows)])
    setup = {"tokens": num_tokens, "rounds": rounds, "tokens/s": TOKENS_PER_SECOND, "step": STEP}
    return report("both_ends", rows, targets, args.json, args.save, setup)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    sys.exit(main())

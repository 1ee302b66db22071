"""Time to first token of a held prompt: loaded, computed, or both at once from its two ends, over the tier's rate.

kvtier's own engine, connector, L2 and slab, with a tiny model. The accelerator is emulated: a step takes as long as a
formula says, a token at position 8,192 being twice as dear as the first. The slab is throttled: its reads together come
at a fixed rate. So compute and storage cost what the row says, and everything between them is real. For each rate the
tiers start with nothing known and `load_or_recompute = "auto"`: a prompt that nobody holds is computed, the next one is
loaded since the tier's rate is unknown, and from then on auto decides. Every answer's logits are compared, bit by bit.
"ideal" is 1 / (1 / compute + 1 / load): no step, no group, no copy. Figures are medians over rounds.
"""

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
from _report import RESULTS, Given, Result, Row, Target, in_turns, program, progress
from _rig import leave_only, llama, over_slab, random_tokens, scratch, settle

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.service import Chart, Line, save_png
from kvtier.tiers.hierarchy import Rates

BLOCK_SIZE: Final = 16
STEP: Final = 256  # tokens
TOKENS_PER_SECOND: Final = 2000.0  # of the emulated accelerator, at position 0
RATIOS: Final = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # load alone ÷ compute alone
WAYS: Final = ("load", "compute", "auto")
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)


def seconds_of(start: int, end: int) -> float:
    return (end - start) * (1 + (start + end) / 2 / 8192) / TOKENS_PER_SECOND


class SlowTier:
    """A tier whose reads together come at so many bytes a second, however many threads read."""

    def __init__(self, tier: Any) -> None:
        self.bytes_per_second = float("inf")
        self._read = tier.read
        self._free_at, self._lock = 0.0, threading.Lock()
        tier.read = self.read

    def read(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> Any:
        results = self._read(hashes, into)
        with self._lock:
            took = sum(buffer.nbytes for buffer in into) / self.bytes_per_second
            self._free_at = due = max(self._free_at, time.monotonic()) + took
        time.sleep(max(0.0, due - time.monotonic()))
        return results


class Bench:
    """The engine, its throttled slab, and a prompt that the slab holds."""

    def __init__(self, home: Path | str, num_tokens: int) -> None:
        sizes: Row = {"intermediate_size": 64, "head_dim": 32, "max_position_embeddings": 16384}
        model = llama(64, 4, heads=2, kv_heads=2, tie_word_embeddings=True, **sizes)
        options: Row = {"block_size": BLOCK_SIZE, "num_blocks": 2 * num_tokens // BLOCK_SIZE + 64}
        options |= {"max_num_batched_tokens": STEP, "exact": True, "exact_rows": STEP}
        config = over_slab(home, "512MiB", "1GiB", load_or_recompute="auto")
        connect = LocalConnector.connect(config)
        engine: Any = Engine(Model.from_config(model, seed=0), EngineConfig(**options), connect)
        self.engine, self.hierarchy = engine, engine.connector.hierarchy
        self.slab = SlowTier(self.hierarchy.ports[0].tier)
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens // BLOCK_SIZE * self.engine.shape.block_bytes
        self._run, self.engine.runner.run = self.engine.runner.run, self._emulated
        self._salts = count()
        self.prompt = random_tokens(np.random.default_rng(0), num_tokens + 1, 5)
        self.bits = self._ask(None)[1]

    def _emulated(self, batch: Any) -> Any:
        """A step that takes as long as the formula says."""
        begun = time.perf_counter()
        logits = self._run(batch)
        cost = sum(seconds_of(chunk.start, chunk.end) for chunk in batch.chunks)
        time.sleep(max(0.0, cost - (time.perf_counter() - begun)))
        return logits

    def _ask(self, salt: str | None) -> tuple[Any, bytes]:
        [answer] = self.engine.generate([self.prompt], ONE, cache_salt=salt)
        settle(self.engine)
        leave_only(self.engine, "file")
        return answer, np.stack(answer.logits).tobytes()

    def ask(self, *, held: bool = True) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were loaded."""
        answer, bits = self._ask(None if held else str(next(self._salts)))
        assert bits == self.bits, "not the logits of a full prefill"
        return answer.ttft, answer.num_external_tokens

    def round(self, ratio: float) -> dict[str, float]:
        """Every way once, at a rate at which loading takes `ratio` times as long as computing."""
        progress(f"load ÷ compute {ratio:g}")
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
    rows = []
    for ratio, found in in_turns({ratio: partial(bench.round, ratio) for ratio in ratios}, rounds).items():
        load, compute, auto, loaded = (median(each[name] for each in found) for name in (*WAYS, "loaded"))
        row: Row = {"load ÷ compute": ratio, "load s": load, "compute s": compute, "auto s": auto}
        row |= {"ideal s": 1 / (1 / load + 1 / compute), "auto ÷ best single": auto / min(load, compute)}
        rows.append(row | {"tokens loaded": loaded, "tokens": bench.num_tokens})
    return rows


def chart(rows: Sequence[Row]) -> Chart:
    places = [row["load s"] for row in rows]
    lines = [Line(each, places, [row[f"{each} s"] for row in rows]) for each in (*WAYS, "ideal")]
    title = f"{rows[0]['tokens']} held tokens in a slow slab"
    return Chart(title, "load alone, s", "time to first token, s", lines, log_x=True, log_y=True)


@program()
@torch.no_grad()
def main(args: Given) -> Result:
    torch.set_num_threads(1)
    num_tokens, ratios, rounds = (1024, (1.0,), 1) if args.quick else (4096, RATIOS, 3)
    with scratch("both-ends") as home:
        bench = Bench(home, num_tokens)
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
    return rows, targets, setup

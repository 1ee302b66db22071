"""What a blend in pieces is worth: to those who decode beside it, and to itself while a slow slab still loads."""

import statistics
import time
from pathlib import Path
from typing import Any, Final, Protocol

from _report import progress
from both_ends import SlowTier

from kvtier import Engine, Repair, SamplingParams, Segment
from kvtier.connector import LocalConnector
from kvtier.tiers.config import Config

ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
MANY: Final = SamplingParams(max_tokens=1000, ignore_eos=True)


class DrawnPrompts(Protocol):
    """Documents that an engine holds, in prompts of any number."""

    engine: Engine

    def draw(self) -> tuple[list[int], list[Segment]]:
        """All documents in a new order."""

    def tokens(self, number: int) -> list[int]:
        """Random ones."""


def slab_of(home: Path) -> Config:
    """Tiers whose slab is to be throttled."""
    return Config.load(
        host={"size": "256MiB"},
        file={"path": str(home), "size": "512MiB", "deadline": "60s"},
        cache={"load_or_recompute": "load", "prefetch_deadline": "120s"},
    )


def longest_step(prompts: DrawnPrompts, repair: Repair, num_rounds: int) -> float:
    """CPU time of the longest step of somebody who decodes beside a blend, over that beside a prefill of as much."""

    def longest(segments: list[Segment], prompt: list[int]) -> float:
        engine, steps = prompts.engine, []
        decoding = engine.add_request(prompts.tokens(20), MANY)
        for _ in range(2):
            engine.step()
        name = engine.add_request(prompt, ONE, segments=segments, repair=repair)
        told: set[str] = set()
        while name not in told:
            begun = time.process_time()
            told = {output.request_id for output in engine.step()}
            steps.append(time.process_time() - begun)
            assert decoding in told, "it waits for the other one"
        engine.abort(decoding)
        engine.step()
        return max(steps)

    ratios = []
    for number in range(num_rounds):
        progress(f"beside a blend: round {number + 1}/{num_rounds}")
        prompt, segments = prompts.draw()
        blended = longest(segments, prompt)
        ratios.append(blended / longest([], [5, *prompt]))
    return statistics.median(ratios)


def check_under_load(prompts: DrawnPrompts, repair: Repair, num_rounds: int) -> float:
    """TTFT with the check under the load over that without, where loading takes about as long as the check."""
    engine: Any = prompts.engine
    assert isinstance(engine.connector, LocalConnector)
    tiers = engine.connector.hierarchy
    slab = SlowTier(tiers.ports[0].tier)
    waits = False
    opened = engine.segments.open

    def opening(*arguments: Any) -> Any:
        reuse = opened(*arguments)
        reuse._may_be_early = not waits
        return reuse

    def seconds(*, from_slab: bool) -> float:
        assert engine.drain(60)
        assert tiers.drain(60)
        if from_slab:
            engine.pool.reset()
            tiers.host.pool.reset()
        prompt, segments = prompts.draw()
        [found] = engine.generate([prompt], ONE, segments=[segments], repair=repair)
        assert found.num_segment_tokens
        return float(found.ttft)

    engine.segments.open = opening
    ratios = []
    for number in range(num_rounds):
        progress(f"check under the load: round {number + 1}/{num_rounds}")
        slab.bytes_per_second = float("inf")
        _, segments = prompts.draw()
        num_tokens = sum(segment.end - segment.start for segment in segments)
        num_bytes = num_tokens // engine.config.block_size * engine.shape.block_bytes
        slab.bytes_per_second = num_bytes / (seconds(from_slab=False) * 0.4)
        waits = True
        without = seconds(from_slab=True)
        waits = False
        ratios.append(seconds(from_slab=True) / without)
    return statistics.median(ratios)

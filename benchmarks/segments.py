"""Segments reused at another place: what repair gives back of the answers, and what it costs, against a full prefill.

Accuracy: the recall model beside this checkout (../shared/fixture; left out where that is not) answers questions over
four documents of 24 tokens, each computed alone, of which three are reused. Cost: a random Llama of 57 M parameters
and 8 layers on one thread, a prompt of six documents of 512 tokens in front of a question. "of full" is the ratio to a
full prefill of the same prompt, accuracy over all questions, CPU time within a round.
Two more figures are of steps of 256 tokens: the longest step of somebody who decodes beside a blend, and the time to
first token with the check under the load, from a slab throttled so that loading takes about as long as the check.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from _loads import leave_only, llama, over_slab, random_tokens, settle
from _report import Row, Target, parser, progress, report
from both_ends import SlowTier
from recall import LENGTH, MODEL, NUM_DOCUMENTS, asked

from kvtier import Engine, EngineConfig, Repair, SamplingParams, Segment
from kvtier.connector import LocalConnector

ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
MANY: Final = SamplingParams(max_tokens=1000, ignore_eos=True)
RULES: Final = ("deviation", "question", "first", "borders", "random")
SHARE: Final = 0.15  # of the reused tokens, computed anew
DEFAULT: Final = ("deviation", SHARE)
NOTHING: Final = ("first", 0.0)  # is computed anew
EVERYTHING: Final = ("first", 1.0)
TIMED_DOCUMENTS: Final = 6

Arm = tuple[str, float]
"""A rule and its share. Share 0 is reuse without repair; share 1 computes everything."""


def unbounded(arm: Arm) -> Repair:
    """The repair of an arm, whatever deviation it leaves."""
    return Repair(*arm, max_deviation=float("inf"))


def recall(arms: Sequence[Arm], num_samples: int) -> dict[Arm, float]:
    questions, right = asked(num_samples), {}
    settings = EngineConfig(block_size=8, num_blocks=4000, segments="on", segment_min_tokens=8)
    segments = [Segment(place * LENGTH, (place + 1) * LENGTH) for place in range(NUM_DOCUMENTS)]
    with Engine.from_pretrained(MODEL, settings, dtype="float32") as engine:
        engine.precompute([document for each in questions[::4] for document in each.documents])
        for arm in arms:
            progress(f"recall: {arm[0]} {arm[1]:.0%}")
            every = {"segments": [segments] * len(questions), "repair": unbounded(arm)}
            found = engine.generate([each.prompt for each in questions], ONE, **every)
            right[arm] = fmean(a.token_ids[0] == each.answer for a, each in zip(found, questions, strict=True))
    return right


class TimedPrompts:
    """Prompts of documents in front of a question, for a model that knows nothing."""

    def __init__(self, *, small: bool, step: int = 1024, home: str | None = None) -> None:
        """`step`: tokens of one; `home`: where a slab lies below the engine, if there is one."""
        self.rng = np.random.default_rng(1)
        self.length = 128 if small else 512
        size = 256 if small else 768
        config = llama(size, 8, heads=size // 64, kv_heads=size // 192 or 1, head_dim=64)
        settings = EngineConfig(num_blocks=800, max_num_batched_tokens=step, segments="on")
        below = None if home is None else LocalConnector.connect(over_slab(home, "256MiB", "512MiB"))
        self.engine: Any = Engine.from_config(config, settings, below)
        self.documents = [self.tokens(self.length) for _ in range(TIMED_DOCUMENTS)]
        self.engine.precompute(self.documents)

    def tokens(self, number: int) -> list[int]:
        return random_tokens(self.rng, number, 5)

    def draw(self) -> tuple[list[int], list[Segment]]:
        """Documents in a new order behind a system prompt of its own, and a question."""
        prompt, segments = self.tokens(61), []
        for place in self.rng.permutation(TIMED_DOCUMENTS):
            segments.append(Segment(len(prompt), len(prompt) + self.length))
            prompt += self.documents[place]
        return prompt + self.tokens(32), segments

    def seconds(self, arm: Arm | None) -> tuple[float, float]:
        prompt, segments = self.draw()
        blend = {} if arm is None else {"segments": [segments], "repair": unbounded(arm)}
        begun = time.process_time()
        [found] = self.engine.generate([prompt], ONE, **blend)
        assert found.num_segment_tokens == (0 if arm is None else TIMED_DOCUMENTS * self.length)
        return time.process_time() - begun, found.ttft


@contextmanager
def timed_prompts(**options: Any) -> Iterator[TimedPrompts]:
    prompts = TimedPrompts(**options)
    yield prompts
    prompts.engine.close()


def cost(arms: Sequence[Arm], num_rounds: int, *, small: bool) -> dict[Arm, list[float]]:
    """Of each arm: CPU seconds, that over a full prefill's of the round, and TTFT over its; medians."""
    measured: dict[Arm, list[tuple[float, float, float]]] = defaultdict(list)
    with timed_prompts(small=small) as prompts:
        prompts.seconds(DEFAULT)  # warm up
        for number in range(num_rounds):
            full_cpu, full_ttft = prompts.seconds(None)
            for place in prompts.rng.permutation(len(arms)):
                arm = arms[place]
                progress(f"cost: round {number + 1}/{num_rounds}, {arm[0]} {arm[1]:.0%}")
                cpu, ttft = prompts.seconds(arm)
                measured[arm].append((cpu, cpu / full_cpu, ttft / full_ttft))
    return {arm: [median(each) for each in zip(*found, strict=True)] for arm, found in measured.items()}


def longest_step(prompts: TimedPrompts, repair: Repair) -> float:
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

    prompt, segments = prompts.draw()
    return longest(segments, prompt) / longest([], [5, *prompt])


def check_under_load(prompts: TimedPrompts, repair: Repair) -> Callable[[], float]:
    """TTFT with the check under the load over that without, where loading takes about as long as the check."""
    engine = prompts.engine
    slab, opened, waits = SlowTier(engine.connector.hierarchy.ports[0].tier), engine.segments.open, False

    def opening(*arguments: Any) -> Any:
        reuse = opened(*arguments)
        reuse._may_be_early = not waits
        return reuse

    def seconds(*, from_slab: bool) -> float:
        settle(engine)
        if from_slab:
            leave_only(engine, "file", page_cache=True)
        prompt, segments = prompts.draw()
        [found] = engine.generate([prompt], ONE, segments=[segments], repair=repair)
        assert found.num_segment_tokens
        return float(found.ttft)

    def measured() -> float:
        nonlocal waits
        slab.bytes_per_second = float("inf")
        num_bytes = TIMED_DOCUMENTS * prompts.length // engine.config.block_size * engine.shape.block_bytes
        slab.bytes_per_second = num_bytes / (seconds(from_slab=False) * 0.4)
        waits = True
        without = seconds(from_slab=True)
        waits = False
        return seconds(from_slab=True) / without

    engine.segments.open = opening
    return measured


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    every, rounds, step = [(rule, SHARE) for rule in RULES], 3 if args.quick else 7, 128 if args.quick else 256
    right = recall([NOTHING, EVERYTHING, *every], 40 if args.quick else 200) if MODEL.is_dir() else {}
    costs = cost([NOTHING, *every[:3]], 1 if args.quick else 3, small=args.quick)
    progress("beside a blend, and the check under the load")
    with timed_prompts(small=args.quick, step=step) as beside:
        longest = median(longest_step(beside, unbounded(DEFAULT)) for _ in range(rounds))
    with TemporaryDirectory() as home, timed_prompts(small=args.quick, step=step, home=home) as loading:
        checked = check_under_load(loading, unbounded(DEFAULT))
        under_load = median(checked() for _ in range(rounds))
    rows: list[Row] = []
    for arm in (EVERYTHING, NOTHING, *every):
        row: Row = {"rule": arm[0] if 0 < arm[1] < 1 else "", "computed anew": f"{arm[1]:.0%}"}
        if right:
            row |= {"right answers": right[arm], "right, of full": right[arm] / right[EVERYTHING]}
        if arm in costs:
            row |= zip(("CPU s", "CPU, of full", "TTFT, of full"), costs[arm], strict=True)
        rows.append(row)
    targets = [
        Target("blend with 15 % repaired by deviation: CPU over a full prefill", 0.5, costs[DEFAULT][1]),
        Target("longest step beside a blend over one beside a prefill: CPU", 2.0, longest),
        Target("TTFT with the check under the load over without", 0.95, under_load),
    ]
    if right:
        with_repair, without = (right[arm] / right[EVERYTHING] for arm in (DEFAULT, NOTHING))
        targets.append(Target("recall with 15 % repaired by deviation over full", 0.95, with_repair, at_most=False))
        targets.append(Target("recall without repair over full: the ruler measures", 0.8, without))
    return report("segments", rows, targets, args.json, args.save)


if __name__ == "__main__":
    sys.exit(main())

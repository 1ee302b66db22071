"""Segments reused at another place: what repair gives back of the answers, and what it costs, against a full prefill.

Accuracy: the recall model beside this checkout (../shared/fixture; left out where that is not) answers questions over
four documents of 24 tokens, each computed alone, of which three are reused. Cost: a random Llama of 57 M parameters
and 8 layers on one thread, a prompt of six documents of 512 tokens in front of a question. "of full" is the ratio to a
full prefill of the same prompt, accuracy over all questions, CPU time within a round. `--save` writes a plot too.
Two more figures are of steps of 256 tokens: the longest step of somebody who decodes beside a blend, and the time to
first token with the check under the load, from a slab throttled so that loading takes about as long as the check.
"""

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from _loads import Row, leave_only, llama, over_slab, picture, random_tokens, settle
from _report import RESULTS, Target, parser, progress, report
from both_ends import SlowTier

from kvtier import Engine, EngineConfig, Repair, SamplingParams, Segment
from kvtier.connector import LocalConnector

FIXTURE: Final = Path(__file__).resolve().parents[2] / "shared" / "fixture"
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
MANY: Final = SamplingParams(max_tokens=1000, ignore_eos=True)
RULES: Final = ("deviation", "question", "first", "borders", "random")
SHARES: Final = (0.05, 0.1, 0.15, 0.2, 0.3)
DEFAULT: Final = ("deviation", 0.15)
NOTHING: Final = ("first", 0.0)  # is computed anew
EVERYTHING: Final = ("first", 1.0)
NUM_DOCUMENTS, LENGTH = 4, 24  # of the recall model's task
TIMED_DOCUMENTS: Final = 6

Arm = tuple[str, float]
"""A rule and its share. Share 0 is reuse without repair; share 1 computes everything."""


def unbounded(arm: Arm) -> Repair:
    """The repair of an arm, whatever deviation it leaves."""
    return Repair(*arm, max_deviation=float("inf"))


def recall(arms: list[Arm], num_samples: int) -> dict[Arm, float]:
    spec = importlib.util.spec_from_file_location("recall_task", FIXTURE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    task: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    made = task.gen(num_samples, NUM_DOCUMENTS, LENGTH, 4, np.random.default_rng(5))
    settings = EngineConfig(block_size=8, num_blocks=4000, segments="on", segment_min_tokens=8)
    segments = [Segment(place * LENGTH, (place + 1) * LENGTH) for place in range(NUM_DOCUMENTS)]
    prompts = [
        made["docs"][sample].reshape(-1).tolist() + made["tail"][sample][3 * number : 3 * number + 2].tolist()
        for sample in range(num_samples)
        for number in range(4)
    ]
    right = {}
    with Engine.from_pretrained(FIXTURE / "recall-llama-bf16", settings, dtype="float32") as engine:
        engine.precompute([document.tolist() for sample in made["docs"] for document in sample])
        for arm in arms:
            progress(f"recall: {arm[0]} {arm[1]:.0%}")
            found = engine.generate(prompts, ONE, segments=[segments] * len(prompts), repair=unbounded(arm))
            answers = np.array([each.token_ids[0] for each in found])
            right[arm] = float((answers == made["qv"].reshape(-1)).mean())
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


def cost(arms: list[Arm], num_rounds: int, *, small: bool) -> dict[Arm, tuple[float, float, float]]:
    """Of each arm: CPU seconds, that over a full prefill's of the round, and TTFT over its; medians."""
    measured: dict[Arm, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
    with timed_prompts(small=small) as prompts:
        prompts.seconds(DEFAULT)  # warm up
        for number in range(num_rounds):
            full_cpu, full_ttft = prompts.seconds(None)
            for place in prompts.rng.permutation(len(arms)):
                arm = arms[place]
                progress(f"cost: round {number + 1}/{num_rounds}, {arm[0]} {arm[1]:.0%}")
                cpu, ttft = prompts.seconds(arm)
                measured[arm].append((cpu, cpu / full_cpu, ttft / full_ttft))
    return {
        arm: (median(c for c, _, _ in found), median(r for _, r, _ in found), median(t for _, _, t in found))
        for arm, found in measured.items()
    }


def longest_step(prompts: TimedPrompts, repair: Repair, num_rounds: int) -> float:
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
    return median(ratios)


def check_under_load(prompts: TimedPrompts, repair: Repair, num_rounds: int) -> float:
    """TTFT with the check under the load over that without, where loading takes about as long as the check."""
    engine = prompts.engine
    tiers = engine.connector.hierarchy
    slab = SlowTier(tiers.ports[0].tier)
    waits = False
    opened = engine.segments.open

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
    return median(ratios)


def plot(right: Mapping[Arm, float], costs: Mapping[Arm, Sequence[float]], path: Path) -> None:
    """Over the share that is computed anew, one line a rule: right answers, CPU time and TTFT of a full prefill's."""
    cpu, ttft = ({arm: each[column] for arm, each in costs.items()} for column in (1, 2))
    labels = ("right answers", "CPU time ÷ full prefill", "TTFT ÷ full prefill")
    with picture(path, 1, 3, figsize=(12, 3.6)) as (figure, panels):
        for axes, values, label in zip(panels, (right, cpu, ttft), labels, strict=True):
            for rule in RULES:
                arms = [arm for arm in values if arm[0] == rule and arm not in (NOTHING, EVERYTHING)]
                if arms:  # not every rule is timed
                    drawn = sorted([(0.0, values[NOTHING]), *((arm[1], values[arm]) for arm in arms)])
                    axes.plot(*zip(*drawn, strict=True), marker="o", markersize=3, label=rule)
            axes.axhline(values.get(EVERYTHING, 1.0), color="grey", linewidth=0.8, linestyle="--")
            axes.set(xlabel="share of reused tokens computed anew", ylabel=label)
            axes.set_title("57 M parameters, 3,165 tokens" if values is not right else "recall model", fontsize=10)
            if values is not right:
                axes.set_ylim(bottom=0)
        panels[0].legend(fontsize=8)
        figure.suptitle("Documents reused at other places; dashed: full prefill", fontsize=10)


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    shares, rounds = ((0.15, 0.3), 3) if args.quick else (SHARES, 7)
    every = [(rule, share) for rule in RULES for share in shares]
    has_model = (FIXTURE / "recall-llama-bf16").is_dir()
    right = recall([NOTHING, EVERYTHING, *every], 40 if args.quick else 200) if has_model else {}
    timed = [(rule, share) for rule in RULES[:3] for share in shares]
    costs = cost([NOTHING, *timed], 1 if args.quick else 3, small=args.quick)
    step = 128 if args.quick else 256
    with timed_prompts(small=args.quick, step=step) as beside:
        longest = longest_step(beside, unbounded(DEFAULT), rounds)
    with TemporaryDirectory() as home, timed_prompts(small=args.quick, step=step, home=home) as loading:
        under_load = check_under_load(loading, unbounded(DEFAULT), rounds)
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
        full = right[EVERYTHING]
        targets += [
            Target("recall with 15 % repaired by deviation over full", 0.95, right[DEFAULT] / full, at_most=False),
            Target("recall without repair over full: the ruler measures", 0.8, right[NOTHING] / full),
        ]
    if args.save:
        plot(right, costs, RESULTS / "segments.png")
    return report("segments", rows, targets, args.json, args.save)


if __name__ == "__main__":
    sys.exit(main())

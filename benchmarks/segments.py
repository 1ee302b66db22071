"""Segments reused at another place: what repair gives back of the answers, and what it costs, against a full prefill.

Accuracy: the recall model beside this checkout (../shared/fixture; left out where that is not) answers questions over
four documents of 24 tokens, each computed alone, of which three are reused. Cost: a random Llama of 57 M parameters
and 8 layers on one thread, a prompt of six documents of 512 tokens in front of a question. "of full" is the ratio to a
full prefill of the same prompt, accuracy over all questions, CPU time within a round.
Other forms of the questions (documents × tokens each) show what the share "auto" chooses, and documents of 96 tokens
what is found without marks, each precomputed and each in one prompt; its cost is that of the same six documents with
blocks and shortest segments of 16. What a prompt that never returns costs more is CPU over that with segments off.
Two more figures are of steps of 256 tokens: the longest step of somebody who decodes beside a blend, and the time to
first token with the check under the load, from a slab throttled so that loading takes about as long as the check.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from _report import Given, Result, Row, Target, program, progress
from _rig import leave_only, llama, over_slab, random_tokens, settle
from both_ends import SlowTier
from recall import LENGTH, MODEL, NUM_DOCUMENTS, Asked, asked

from kvtier import Completion, Engine, EngineConfig, Repair, SamplingParams, Segment
from kvtier.connector import LocalConnector
from kvtier.connector.segments import Share

ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
MANY: Final = SamplingParams(max_tokens=1000, ignore_eos=True)
RULES: Final = ("deviation", "question", "first", "borders", "random")
SHARE: Final = 0.15  # of the reused tokens, computed anew
DEFAULT: Final = ("deviation", SHARE)
NOTHING: Final = ("first", 0.0)  # is computed anew
EVERYTHING: Final = ("first", 1.0)
TIMED_DOCUMENTS: Final = 6

FORMS: Final = (((4, 24), 8), ((12, 8), 8), ((6, 16), 8), ((40, 8), 8), ((4, 24), 16))  # and the blocks' size
LONG: Final = (4, 96)  # documents that are found without marks

Arm = tuple[str, Share] | tuple[str, Share, int]
"""A rule, its share, maybe its check layer. Share 0 is reuse without repair; share 1 computes everything."""

Recall = tuple[float, float, float]
"""Right answers; of the prompts' tokens those reused, and of these those computed anew."""


def unbounded(arm: Arm) -> Repair:
    """The repair of an arm, whatever deviation it leaves."""
    return Repair(arm[0], arm[1], arm[2] if len(arm) == 3 else 1, max_deviation=float("inf"))


def recall(
    arms: Sequence[Arm],
    num_samples: int,
    form: tuple[int, int] = (NUM_DOCUMENTS, LENGTH),
    block: int = 8,
    *,
    marks: bool = True,
    num_questions: int = 4,
) -> dict[Arm, Recall]:
    questions, right = asked(num_samples, num_questions, form=form), {}
    for arm, answers in answered(MODEL, questions, num_questions, arms, block, marks=marks).items():
        reused = sum(each.num_segment_tokens for each in answers)
        right[arm] = (
            fmean(a.token_ids[0] == each.answer for a, each in zip(answers, questions, strict=True)),
            reused / sum(each.num_prompt_tokens for each in answers),
            sum(each.num_repaired_tokens for each in answers) / max(1, reused),
        )
    return right


def answered(
    model: Path, questions: Sequence[Asked], of_a_text: int, arms: Sequence[Arm], block: int = 8, *, marks: bool = True
) -> dict[Arm, list[Completion]]:
    """What a model answers to questions over documents of one length; so many in a row are over the same ones.

    Without `marks` what an engine has seen counts: each arm has an engine of its own, and each prompt comes once.
    """
    found: dict[Arm, list[Completion]] = defaultdict(list)
    settings = EngineConfig(
        block_size=block, num_blocks=60_000 // block, segments="on" if marks else "auto", segment_min_tokens=8
    )
    num, length = len(questions[0].documents), len(questions[0].documents[0])
    segments = [Segment(place * length, (place + 1) * length) for place in range(num)]
    for some in [arms] if marks else [[arm] for arm in arms]:
        with Engine.from_pretrained(model, settings, dtype="float32") as engine:
            for start in range(0, len(questions), 40 * of_a_text):  # L1 has room for so many at once
                part = questions[start : start + 40 * of_a_text]
                engine.precompute([document for each in part[::of_a_text] for document in each.documents])
                for arm in some:
                    progress(f"{num} documents of {length}, {arm[0]} {arm[1]}, from question {start}")
                    given = [segments] * len(part) if marks else None
                    prompts = [each.prompt for each in part]
                    found[arm] += engine.generate(prompts, ONE, segments=given, repair=unbounded(arm))
    return found


class TimedPrompts:
    """Prompts of documents in front of a question, for a model that knows nothing."""

    def __init__(
        self, *, small: bool, step: int = 1024, home: str | None = None, segments: str = "on", block: int = 64
    ) -> None:
        """`step`: tokens of one; `home`: where a slab lies below the engine, if there is one."""
        self.rng = np.random.default_rng(1)
        self.length = 128 if small else 512
        size = 256 if small else 768
        config = llama(size, 8, heads=size // 64, kv_heads=size // 192 or 1, head_dim=64)
        of_segments: Any = {"segments": segments, "segment_min_tokens": min(block, 32), "block_size": block}
        settings = EngineConfig(num_blocks=51_200 // block, max_num_batched_tokens=step, **of_segments)
        self.finds = segments == "auto"
        below = None if home is None else LocalConnector.connect(over_slab(home, "256MiB", "512MiB"))
        self.engine: Any = Engine.from_config(config, settings, below)
        self.documents = [self.tokens(self.length) for _ in range(TIMED_DOCUMENTS)]
        self.engine.precompute(self.documents)
        self.close = self.engine.close

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
        given = [()] if arm is None else None if self.finds else [segments]
        begun = time.process_time()
        [found] = self.engine.generate([prompt], ONE, segments=given, repair=None if arm is None else unbounded(arm))
        seconds = time.process_time() - begun
        most = TIMED_DOCUMENTS * self.length
        assert found.num_segment_tokens == (0 if arm is None else most) or (arm and self.finds)
        self.reused = found.num_segment_tokens / len(prompt)
        return seconds, found.ttft


def cost(arms: Sequence[Arm], num_rounds: int, **options: Any) -> dict[Arm, list[float]]:
    """Of each arm: CPU seconds, that over a full prefill's of the round, TTFT over its, share reused; medians."""
    measured: dict[Arm, list[tuple[float, ...]]] = defaultdict(list)
    with closing(TimedPrompts(**options)) as prompts:
        prompts.seconds(DEFAULT)  # warm up
        for number in range(num_rounds):
            full_cpu, full_ttft = prompts.seconds(None)
            for place in prompts.rng.permutation(len(arms)):
                arm = arms[place]
                progress(f"cost: round {number + 1}/{num_rounds}, {arm[0]} {arm[1]}")
                cpu, ttft = prompts.seconds(arm)
                measured[arm].append((cpu, cpu / full_cpu, ttft / full_ttft, prompts.reused))
    return {arm: [median(each) for each in zip(*found, strict=True)] for arm, found in measured.items()}


def first_sight(num_rounds: int, *, small: bool) -> float:
    """CPU of prompts that never return, with segments found, over that with segments off; the median of pairs."""
    draw, ratios = np.random.default_rng(2), []
    with (
        closing(TimedPrompts(small=small, segments="auto", block=16)) as finds,
        closing(TimedPrompts(small=small, block=16)) as off,
    ):
        for number in range(num_rounds + 1):
            tokens, seconds = random_tokens(draw, TIMED_DOCUMENTS * finds.length, 5), []
            for prompts in (finds, off) if number % 2 else (off, finds):
                begun = time.process_time()
                [found] = prompts.engine.generate([tokens], ONE)
                seconds.append(time.process_time() - begun)
                assert not found.num_segment_tokens
            ratios.append(seconds[0] / seconds[1] if number % 2 else seconds[1] / seconds[0])
    return median(ratios[1:])  # the first one warms up


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


def forms(num_samples: int) -> tuple[list[Row], list[Target]]:
    """Accuracy of other forms by share, and without marks."""
    rows: list[Row] = []
    arms: list[Arm] = [EVERYTHING, *(("deviation", share) for share in (0.05, SHARE, "auto"))]
    least: dict[Arm, float] = {}

    def add(form: tuple[int, int], block: int, right: dict[Arm, Recall], marks: str) -> None:
        for arm, (share, reused, anew) in right.items():
            row: Row = {"form": f"{form[0]} x {form[1]}, blocks of {block}", "marks": marks, "rule": arm[0]}
            row |= {"computed anew": str(arm[1]), "right answers": share, "reused": reused, "repaired": anew}
            rows.append(row | {"right, of full": share / right[EVERYTHING][0]})

    for form, block in FORMS:
        right = recall(arms, num_samples, form, block)
        add(form, block, right, "yes")
        for arm in arms:
            least[arm] = min(least.get(arm, 1.0), right[arm][0] / right[EVERYTHING][0])
    auto: Arm = ("deviation", "auto")
    marked, found = (
        recall([EVERYTHING, auto], 6 * num_samples, LONG, marks=marks, num_questions=1) for marks in (True, False)
    )
    add(LONG, 8, marked, "yes")
    add(LONG, 8, {EVERYTHING: marked[EVERYTHING], auto: found[auto]}, "no")
    short = recall([EVERYTHING, auto], num_samples, marks=False, num_questions=1)  # too short to be found
    add((NUM_DOCUMENTS, LENGTH), 8, short, "no")
    targets = [
        Target("recall of 5 forms with the share auto over full, least", 0.95, least[auto], at_most=False),
        Target(
            "recall of documents found without marks below marked ones, points",
            1.0,
            100 * (marked[auto][0] - found[auto][0]),
        ),
    ]
    return rows, targets


@program()
def main(args: Given) -> Result:
    torch.set_num_threads(1)
    every: list[Arm] = [(rule, SHARE) for rule in RULES]
    rounds, step = 3 if args.quick else 7, 128 if args.quick else 256
    right = recall([NOTHING, EVERYTHING, *every], 40 if args.quick else 200) if MODEL.is_dir() else {}
    of_forms, targets = forms(10 if args.quick else 50) if MODEL.is_dir() else ([], [])
    costs = cost([NOTHING, *every[:3]], 1 if args.quick else 3, small=args.quick)
    found = cost([("deviation", "auto")], 1 if args.quick else 3, small=args.quick, segments="auto", block=16)
    progress("prompts that never return")
    never = first_sight(3, small=args.quick)
    progress("beside a blend, and the check under the load")
    with closing(TimedPrompts(small=args.quick, step=step)) as beside:
        longest = median(longest_step(beside, unbounded(DEFAULT)) for _ in range(rounds))
    with TemporaryDirectory() as home, closing(TimedPrompts(small=args.quick, step=step, home=home)) as loading:
        checked = check_under_load(loading, unbounded(DEFAULT))
        under_load = median(checked() for _ in range(rounds))
    rows: list[Row] = []
    for arm in (EVERYTHING, NOTHING, *every):
        row: Row = {"rule": arm[0] if arm not in (EVERYTHING, NOTHING) else "", "computed anew": f"{arm[1]:.0%}"}
        if right:
            row |= {"right answers": right[arm][0], "right, of full": right[arm][0] / right[EVERYTHING][0]}
        if arm in costs:
            row |= zip(("CPU s", "CPU, of full", "TTFT, of full"), costs[arm], strict=False)
        rows.append(row)
    [without_marks] = found.values()
    names = ("CPU s", "CPU, of full", "TTFT, of full", "reused")
    rows.append(
        {"marks": "no", "rule": "deviation", "computed anew": "auto", **dict(zip(names, without_marks, strict=True))}
    )
    rows += of_forms
    targets += [
        Target("blend with 15 % repaired by deviation: CPU over a full prefill", 0.5, costs[DEFAULT][1]),
        Target("blend of segments found without marks: CPU over a full prefill", 0.4, without_marks[1]),
        Target("prompts that never return, segments found over off: CPU", 1.05, never),
        Target("longest step beside a blend over one beside a prefill: CPU", 2.0, longest),
        Target("TTFT with the check under the load over without", 0.95, under_load),
    ]
    if right:
        with_repair, without = (right[arm][0] / right[EVERYTHING][0] for arm in (DEFAULT, NOTHING))
        targets.append(Target("recall with 15 % repaired by deviation over full", 0.95, with_repair, at_most=False))
        targets.append(Target("recall without repair over full: the ruler measures", 0.8, without))
    return rows, targets

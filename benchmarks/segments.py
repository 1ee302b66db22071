"""Segments reused at another place: what repair gives back of the answers, and what it costs, against a full prefill.

Accuracy: the recall model beside this checkout (../shared/fixture; left out where that is not) answers questions over
four documents of 24 tokens, each computed alone, of which three are reused. Cost: a random Llama of 57 M parameters
and 8 layers on one thread, a prompt of six documents of 512 tokens in front of a question. "of full" is the ratio to a
full prefill of the same prompt, accuracy over all questions, CPU time within a round. `--save` writes a plot too.
Two more figures are of steps of 256 tokens: the longest step of somebody who decodes beside a blend, and the time to
first token with the check under the load, from a slab throttled so that loading takes about as long as the check.
"""

import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import torch
from _blend_pieces import check_under_load, longest_step, slab_of
from _report import RESULTS, Target, parser, progress, report
from transformers import LlamaConfig

from kvtier import Engine, EngineConfig, Repair, SamplingParams, Segment
from kvtier.connector import LocalConnector

matplotlib.use("Agg")
from matplotlib import pyplot

FIXTURE: Final = Path(__file__).resolve().parents[2] / "shared" / "fixture"
ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
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
    """The share of questions that each arm answers right."""
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

    def __init__(self, *, small: bool, step: int = 1024, home: Path | None = None) -> None:
        """`step`: tokens of one; `home`: where a slab lies below the engine, if there is one."""
        self.rng = np.random.default_rng(1)
        self.length = 128 if small else 512
        size = 256 if small else 768
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=size,
            intermediate_size=size * 8 // 3,
            num_hidden_layers=8,
            num_attention_heads=size // 64,
            num_key_value_heads=size // 192 or 1,
            head_dim=64,
            max_position_embeddings=8192,
        )
        settings = EngineConfig(num_blocks=800, max_num_batched_tokens=step, segments="on")
        self.engine = Engine.from_config(
            config, settings, None if home is None else LocalConnector.connect(slab_of(home))
        )
        self.documents = [self.tokens(self.length) for _ in range(TIMED_DOCUMENTS)]
        self.engine.precompute(self.documents)

    def tokens(self, number: int) -> list[int]:
        """Random ones."""
        drawn: list[int] = self.rng.integers(5, 8192, number).tolist()
        return drawn

    def draw(self) -> tuple[list[int], list[Segment]]:
        """Documents in a new order behind a system prompt of its own, and a question."""
        prompt, segments = self.tokens(61), []
        for place in self.rng.permutation(TIMED_DOCUMENTS):
            segments.append(Segment(len(prompt), len(prompt) + self.length))
            prompt += self.documents[place]
        return prompt + self.tokens(32), segments

    def seconds(self, arm: Arm | None) -> tuple[float, float]:
        """CPU seconds and TTFT of a prompt."""
        prompt, segments = self.draw()
        begun = time.process_time()
        [found] = self.engine.generate(
            [prompt],
            ONE,
            segments=[segments] if arm is not None else None,
            repair=None if arm is None else unbounded(arm),
        )
        assert found.num_segment_tokens == (0 if arm is None else TIMED_DOCUMENTS * self.length)
        assert found.ttft is not None
        return time.process_time() - begun, found.ttft


def cost(arms: list[Arm], num_rounds: int, *, small: bool) -> dict[Arm, list[tuple[float, float, float]]]:
    """Of each arm and round: CPU seconds, that over a full prefill's of the round, and TTFT over its."""
    prompts = TimedPrompts(small=small)
    measured: dict[Arm, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
    prompts.seconds(DEFAULT)  # warm up
    for number in range(num_rounds):
        full_cpu, full_ttft = prompts.seconds(None)
        for place in prompts.rng.permutation(len(arms)):
            arm = arms[place]
            progress(f"cost: round {number + 1}/{num_rounds}, {arm[0]} {arm[1]:.0%}")
            cpu, ttft = prompts.seconds(arm)
            measured[arm].append((cpu, cpu / full_cpu, ttft / full_ttft))
    prompts.engine.close()
    return measured


def pieces(num_rounds: int, *, small: bool) -> list[Target]:
    """What it is worth that a blend goes in pieces."""
    step = 128 if small else 256
    beside = TimedPrompts(small=small, step=step)
    longest = longest_step(beside, unbounded(DEFAULT), num_rounds)
    beside.engine.close()
    with tempfile.TemporaryDirectory() as home:
        loading = TimedPrompts(small=small, step=step, home=Path(home))
        ratio = check_under_load(loading, unbounded(DEFAULT), num_rounds)
        loading.engine.close()
    return [
        Target("longest step beside a blend over one beside a prefill: CPU", 2.0, longest),
        Target("TTFT with the check under the load over without", 0.95, ratio),
    ]


def plot(right: dict[Arm, float], cpu: dict[Arm, float], ttft: dict[Arm, float], path: Path) -> None:
    """Over the share that is computed anew, one line a rule: right answers, CPU time and TTFT of a full prefill's."""
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    labels = ("right answers", "CPU time ÷ full prefill", "TTFT ÷ full prefill")
    for axes, values, label in zip(panels, (right, cpu, ttft), labels, strict=True):
        for rule in RULES:
            arms = [arm for arm in values if arm[0] == rule and arm not in (NOTHING, EVERYTHING)]
            if arms:  # not every rule is timed
                drawn = sorted([(0.0, values[NOTHING]), *((arm[1], values[arm]) for arm in arms)])
                axes.plot(*zip(*drawn, strict=True), marker="o", markersize=3, label=rule)
        axes.axhline(values.get(EVERYTHING, 1.0), color="grey", linewidth=0.8, linestyle="--")
        axes.set_xlabel("share of reused tokens computed anew")
        axes.set_ylabel(label)
        axes.set_title("57 M parameters, 3,165 tokens" if values is not right else "recall model", fontsize=10)
        if values is not right:
            axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.suptitle("Documents reused at other places; dashed: full prefill", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    shares = (0.15, 0.3) if args.quick else SHARES
    every = [(rule, share) for rule in RULES for share in shares]
    has_model = (FIXTURE / "recall-llama-bf16").is_dir()
    right = recall([NOTHING, EVERYTHING, *every], 40 if args.quick else 200) if has_model else {}
    timed = [(rule, share) for rule in ("deviation", "question", "first") for share in shares]
    measured = cost([NOTHING, *timed], 1 if args.quick else 3, small=args.quick)
    rows: list[dict[str, object]] = []
    for arm in (EVERYTHING, NOTHING, *every):
        row: dict[str, object] = {"rule": arm[0] if 0 < arm[1] < 1 else "", "computed anew": f"{arm[1]:.0%}"}
        if right:
            row |= {"right answers": right[arm], "right, of full": right[arm] / right[EVERYTHING]}
        if arm in measured:
            cpu, of_full, ttft = (statistics.median(values) for values in zip(*measured[arm], strict=True))
            row |= {"CPU s": cpu, "CPU, of full": of_full, "TTFT, of full": ttft}
        rows.append(row)
    ratios = {arm: statistics.median(ratio for _, ratio, _ in values) for arm, values in measured.items()}
    waits = {arm: statistics.median(ratio for _, _, ratio in values) for arm, values in measured.items()}
    targets = [Target("blend with 15 % repaired by deviation: CPU over a full prefill", 0.5, ratios[DEFAULT])]
    targets += pieces(3 if args.quick else 7, small=args.quick)
    if right:
        full = right[EVERYTHING]
        targets += [
            Target("recall with 15 % repaired by deviation over full", 0.95, right[DEFAULT] / full, at_most=False),
            Target("recall without repair over full: the ruler measures", 0.8, right[NOTHING] / full),
        ]
    if args.save:
        plot(right, ratios, waits, RESULTS / "segments.png")
    return report("segments", rows, targets, args.json, args.save)


if __name__ == "__main__":
    sys.exit(main())

"""`kvtier demo rag`: questions about a few documents in different orders, answered in four ways side by side.

This process only directs. A child computes the documents and ends. Another, which has only what the first left on the
slab, answers: with a full prefill, from prefixes alone, and from segments without and with repair.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.engine import EngineConfig
from kvtier.engine.demo.engine_process import EngineProcess, disk, progress_of
from kvtier.engine.demo.recall import in_words, linked_names, make_documents, questions, read, right_answers
from kvtier.tiers import ConfigError, require_extra

# --- what is asked: over three to five documents of a folder, each question in an order of its own --------------------

# Two models: one that knows the answers, one that is large enough to be timed. Three ways of reuse.
RECALL: Final = "recall"
TIMED: Final = "timed"
FULL: Final = "full"
PREFIX: Final = "prefix"
SEGMENTS: Final = "segments"

TIMED_BLOCK: Final = 16  # tokens
_FOLDER: Final = 5  # documents
_LEAST_ASKED: Final = 3  # of them
_PER_FOLDER: Final = 8  # questions
_LINKED: Final = 0.5  # of the questions: about a name that some document, not the first, states to be as another
_TIMED_QUESTIONS: Final = 4
_TIMED_TOKENS: Final = 480  # of a document; fewer where the model's context is short
_QUESTION_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class RagQuestion:
    """A question over documents, in their order, and the token that answers it."""

    documents: list[list[int]]
    question: list[int]
    answer: int | None  # None: unknown, it is only timed

    @property
    def texts(self) -> list[list[int]]:
        return [*self.documents, self.question]


def recall_questions(number: int) -> list[RagQuestion]:
    """So many, with answers: eight for each folder of five documents."""
    rng = np.random.default_rng(5)
    asked: list[RagQuestion] = []
    while len(asked) < number:
        folder = make_documents(rng, _FOLDER)
        for _ in range(min(_PER_FOLDER, number - len(asked))):
            chosen = rng.permutation(_FOLDER)[: rng.integers(_LEAST_ASKED, _FOLDER + 1)]
            known, _ = read(folder[chosen].reshape(1, -1))
            stated, linked = np.flatnonzero(known[0] >= 0), linked_names(folder[chosen[1:]])
            name = rng.choice(linked if len(linked) and rng.random() < _LINKED else stated, 1)
            [answer] = right_answers(known[0], name).tolist()
            asked.append(RagQuestion(folder[chosen].tolist(), questions(name).tolist(), answer))
    return asked


def timed_questions(vocab_size: int, max_model_len: int) -> list[RagQuestion]:
    """Over five long documents of random tokens, without meaning. ConfigError for too short a context."""
    room = (max_model_len - _QUESTION_TOKENS - 1) // _FOLDER
    length = min(_TIMED_TOKENS, room // TIMED_BLOCK * TIMED_BLOCK)
    if length < TIMED_BLOCK:
        least = _FOLDER * TIMED_BLOCK + _QUESTION_TOKENS + 1
        raise ConfigError(f"--model: a context of {max_model_len} tokens; the demo needs {least} or more")
    rng = np.random.default_rng(1)
    folder = rng.integers(0, vocab_size, (_FOLDER, length))
    asked = []
    for number in range(_TIMED_QUESTIONS):
        order = [number % _FOLDER, *rng.permutation([each for each in range(_FOLDER) if each != number % _FOLDER])]
        question = rng.integers(0, vocab_size, _QUESTION_TOKENS).tolist()
        asked.append(RagQuestion(folder[order].tolist(), question, None))
    return asked


def documents_of(asked: list[RagQuestion]) -> list[list[int]]:
    return [list(one) for one in dict.fromkeys(tuple(each) for question in asked for each in question.documents)]


def example(asked: list[RagQuestion]) -> str:
    """A question in words, and what it would be answered were the documents in the opposite order."""
    for each in asked:
        known, _ = read(np.array(each.documents[::-1]).reshape(1, -1))
        name = np.array(each.question[1:]) - questions(np.zeros(1, int))[1]
        [other] = right_answers(known[0], name).tolist()
        if other != each.answer and each.answer is not None:
            documents = " | ".join(in_words(document) for document in each.documents)
            ask, right, wrong = in_words(each.question), in_words([each.answer]), in_words([other])
            return f"{documents} | {ask} {right}; in the opposite order: {wrong}"
    return ""


# --- what it found, as tables and as a picture ------------------------------------------------------------------------

FULL_PREFILL: Final = "full prefill"
PREFIX_ONLY: Final = "prefix only"
AS_IT_IS: Final = "segments as is"
REPAIRED: Final = "segments repaired"
NAMES_SHOWN: Final = (FULL_PREFILL, PREFIX_ONLY, AS_IT_IS, REPAIRED)
SOURCES: Final = ("prefix", "segment", "repaired", "computed")
COUNTED: Final = ("segments_loaded", "segments_computed", "blends_in_full")
OF_FULL: Final = 0.95  # right answers with repair, of those of a full prefill
LEAST_RIGHT: Final = 0.9  # answers of a full prefill, of all
_CAPTION: Final = (
    "tokens by source; segment: moved from elsewhere; repaired: of these, anew;\n"
    "computed: as always; the rule deviation computes a layer or more of all, too"
)


@dataclass(frozen=True, slots=True)
class RagResult:
    """How one model answered in one way. `sources` add up to its prompts."""

    name: str
    num_questions: int
    prompt_tokens: int
    sources: dict[str, int]
    right: int | None  # None: it was only timed
    ttft_ms: float  # median
    named_behind: int  # blocks after the exact prefix that a tier has under the prompts' own names
    segments_loaded: int  # from the slab, whole
    segments_computed: int  # no tier had them
    blends_in_full: int  # requests whose deviation was too high


@dataclass(frozen=True, slots=True)
class RagReport:
    """Answers are the recall model's, times the large model's; both in the order of NAMES_SHOWN."""

    answers: list[RagResult]
    times: list[RagResult]
    example: str
    timed_model: str

    @property
    def failures(self) -> list[str]:
        failures = []
        full, repaired = (_named(self.answers, name).right or 0 for name in (FULL_PREFILL, REPAIRED))
        if full < LEAST_RIGHT * (asked := self.answers[0].num_questions):
            failures.append(f"After a full prefill {full} of {asked} answers are right: too few to measure anything.")
        if repaired < OF_FULL * full:
            failures.append(
                f"With repair {repaired} answers are right, under {OF_FULL:.0%} of the {full} of a full prefill."
            )
        results = [*self.answers, *self.times]
        if behind := sum(each.named_behind for each in results):
            failures.append(f"{behind} blocks behind the exact prefix are named: they are approximate.")
        if computed := sum(each.segments_computed for each in results):
            failures.append(f"{computed} segments were computed: they should have been on the slab.")
        return failures


def _show(console: Console, report: RagReport) -> None:
    full = _named(report.answers, FULL_PREFILL).right or 0
    asked = report.answers[0].num_questions
    title = f"Right answers: a model of 0.2 M parameters, trained for this; {asked} questions"
    table = _table(title, "right", "of full")
    for each in report.answers:
        right = each.right or 0
        table.add_row(*_cells(each), str(right), f"{right / full:.0%}" if full else "")
    console.print(f"\nFor example: {report.example}\n", style="dim", highlight=False)
    console.print(table)
    whole = _named(report.times, FULL_PREFILL).ttft_ms
    title = f"Time to first token: {report.timed_model}; {report.times[0].num_questions} questions"
    table = _table(title, "TTFT ms", "of full")
    for each in report.times:
        table.add_row(*_cells(each), f"{each.ttft_ms:,.0f}", f"{each.ttft_ms / whole:.0%}")
    console.print(table)
    console.print(_CAPTION, style="dim", highlight=False)
    if not report.failures:
        loaded = sum(each.segments_loaded for each in report.answers + report.times)
        console.print(
            f"Repair gave the answers back. {loaded:,} segments came from the slab of a process that had ended, "
            "and no approximate block was named."
        )


def draw(report: RagReport, path: Path) -> None:
    """Three panels: tokens by source, right answers, time to first token. ConfigError if it cannot be written."""
    require_extra("--picture", "charts")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    panels: Any = figure.subplots(1, 3, sharey=True)
    names = [each.name for each in report.times]
    begun = [0.0] * len(names)
    for source in SOURCES:
        shares = [each.sources[source] / each.prompt_tokens for each in report.times]
        panels[0].barh(names, shares, left=begun, label=source)
        begun = [left + share for left, share in zip(begun, shares, strict=True)]
    panels[0].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=4)
    panels[0].set_title("tokens of the timed prompts, by source", fontsize=10)
    panels[1].barh(names, [(each.right or 0) / each.num_questions for each in report.answers])
    panels[1].set_title("right answers, recall model", fontsize=10)
    panels[2].barh(names, [each.ttft_ms for each in report.times])
    panels[2].set_title(f"TTFT ms, {report.timed_model}", fontsize=10)
    panels[0].invert_yaxis()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f'--picture "{path}": {error}') from None


def _table(title: str, *last: str) -> Table:
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", title_style="bold", **style)
    for column in ("", "prompt", *SOURCES, *last):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _cells(result: RagResult) -> list[str]:
    counts = [f"{result.sources[source]:,}" if result.sources[source] else "·" for source in SOURCES]
    return [result.name, f"{result.prompt_tokens:,}", *counts]


def _named(results: Sequence[RagResult], name: str) -> RagResult:
    return next(each for each in results if each.name == name)


# --- the demo ---------------------------------------------------------------------------------------------------------

_WORKER: Final = "kvtier.engine.demo.rag_worker"
_BOUND: Final = 0.5  # of a deviation: `Repair`'s own
_NO_BOUND: Final = float("inf")


@dataclass(frozen=True, slots=True)
class RagOptions:
    model: Path | None = None  # a checkpoint that is timed; None: a random Llama of some 50 M parameters
    questions: int = 200
    rule: str = "deviation"
    share: float = 0.15
    picture: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        EngineConfig(repair_rule=self.rule, repair_share=self.share)  # ConfigError now, and not after a minute


def rag_demo(options: RagOptions) -> int:
    """Run the demo. Returns the exit status: 0 if what it claims held."""
    console = Console(stderr=options.as_json)
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=disk()) as home, progress_of(console) as progress:
        report = _Rag(Path(home), options, progress).run()
    if options.as_json:
        answers, times = ([asdict(each) for each in results] for results in (report.answers, report.times))
        print(json.dumps({"failures": report.failures, "answers": answers, "times": times}))
    else:
        _show(console, report)
    if options.picture is not None:
        draw(report, options.picture)
    for failure in report.failures:
        console.print(f"[red]{failure}")
    return 1 if report.failures else 0


@dataclass(frozen=True, slots=True)
class _Rag:
    """Runs two models in every way, over one directory that the first process leaves to the second."""

    home: Path
    options: RagOptions
    progress: Progress

    def run(self) -> RagReport:
        asked = {RECALL: recall_questions(self.options.questions)}
        with closing(self._process()) as child:
            asked[TIMED] = timed_questions(child.opened["vocab_size"], child.opened["max_model_len"])
            for kind, each in asked.items():
                documents = documents_of(each)
                title = f"computing documents, {self._model_of(kind)}"
                child.call("precompute", {"kind": kind, "documents": documents}, title, len(documents))
        with closing(self._process()) as child:
            answers, times = (self._every_way(child, kind, each) for kind, each in asked.items())
        return RagReport(answers, times, example(asked[RECALL]), self._model_of(TIMED))

    def _process(self) -> EngineProcess:
        return EngineProcess(_WORKER, self.home, self.options.model, self.progress)

    def _model_of(self, kind: str) -> str:
        if kind == RECALL:
            return "recall model"
        return "random Llama of 50 M parameters" if self.options.model is None else self.options.model.name

    def _every_way(self, child: EngineProcess, kind: str, asked: list[RagQuestion]) -> list[RagResult]:
        # Segments first: what they stored by mistake, prefixes would find.
        bound = _BOUND if kind == RECALL else _NO_BOUND  # K and V of random weights say nothing
        as_it_is: dict[str, Any] = {"rule": "first", "share": 0.0, "max_deviation": _NO_BOUND}
        repaired = {"rule": self.options.rule, "share": self.options.share, "max_deviation": bound}
        ways = {
            AS_IT_IS: {"way": SEGMENTS, "repair": as_it_is},
            REPAIRED: {"way": SEGMENTS, "repair": repaired},
            PREFIX_ONLY: {"way": PREFIX, "repair": as_it_is},
            FULL_PREFILL: {"way": FULL, "repair": as_it_is},
        }
        results = {name: self._ask(child, kind, name, way, asked) for name, way in ways.items()}
        return [results[name] for name in NAMES_SHOWN]

    def _ask(
        self, child: EngineProcess, kind: str, name: str, way: dict[str, Any], asked: list[RagQuestion]
    ) -> RagResult:
        arguments = {"kind": kind, **way, "asked": [each.texts for each in asked]}
        reply = child.call("answer", arguments, f"{name}, {self._model_of(kind)}", len(asked))
        expected = [each.answer for each in asked]
        right = sum(found == answer for found, answer in zip(reply["answers"], expected, strict=True))
        return RagResult(
            name=name,
            num_questions=len(asked),
            prompt_tokens=sum(reply["sources"].values()),
            right=None if None in expected else right,
            ttft_ms=median(reply["ttft_ms"]),
            **{name: reply[name] for name in ("sources", "named_behind", *COUNTED)},
        )

"""`kvtier demo rag`: questions about a few documents in different orders, answered in four ways side by side.

This process only directs. A child computes the documents and ends. Another, which has only what the first left on the
slab, answers: with a full prefill, from prefixes alone, and from segments without and with repair.
"""

import json
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from kvtier.engine import EngineConfig
from kvtier.engine.demo import rag_questions, rag_report
from kvtier.engine.demo.engine_process import EngineProcess, disk, progress_of
from kvtier.engine.demo.rag_questions import FULL, PREFIX, RECALL, SEGMENTS, TIMED, RagQuestion
from kvtier.engine.demo.rag_report import RagReport, RagResult

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


class _Manner(NamedTuple):
    """A way to answer: what the engine may reuse, the share it recomputes, and the bound of the deviation."""

    name: str
    way: str
    rule: str = "first"
    share: float = 0.0
    bound: float = _NO_BOUND


def rag_demo(options: RagOptions) -> int:
    """Run the demo. Returns the exit status: 0 if what it claims held."""
    console = Console(stderr=options.as_json)
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=disk()) as home, progress_of(console) as progress:
        report = _Rag(Path(home), options, progress).run()
    if options.as_json:
        answers, times = ([asdict(each) for each in results] for results in (report.answers, report.times))
        print(json.dumps({"failures": report.failures, "answers": answers, "times": times}))
    else:
        rag_report.show(console, report)
    if options.picture is not None:
        rag_report.draw(report, options.picture)
    for failure in report.failures:
        console.print(f"[red]{failure}")
    return 1 if report.failures else 0


class _Rag:
    """Runs two models in every way, over one directory that the first process leaves to the second."""

    def __init__(self, home: Path, options: RagOptions, progress: Progress) -> None:
        self._home = home
        self._options = options
        self._progress = progress

    def run(self) -> RagReport:
        asked = {RECALL: rag_questions.recall_questions(self._options.questions)}
        with closing(self._process()) as child:
            asked[TIMED] = rag_questions.timed_questions(child.opened["vocab_size"], child.opened["max_model_len"])
            for kind, questions in asked.items():
                documents = rag_questions.documents_of(questions)
                title = f"computing documents, {self._model_of(kind)}"
                child.call("precompute", {"kind": kind, "documents": documents}, title, len(documents))
        with closing(self._process()) as child:
            answers, times = (self._every_way(child, kind, questions) for kind, questions in asked.items())
        return RagReport(answers, times, rag_questions.example(asked[RECALL]), self._model_of(TIMED))

    def _process(self) -> EngineProcess:
        return EngineProcess(_WORKER, self._home, self._options.model, self._progress)

    def _model_of(self, kind: str) -> str:
        if kind == RECALL:
            return "recall model"
        return "random Llama of 50 M parameters" if self._options.model is None else self._options.model.name

    def _every_way(self, child: EngineProcess, kind: str, questions: list[RagQuestion]) -> list[RagResult]:
        # Segments first: what they stored by mistake, prefixes would find.
        bound = _BOUND if kind == RECALL else _NO_BOUND  # K and V of random weights say nothing
        manners = (
            _Manner(rag_report.AS_IT_IS, SEGMENTS),
            _Manner(rag_report.REPAIRED, SEGMENTS, self._options.rule, self._options.share, bound),
            _Manner(rag_report.PREFIX_ONLY, PREFIX),
            _Manner(rag_report.FULL_PREFILL, FULL),
        )
        results = {manner.name: self._ask(child, kind, manner, questions) for manner in manners}
        return [results[name] for name in rag_report.NAMES_SHOWN]

    def _ask(self, child: EngineProcess, kind: str, manner: _Manner, questions: list[RagQuestion]) -> RagResult:
        arguments: dict[str, Any] = {"kind": kind, "asked": [each.texts for each in questions], **manner._asdict()}
        reply = child.call("answer", arguments, f"{manner.name}, {self._model_of(kind)}", len(questions))
        expected = [each.answer for each in questions]
        right = sum(found == answer for found, answer in zip(reply["answers"], expected, strict=True))
        return RagResult(
            name=manner.name,
            num_questions=len(questions),
            prompt_tokens=sum(reply["sources"].values()),
            sources=reply["sources"],
            right=None if None in expected else right,
            ttft_ms=median(reply["ttft_ms"]),
            named_behind=reply["named_behind"],
            segments_loaded=reply["segments_loaded"],
            segments_computed=reply["segments_computed"],
            blends_in_full=reply["blends_in_full"],
        )

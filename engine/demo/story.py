"""`kvtier demo`: ask questions about long documents, lose L1, lose the process, and prefill nothing again.

This process only directs. The engine runs in a child process (`worker.py`), which is killed with SIGKILL half-way.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvtier.connector.models import load_tokenizer, require_checkpoint
from kvtier.engine.demo.engine_process import EngineProcess, disk, progress_of
from kvtier.tiers import L1, L2, ConfigError

VOCABULARY: Final = 8192
_DOCUMENT_TOKENS: Final = 3000
_ANSWER_TOKENS: Final = 8
_ROOM: Final = 200  # tokens of context for the questions and answers of a conversation
_LEAST: Final = 256  # least tokens of a useful document
_WORKER: Final = "kvtier.engine.demo.worker"
_CAPTION: Final = (
    "prompt: its tokens; L1, L2, L3: how many were found there, the rest is computed\n"
    "MB: moved between tiers; same: text and every logit, as without kvtier"
)
_DOCUMENTS: Final = (
    ("The Python data model", ("specialnames", "typesmapping", "objects")),
    ("Compound statements", ("compound", "class", "function")),
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    model: Path | None = None  # a checkpoint directory; None: a random Llama of some 50 M parameters
    as_json: bool = False


_L3: Final = "file"  # the tier below L2 that the demo opens


@dataclass(frozen=True, slots=True)
class Stage:
    """One question asked of the engine, and the tier its answer's prefix must come from."""

    name: str
    document: int
    question: str
    expect: str | None  # its name; None for a cold run
    after: str = ""  # an earlier stage whose prompt and answer come first: a second turn


@dataclass(slots=True)
class StageResult:
    """The result of one stage. `identical`: greedy text and logits equal those without kvtier to the last bit."""

    name: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: dict[str, int]
    identical: bool
    bytes_moved: dict[str, int] = field(default_factory=dict)


_BEFORE_THE_KILL: Final = (
    Stage("cold prefill", 0, "What does __getattr__ do?", None),
    Stage("L1: a new question", 0, "When is __hash__ called?", L1),
    Stage("cold: another document", 1, "What does a finally clause do?", None),
    Stage("L2: L1 was overwritten", 0, "What does __getattr__ do?", L2),
    Stage("L1: second turn", 0, "And if it raises?", L1, after="L2: L1 was overwritten"),
)
_AFTER_THE_KILL: Final = (
    Stage("L3: after kill -9", 0, "What does __getattr__ do?", _L3),
    Stage("L3: other document", 1, "How do decorators nest?", _L3),
    Stage("third turn: every tier", 0, "Give an example.", _L3, after="L1: second turn"),
)


def demo(options: DemoOptions) -> int:
    """Run the demo. Returns the exit status: 0 if every answer was identical and every expected tier was hit."""
    console = Console(stderr=options.as_json)
    if options.model is not None:
        require_checkpoint(options.model)
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=disk()) as home, progress_of(console) as progress:
        story = _Story(Path(home), options, progress)
        runs = story.tell()
    identical = all(run.identical for run in runs)
    hit = all(
        stage.expect is None or run.cached_tokens[stage.expect] > 0
        for stage, run in zip((*_BEFORE_THE_KILL, *_AFTER_THE_KILL), runs, strict=True)
    )
    if options.as_json:
        print(json.dumps({"identical": identical, "every_tier_hit": hit, "runs": [asdict(run) for run in runs]}))
    else:
        _show(console, runs, identical, hit)
    return 0 if identical and hit else 1


class _Story:
    """The stages in order, over one directory that survives the kill."""

    def __init__(self, home: Path, options: DemoOptions, progress: Progress) -> None:
        self._home = home
        self._options = options
        self._progress = progress
        self._total = progress.add_task("the demo", total=len(_BEFORE_THE_KILL) + len(_AFTER_THE_KILL))
        self._tokenizer = self._train_tokenizer()
        self._documents: list[list[int]] = []
        self._conversations: dict[str, list[int]] = {}  # stage → prompt and answer
        self._references: dict[tuple[int, ...], dict[str, Any]] = {}  # prompt → the reply without kvtier

    def tell(self) -> list[StageResult]:
        with closing(EngineProcess(_WORKER, self._home, self._options.model, self._progress)) as child:
            context: int = child.opened["max_model_len"]
            length = min(_DOCUMENT_TOKENS, context - _ROOM)
            if length < _LEAST:
                raise ConfigError(f"--model: a context of {context} tokens; the demo needs {_LEAST + _ROOM} or more")
            self._documents = [self._document(title, names)[:length] for title, names in _DOCUMENTS]
            runs = [self._ask(child, stage) for stage in _BEFORE_THE_KILL]
            child.call("settle", {}, "writing to NVMe")
            child.kill()
        with closing(EngineProcess(_WORKER, self._home, self._options.model, self._progress)) as child:
            return runs + [self._ask(child, stage) for stage in _AFTER_THE_KILL]

    def _ask(self, child: EngineProcess, stage: Stage) -> StageResult:
        question = self._tokenizer.encode(f"\n\nQuestion: {stage.question}\nAnswer:").ids
        before = self._conversations[stage.after] if stage.after else self._documents[stage.document]
        prompt = [*before, *question]
        asked: dict[str, object] = {"prompt": prompt, "max_tokens": _ANSWER_TOKENS}
        reply = child.call("ask", asked, stage.name, len(prompt))
        reference = self._references.get(tuple(prompt))
        if reference is None:
            reference = child.call("ask", {**asked, "bare": True}, "  the same without kvtier", len(prompt))
            self._references[tuple(prompt)] = reference
        self._conversations[stage.name] = [*prompt, *reply["tokens"]]
        self._progress.advance(self._total)
        return StageResult(
            name=stage.name,
            ttft_ms=reply["ttft_ms"],
            prompt_tokens=len(prompt),
            cached_tokens=reply["cached_tokens"],
            identical=(reply["tokens"], reply["logits"]) == (reference["tokens"], reference["logits"]),
            bytes_moved=reply["bytes_moved"],
        )

    def _train_tokenizer(self) -> Tokenizer:
        if self._options.model is not None:
            return load_tokenizer(self._options.model)
        task = self._progress.add_task("training a BPE tokenizer on the Python manual", total=None)
        tokenizer = train_tokenizer()
        self._progress.update(task, total=1, completed=1)
        return tokenizer

    def _document(self, title: str, names: tuple[str, ...]) -> list[int]:
        text = "\n\n".join([title, *(topics[name] for name in names)])
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def train_tokenizer(special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer, trained in seconds on Python's own manual. Special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return tokenizer


def _show(console: Console, runs: list[StageResult], identical: bool, hit: bool) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "TTFT ms", "faster", "prompt", "L1", "L2", "L3", "MB", "same"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for run in runs:
        faster = "" if run.name.startswith("cold") else f"{runs[0].ttft_ms / run.ttft_ms:.0f} ×"
        cached = [str(run.cached_tokens[tier] or "·") for tier in (L1, L2, _L3)]
        moved = f"{sum(run.bytes_moved.values()) / 1e6:,.1f}"
        verdict = "yes" if run.identical else "[red]NO"
        table.add_row(run.name, f"{run.ttft_ms:,.0f}", faster, str(run.prompt_tokens), *cached, moved, verdict)
    console.print(table)
    console.print(_CAPTION, style="dim")
    if identical and hit:
        console.print("Every tier was hit, every answer is the same to the last bit.")
    if not identical:
        console.print("[red]An answer differs from the one without kvtier: this is a bug, please report it.")
    if not hit:
        console.print("[red]A tier that should have been hit was not.")

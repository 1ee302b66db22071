"""What `kvtier demo rag` found: results of each way to answer, what they must be like, as tables and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.tiers import ConfigError, require_extra

FULL_PREFILL: Final = "full prefill"
PREFIX_ONLY: Final = "prefix only"
AS_IT_IS: Final = "segments as is"
REPAIRED: Final = "segments repaired"
NAMES_SHOWN: Final = (FULL_PREFILL, PREFIX_ONLY, AS_IT_IS, REPAIRED)
SOURCES: Final = ("prefix", "segment", "repaired", "computed")
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


def show(console: Console, report: RagReport) -> None:
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

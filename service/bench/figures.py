"""What answers came to: times by percentile, tokens a second, cached tokens, errors by kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvtier.service.bench.asking import Answer
from kvtier.service.bench.load import MeasuredLoad

FORM: Final = 1  # of the JSON: `kvtier_bench`


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if values else None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One server's. None: the server did not say, or nothing was measured."""

    url: str
    model: str
    requests: int
    errors: dict[str, int]  # by kind
    ttft: Percentiles | None
    inter_token: Percentiles | None
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def cached_share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @classmethod
    def of(cls, url: str, model: str, answers: Sequence[Answer], seconds: float) -> "LoadFigures":
        """`seconds` is how long the load ran."""
        good = [each for each in answers if each.error is None]
        output = sum(_num_output(each) for each in good)
        told = [each for each in good if each.num_prompt is not None]
        says = [each for each in told if each.num_cached is not None]
        return cls(
            url,
            model,
            len(answers),
            dict(Counter(each.error for each in answers if each.error is not None)),
            Percentiles.of([each.ttft for each in good if each.ttft is not None]),
            Percentiles.of([gap for each in good for gap in each.gaps]),
            output,
            output / seconds if seconds > 0 else 0.0,
            sum(each.num_prompt or 0 for each in told) if told else None,
            sum(each.num_cached or 0 for each in says) if says else None,
        )


def _num_output(answer: Answer) -> int:
    if answer.num_output is not None:
        return answer.num_output
    return len(answer.gaps) + (answer.ttft is not None)


def as_json(measured: MeasuredLoad, figures: Sequence[LoadFigures], asked: dict[str, Any]) -> dict[str, Any]:
    """The document of `--json`. `asked` is what was asked for, by option."""
    servers = [{**asdict(each), "cached_share": each.cached_share} for each in figures]
    return {
        "kvtier_bench": FORM,
        "asked": asked,
        "seconds": measured.seconds,
        "is_whole": measured.is_whole,
        "in_flight": measured.in_flight,
        "servers": servers,
        "ttft": [[answer.ttft for answer in answers if answer.error is None] for answers in measured.answers],
    }


def rows_of(figures: Sequence[LoadFigures]) -> list[tuple[str, ...]]:
    """The table: a label, and a text for each server."""
    rows: list[tuple[str, ...]] = [
        ("requests", *(str(each.requests) for each in figures)),
        ("failed", *(str(sum(each.errors.values())) for each in figures)),
    ]
    for name, label in (("ttft", "TTFT"), ("inter_token", "inter-token")):
        for share in ("p50", "p90", "p99"):
            texts = (_milliseconds(getattr(each, name), share) for each in figures)
            rows.append((f"{label} {share}, ms", *texts))
    rows.append(("output tokens/s", *(f"{each.output_tokens_per_second:.1f}" for each in figures)))
    rows.append(
        ("prompt tokens", *("?" if each.prompt_tokens is None else str(each.prompt_tokens) for each in figures))
    )
    rows.append(("cached, % of them", *(_percent(each.cached_share) for each in figures)))
    kinds = sorted({kind for each in figures for kind in each.errors})
    rows += [(kind, *(str(each.errors.get(kind, 0)) for each in figures)) for kind in kinds]
    return rows


def _milliseconds(percentiles: Percentiles | None, share: str) -> str:
    return "–" if percentiles is None else f"{getattr(percentiles, share) * 1000:.1f}"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.1%}".removesuffix("%")

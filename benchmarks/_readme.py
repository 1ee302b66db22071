"""Writes what programs measured into the README, docs/performance.md and docs/models.md; `make lint` compares.

`python benchmarks/_readme.py`; it then says what the page still lacks: a goal, a row, a cause.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from _claims import CLAIMS, SIX, PageRow
from _goals import Target, held, is_end, left_out, without_mean
from _models_page import MODELS, models_table
from _scale_page import PAGES, filled

ROOT: Final = Path(__file__).resolve().parent.parent
PROGRAMS: Final = ROOT / "benchmarks"
PERFORMANCE: Final = ROOT / "docs" / "performance.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures: written by benchmarks/_readme.py from benchmarks/results/ -->\n"
END: Final = "<!-- end of figures -->\n"
OPTIONS: Final = {"pool_throughput": " --vllm .venv-vllm/bin/python"}  # without which a row stays without figures
NO_LIMIT: Final = 1.1  # a limit that is beaten by more is none
MISSED: Final = "## What was missed, and why\n"


def saved() -> dict[str, Any]:
    """The results that are kept, by benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}


def targets_of(document: Mapping[str, Any]) -> list[Target]:
    """All that a saved result is held to: what its program named, and what `_goals.py` makes of its rows."""
    return held(document["benchmark"], document["results"], [Target.saved(told) for told in document["targets"]])


def judged(results: Mapping[str, Any], claims: Sequence[PageRow] = CLAIMS) -> list["JudgedRow"]:
    """What became of each claim whose program is there, measured or not, in their order."""
    found = {name: targets_of(results[name]) for name in {claim.benchmark for claim in claims} & results.keys()}
    there = {path.stem for path in PROGRAMS.glob("*.py")} | results.keys()
    return [JudgedRow(claim, found.get(claim.benchmark, [])) for claim in claims if claim.benchmark in there]


class JudgedRow:
    """A claim beside the targets it is about: none if nobody measured it."""

    def __init__(self, claim: PageRow, targets: Sequence[Target]) -> None:
        self.claim = claim
        self.targets = [
            target if claim.goal is None else Target(target.name, claim.goal, target.measured, target.at_most)
            for target in targets
            if re.search(claim.pattern, target.name) and not is_end(target)
        ]

    @property
    def num_missed(self) -> int:
        return sum(not target.met for target in self.targets)

    @property
    def is_above_limit(self) -> bool:
        """Whether what was taken for a limit was beaten by so much that it is none."""
        return self.claim.limit and any(
            target.measured < 1 / NO_LIMIT if target.at_most else target.measured > NO_LIMIT for target in self.targets
        )

    @property
    def needs_cause(self) -> bool:
        return self.num_missed > 0 or self.is_above_limit

    def line(self, page: str) -> str:
        """The table's row. `page` is where the causes stand, from the page that has the table."""
        first, values = self.targets[0], sorted(target.measured for target in self.targets)
        shown = "–".join(_figure(value, first.limit) for value in dict.fromkeys((values[0], values[-1])))
        num, missed = len(self.targets), self.num_missed
        met = "yes" if not missed else "no" if num == 1 else f"{num - missed} of {num}"
        if self.is_above_limit:
            met += ", above its limit"
        if self.needs_cause and self.claim.cause:
            met += f" ([why]({page}#{anchor(self.claim.cause)}))"
        sign = "≤" if first.at_most else "≥"
        return f"| {self.claim.label} | {sign}{_figure(first.limit)} | {shown} | {met} |"


def anchor(heading: str) -> str:
    """What a link to a heading says."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def causes(page: str) -> list[str]:
    """The headings under which docs/performance.md says why a goal was missed."""
    section = page.partition(MISSED)[2].partition("\n## ")[0]
    return re.findall(r"^### (.*)$", section, re.MULTILINE)


def figures() -> str:
    """The table of all claims, what nobody measured yet, and machine and commit of each benchmark."""
    results = saved()
    found = judged(results)
    measured = [each.claim.benchmark for each in found if each.targets]
    parts = [_table(found, ""), *_origins(results, measured)]
    missing: dict[str, list[str]] = {}  # benchmark → its rows
    for each in found:
        if not each.targets and (each.claim.benchmark in results or not each.claim.benchmark.startswith("gpu_")):
            missing.setdefault(each.claim.benchmark, []).append(each.claim.label)
    if missing:
        told = [f"- {'; '.join(labels)}: run `{_command(name)}`." for name, labels in missing.items()]
        parts.append("\n".join(["Not measured yet:", "", *told]))
    on_gpu = sorted(
        {each.claim.benchmark for each in found if each.claim.benchmark.startswith("gpu_")} - results.keys()
    )
    if on_gpu:
        names = ", ".join(f"`{name}`" for name in on_gpu)
        parts.append(f"Not run on a GPU yet: {names}. [gpu.md](gpu.md) says how to run them.")
    return "\n\n".join(parts) + "\n"


def six() -> str:
    """The README's table, and how many of all figures reach their target."""
    results = saved()
    by_target = {(claim.benchmark, claim.pattern): claim for claim in CLAIMS}
    shown = [by_target[name, pattern]._replace(label=label) for label, name, pattern in SIX]
    every = judged(results)
    known = [each for each in every if each.targets]
    met = sum(not each.num_missed for each in known)
    told = f"{met} of all {len(known)} figures reach their target, {len(every) - len(known)} are not measured yet"
    parts = [_table(judged(results, shown), "docs/performance.md"), *_origins(results, [c.benchmark for c in shown])]
    return "\n\n".join([*parts, f"{told}; [docs/performance.md](docs/performance.md) has every one."]) + "\n"


def lacking(results: Mapping[str, Any], page: str, claims: Sequence[PageRow] = CLAIMS) -> list[str]:
    """What the page owes its readers: goals, rows and causes that are missing, and causes of what is met."""
    lines: list[str] = []
    for name, document in results.items():
        targets = targets_of(document)
        lines += left_out(name, document["results"], targets)
        lines += [f"{name}: {end}: its mean is no target" for end in without_mean(targets)]
        for target in targets:
            if is_end(target):  # its mean, the harder goal, has a row
                continue
            rows = [
                claim.label for claim in claims if claim.benchmark == name and re.search(claim.pattern, target.name)
            ]
            if len(rows) != 1:
                lines.append(f"{name}: {target.name}: {len(rows)} rows of _claims.py are about it; make it one")
    found, headings = judged(results, claims), causes(page)
    for each in found:
        if len({(target.limit, target.at_most) for target in each.targets}) > 1:
            lines.append(f"{each.claim.label}: several limits in one row; make it several rows")
        if each.needs_cause and each.claim.cause not in headings:
            missed = ", ".join(f"{target.measured:.3g}" for target in each.targets if not target.met)
            lines.append(
                f"{each.claim.label}: {missed or 'above its limit'}: name its cause in _claims.py and the page"
            )
        elif each.claim.cause and not each.needs_cause:
            lines.append(f"{each.claim.label}: met, or not measured: take the cause {each.claim.cause!r} out")
    used = {each.claim.cause for each in found}
    lines += [
        f"{heading!r}: no row names this cause; take it out of the page" for heading in headings if heading not in used
    ]
    return lines


def _command(name: str) -> str:
    return f"python benchmarks/{name}.py{OPTIONS.get(name, '')} --save"


def _table(found: Sequence[JudgedRow], page: str) -> str:
    lines = ["| what | target | measured | met |", "|---|--:|--:|---|"]
    return "\n".join([*lines, *(each.line(page) for each in found if each.targets)])


def _origins(results: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A line for each machine: the benchmarks that ran there, by commit."""
    origins: dict[str, dict[str, list[str]]] = {}  # machine → commit → benchmarks
    for name in sorted({*names} & results.keys()):
        document = results[name]
        origins.setdefault(machine_line(document["machine"]), {}).setdefault(document["commit"], []).append(f"`{name}`")
    return [
        f"Measured on {machine}, at commit "
        + "; ".join(f"`{at}`: {', '.join(names)}" for at, names in commits.items())
        + "."
        for machine, commits in sorted(origins.items())
    ]


def _figure(value: float, limit: float | None = None) -> str:
    """Three digits, or four where three cannot tell it from its limit."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return (
        f"{value:.4g}" if limit is not None and value != limit and f"{value:.3g}" == f"{limit:.3g}" else f"{value:.3g}"
    )


def machine_line(machine: Mapping[str, Any]) -> str:
    """What of a machine decides its figures, as people write it."""
    driver = f" with driver {machine['driver']}" if machine.get("driver") else ""
    gpu = f", {machine['gpu']}{driver}" if machine["gpu"] else ""
    versions = f"Python {machine['python']}, numpy {machine['numpy']}, torch {machine['torch']}"
    kernel = machine["kernel"].split("-")[0]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}, kernel {kernel}, {versions}"


def written(page: Path, table: str) -> str:
    """The page with `table` between its two marks."""
    text = page.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    return text[:start] + table + text[text.index(END, start) :]


def main() -> None:
    """Replace what stands between the two marks of each page, and print what is lacking."""
    PERFORMANCE.write_text(written(PERFORMANCE, figures()))
    README.write_text(written(README, six()))
    MODELS.write_text(written(MODELS, models_table()))
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    print("\n".join(chain(lacking(saved(), PERFORMANCE.read_text()), ["the pages are written"])))


if __name__ == "__main__":
    main()

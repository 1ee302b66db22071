"""Writes what programs measured into the README and docs/; lint compares.

`python benchmarks/_readme.py`; it then says what the page still lacks: a goal, a row, a cause.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, Final

from _claims import CLAIMS, SIX, PageRow
from _goals import Target, held, is_end, left_out, without_mean
from _report import ROOT, table

PROGRAMS: Final = ROOT / "benchmarks"
PERFORMANCE, MODELS = (ROOT / "docs" / f"{name}.md" for name in ("performance", "models"))
FILLED: Final = tuple(f"docs/{name}.md" for name in ("performance", "storage", "operate", "reuse"))  # between marks
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures: written by benchmarks/_readme.py from benchmarks/results/ -->\n"
END: Final = "<!-- end of figures -->\n"
OPTIONS: Final = {"pool_throughput": " --vllm .venv-vllm/bin/python"}  # without which a row stays without figures
NO_LIMIT: Final = 1.1  # a limit that is beaten by more is none
MISSED: Final = "## What was missed, and why\n"
MARK: Final = re.compile(r"(<!-- figures: (\w+), written by [\w/.]+ -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
NO_LIMIT_FOUND: Final = "no limit found"
LEFT_OUT: Final = ("largest error", "pack, Python GB/s", "unpack, Python GB/s")  # of a narrow table
ENGINES: Final = {"kvtier": "kvtier's engine", "transformers": "`KVTier`", "vllm": "vLLM, CPU", "sglang": "SGLang"}
SHOWN: Final = {"absent": "not in transformers", "not run": "–"}


def saved() -> dict[str, Any]:
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
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def causes(page: str) -> list[str]:
    section = page.partition(MISSED)[2].partition("\n## ")[0]
    return re.findall(r"^### (.*)$", section, re.MULTILINE)


def figures() -> str:
    """The table of all claims, what nobody measured yet, and machine and commit of each benchmark."""
    results = saved()
    found = judged(results)
    parts = [_claimed(found, ""), *_origins(results, [each.claim.benchmark for each in found if each.targets])]
    missing: dict[str, list[str]] = {}  # benchmark → its rows
    on_gpu: dict[str, None] = {}
    for each in found:
        name = each.claim.benchmark
        if name.startswith("gpu_") and name not in results:
            on_gpu[f"`{name}`"] = None
        elif not each.targets:
            missing.setdefault(name, []).append(each.claim.label)
    if missing:
        commands = {name: f"python benchmarks/{name}.py{OPTIONS.get(name, '')} --save" for name in missing}
        told = [f"- {'; '.join(labels)}: run `{commands[name]}`." for name, labels in missing.items()]
        parts.append("\n".join(["Not measured yet:", "", *told]))
    if on_gpu:
        parts.append(f"Not run on a GPU yet: {', '.join(sorted(on_gpu))}. [gpu.md](gpu.md) says how to run them.")
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
    parts = [_claimed(judged(results, shown), "docs/performance.md"), *_origins(results, [c.benchmark for c in shown])]
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
            rows = sum(claim.benchmark == name and bool(re.search(claim.pattern, target.name)) for claim in claims)
            if rows != 1:
                lines.append(f"{name}: {target.name}: {rows} rows of _claims.py are about it; make it one")
    found, headings = judged(results, claims), causes(page)
    for each in found:
        if len({(target.limit, target.at_most) for target in each.targets}) > 1:
            lines.append(f"{each.claim.label}: several limits in one row; make it several rows")
        if each.needs_cause and each.claim.cause not in headings:
            missed = ", ".join(f"{target.measured:.3g}" for target in each.targets if not target.met)
            told = missed or "above its limit"
            lines.append(f"{each.claim.label}: {told}: name its cause in _claims.py and the page")
        elif each.claim.cause and not each.needs_cause:
            lines.append(f"{each.claim.label}: met, or not measured: take the cause {each.claim.cause!r} out")
    unused = [heading for heading in headings if heading not in {each.claim.cause for each in found}]
    return lines + [f"{heading!r}: no row names this cause; take it out of the page" for heading in unused]


def _claimed(found: Sequence[JudgedRow], page: str) -> str:
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
    is_close = limit is not None and value != limit and f"{value:.3g}" == f"{limit:.3g}"
    return f"{value:.4g}" if is_close else f"{value:.3g}"


def machine_line(machine: Mapping[str, Any]) -> str:
    """What of a machine decides its figures, as people write it."""
    driver = f" with driver {machine['driver']}" if machine.get("driver") else ""
    gpu = f", {machine['gpu']}{driver}" if machine["gpu"] else ""
    versions = f"Python {machine['python']}, numpy {machine['numpy']}, torch {machine['torch']}"
    kernel = machine["kernel"].split("-")[0]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}, kernel {kernel}, {versions}"


def written(page: Path, table: str) -> str:
    text = page.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    return text[:start] + table + text[text.index(END, start) :]


# tables between the marks of pages


_RIGHT: Final = ("9 of 10 right, points", "5 of 10 right, points", "0 of 10 right, points")


def tables() -> dict[str, str]:
    """Each table of the pages by the word in its mark."""
    results = saved()
    scale, compressed = results["scale"], results["compression"]
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in scale["results"]:
        parts.setdefault(row["part"], []).append({name: row[name] for name in row if name != "part"})
    made = {}
    for part in ("redis", "objects"):  # figures that grow with the number of nodes: of the largest fleet
        most = max(row["nodes"] for row in parts[part])
        made[part] = table([row for row in parts[part] if row["nodes"] == most])
    limits = [(row["of"], row["limit"], row["holds up to"]) for row in parts["limits"]]
    told = [{"of": of, "limit": what, "up to, nodes": NO_LIMIT_FOUND if up is None else up} for of, what, up in limits]
    made["limits"] = table(told)
    made["machine"] = _machine(scale)
    kinds, tiers, kept, packed, answers = (
        [row for row in compressed["results"] if column in row]
        for column in ("ratio, plain", "SET GB/s", "KiB in a bucket", "with zstd", "right")
    )
    made["compression"] = "\n".join([*(table(rows) for rows in (kinds, tiers, kept) if rows), _machine(compressed)])
    packed = [{name: row[name] for name in row if name not in LEFT_OUT} for row in packed]
    made["lossy"] = f"{table(packed)}\n{table(answers)}\n{_machine(compressed)}" if packed else ""
    transfers, loads = ([row for row in results["backup"]["results"] if name in row] for name in ("transfer", "load"))
    made["backup"] = f"{table(transfers)}\n{table(loads)}\n{_machine(results['backup'])}"
    said: dict[str, list[dict[str, Any]]] = {}
    known = [row for row in results["hints"]["results"] if "optimum %" in row]
    for row in results["hints"]["results"]:
        if "said" in row:
            said.setdefault(row["said"], []).append(row)
    worth = [
        {"said": word, "traces": len(rows)}
        | {name: f"{mean(row[name] for row in rows):.2f} ({min(row[name] for row in rows):.2f})" for name in _RIGHT}
        for word, rows in said.items()
    ]
    made["hints"] = f"{table(worth)}\n{table(known)}\n{_machine(results['hints'])}"
    made["agents"] = f"{table(results['agent_reuse']['results'])}\n{_machine(results['agent_reuse'])}"
    made["tasks"] = f"{table(_by_rule(results['task_accuracy']['results']))}\n{_machine(results['task_accuracy'])}"
    return made


def _by_rule(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Of each rule the shares and their figures in one row, in percent."""
    rules: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rules.setdefault(row["rule"], []).append(row)
    return [
        {"rule": rule}
        | {
            name: "/".join(f"{100 * row[name]:.0f}" if isinstance(row[name], float) else row[name] for row in some)
            for name in some[0]
            if name not in ("rule", "repaired")
        }
        for rule, some in rules.items()
    ]


def filled(text: str) -> str:
    """A page with what was saved between its marks. KeyError if a mark names no table."""
    made = tables()
    return MARK.sub(lambda found: found[1] + made[found[2]] + found[3], text)


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, commit `{document['commit']}`.\n"


# docs/models.md


def general(message: str) -> str:
    """A message without the name of the model and of the layer: rows that fail alike share it."""
    return re.sub(r"layer \S+ ", "layer … ", re.sub(r"model kind '[^']+'", "model kind …", message))


def models_table() -> str:
    """Architectures by what came of them, messages by number, and what it was measured with."""
    from _architectures import ARCHITECTURES  # takes torch along, which no other page needs

    document = saved()["models"]
    rows = {(row["architecture"], row["engine"]): row for row in document["results"]}
    notes: dict[tuple[str, str], int] = {}  # engine and message → number
    alike: dict[str, list[str]] = {}  # what came of them → labels
    everywhere: list[str] = []
    for one in ARCHITECTURES:
        found = {engine: rows.get((one.name, engine)) for engine in ENGINES}
        if all(row is not None and row["status"] == "hits" for row in found.values()):
            everywhere.append(one.label)
            continue
        cells = []
        for engine, row in found.items():
            shown = "not tried" if row is None else SHOWN.get(row["status"], row["status"])
            if row is not None and row["message"] and row["status"] != "not run":  # that one is the engine's own
                number = notes.setdefault((engine, general(row["message"])), len(notes) + 1)
                shown = f"{shown} ({number})"
            cells.append(f"{ENGINES[engine]} {shown}")
        alike.setdefault(" · ".join(cells), []).append(one.label)
    hits = {engine: [row["status"] == "hits" for (_, its), row in rows.items() if its == engine] for engine in ENGINES}
    counts = [f"{ENGINES[engine]} {sum(each)}" for engine, each in hits.items() if each]
    messages = [f"{i}. {ENGINES[engine]}: `{told.replace('`', chr(39))}`" for (engine, told), i in notes.items()]
    setup = [f"- {ENGINES[engine]}: {document['setup'][engine]}" for engine in ENGINES if engine in document["setup"]]
    parts = [
        f"Works and hits, of {len(ARCHITECTURES)}: {', '.join(counts)}.",
        f"Hits in all of them: {'; '.join(everywhere)}. The others:",
        "\n".join(f"- {outcome}: {'; '.join(labels)}" for outcome, labels in alike.items()),
        "Messages:",
        "\n".join(messages),
        f"Versions, at commit `{document['commit']}`:",
        "\n".join(setup),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    for page, made in ((PERFORMANCE, figures), (README, six), (MODELS, models_table)):
        page.write_text(written(page, made()))
    for page in (ROOT / name for name in FILLED):
        page.write_text(filled(page.read_text()))
    print("\n".join(chain(lacking(saved(), PERFORMANCE.read_text()), ["the pages are written"])))


if __name__ == "__main__":
    main()

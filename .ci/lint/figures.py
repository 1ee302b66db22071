"""Rules of figures: pages show what programs saved, each figure has a goal, and each miss has its cause.

Programs of `benchmarks/` and `tests/endurance/` make the pages' tables. They are imported when a rule asks for them:
some take torch along, which takes seconds.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lint.tree import Tree

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = "benchmarks/results"
PAGES: Final = "python benchmarks/_readme.py"
DRAWING: Final = "docs/architecture.svg"
WAY: Final = "python benchmarks/block_way.py --save"
WAY_OUT: Final = r"(use|leave|start|set|name|choose|load) [^;]*$"
LEAST_TOKENS: Final = 128  # of 200 that a model's row has to find, to be a hit


def program(name: str) -> Any:
    """A module of benchmarks/ or tests/endurance/."""
    for folder in ("benchmarks", "tests/endurance"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    return import_module(name)


# pages


def _with_way(page: Path) -> str:
    rows = json.loads((ROOT / RESULTS / "block_way.json").read_text())["results"]
    return str(program("block_way").with_table(page.read_text(), rows))


def _with(tables: str, page: Path) -> str:
    return str(program("_readme").written(page, tables))


def _scaled(text: str) -> str:
    return str(program("_readme").filled(text))


# What a program writes, whole or in part → the command, and what the file would be if it ran now.
WRITTEN: Final[Mapping[str, tuple[str, Callable[[Path], str]]]] = {
    "docs/performance.md": (PAGES, lambda page: _scaled(_with(program("_readme").figures(), page))),
    "README.md": (PAGES, lambda page: _with(program("_readme").six(), page)),
    "docs/models.md": (PAGES, lambda page: _with(program("_readme").models_table(), page)),
    "docs/storage.md": (PAGES, lambda page: _scaled(page.read_text())),
    "docs/operate.md": (PAGES, lambda page: _scaled(page.read_text())),
    "docs/reuse.md": (PAGES, lambda page: _scaled(page.read_text())),
    "docs/faults.md": ("python tests/endurance/figures.py", lambda page: str(program("figures").written(page))),
    "docs/architecture.md": (WAY, _with_way),
}


def figures(tree: Tree) -> Iterator[str]:
    """The figures of the pages are those that programs saved."""
    for page, (command, written) in tree.each(WRITTEN.items()):
        text = tree.text(page)
        if text != written(tree.root / page):
            yield f"{page}: its figures are not the saved ones: run `{command}`"


def saved_tables(tree: Tree) -> Iterator[str]:
    """Each table that benchmarks/_readme.py makes stands in one page, once."""
    tables = program("_readme")
    text = "".join(tree.text(page) for page in tables.FILLED)
    shown = Counter(name for _, name, _ in tables.MARK.findall(text))
    for name in tree.each(tables.tables()):
        if shown[name] != 1:
            yield f"{', '.join(tables.FILLED)}: the table {name!r} stands there {shown[name]} times"


def stories(tree: Tree) -> Iterator[str]:
    """A page that has one type a script shows what it printed."""
    scripts = program("_stories")
    for page in tree.each(scripts.PAGES):
        block = tree.text(f"docs/{page}").partition(scripts.BEGIN)[2].partition("```\n")[2].partition("```")[0]
        lines = block.splitlines()
        if len(lines) <= 5 or list(scripts.shown(["before", *lines])) != lines:
            yield f"docs/{page}: what its script printed is not as printed: run `python benchmarks/_stories.py {page}`"


def drawing(tree: Tree) -> Iterator[str]:
    """Every file that the drawing of docs/architecture.md names is in the tree."""
    for path in tree.each(re.findall(r"[\w/]+\.py", tree.text(DRAWING))):
        if not tree.paths(f"[tces]*/**/{path}"):
            yield f"{DRAWING}: {path}: no such file"


# goals


def goals(tree: Tree) -> Iterator[str]:
    """Every saved figure has a goal and a row, what misses has its cause, and no goal is laxer than it was."""
    tables, claims, page = program("_readme"), program("_claims").CLAIMS, tree.text("docs/performance.md")
    results = {Path(path).stem: json.loads(tree.text(path)) for path in tree.each(tree.paths(f"{RESULTS}/*.json"))}
    yield from tables.lacking(results, page, claims)
    for heading, number in Counter(tables.causes(page)).items():
        if number > 1:
            yield f"docs/performance.md: the cause {heading!r} stands there {number} times"
    for claim in claims:
        if claim.goal is not None and claim.benchmark in results:
            targets = tables.targets_of(results[claim.benchmark])
            raised = tables.JudgedRow(claim, targets).targets
            told = tables.JudgedRow(claim._replace(goal=None), targets).targets
            for new, old in zip(raised, told, strict=True):
                if new.limit > old.limit if old.at_most else new.limit < old.limit:
                    yield f"{claim.label}: its goal {new.limit:g} is laxer than the saved {old.limit:g}"
    for benchmark, unheld in program("_goals").UNHELD.items():
        for each in unheld:
            rows = results[benchmark]["results"] if benchmark in results else [{each.column: 0}]
            if not each.why or not any(each.column in ("", *row) for row in rows):
                yield f"benchmarks/_goals.py: {benchmark}: {each.column!r}: it has no reason, or no row has the column"


def six(tree: Tree) -> Iterator[str]:
    """The README shows six figures of docs/performance.md, means and no ends of intervals."""
    claims, page = program("_claims"), tree.text("README.md")
    known = {(claim.benchmark, claim.pattern) for claim in claims.CLAIMS}
    if len(claims.SIX) != 6:
        yield f"benchmarks/_claims.py: {len(claims.SIX)} figures are no six"
    for label, name, pattern in tree.each(claims.SIX):
        if (name, pattern) not in known or "end" in pattern or f"| {label} |" not in page:
            yield f"benchmarks/_claims.py: {label}: no row of docs/performance.md and README.md, or an interval's end"


def models(tree: Tree) -> Iterator[str]:
    """Every engine met every architecture, a hit is one in both rounds, and each refusal ends with what to do."""
    page, where = program("_readme"), f"{RESULTS}/models.json"
    document = json.loads(tree.text(where))
    known = {one.name for one in program("_architectures").ARCHITECTURES}
    rows = {(row["engine"], row["architecture"]): row for row in tree.each(document["results"])}
    if stray := sorted(rows.keys() ^ {(engine, name) for engine in page.ENGINES for name in known}):
        yield f"{where}: tried, or to be tried, and not both: {stray}"
    if document["benchmark"] != "models" or not all(target["met"] for target in document["targets"]):
        yield f"{where}: a target is missed: {document['targets']}"
    for (engine, name), row in rows.items():
        message = page.general(row["message"])
        if row["status"] not in ("hits", "no hits", "refused", "absent", "not run"):
            yield f"{where}: {engine}, {name}: {row['status']!r} is no status"
        if (row["status"] == "hits") != (min(row["warm"], row["restart"]) >= LEAST_TOKENS):
            yield f"{where}: {engine}, {name}: {row['status']}, with {row['warm']} and then {row['restart']} tokens"
        if row["status"] in ("refused", "no hits") and not re.search(WAY_OUT, message):
            yield f"{where}: {engine}, {name}: the message does not end with what to do: {message}"

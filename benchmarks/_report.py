"""What every benchmark shares: its command line, the machine it ran on, and the report it prints or saves."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from _goals import SavedRow, held, left_out
from _goals import Target as Target  # programs name their goals by it
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parent.parent
SHARED: Final = ROOT.parent / "shared"  # traces, and a trained model: beside the checkout, where they are
RESULTS: Final = ROOT / "benchmarks" / "results"
_DEFAULT, _WIDE = 80, 240  # columns that rich takes for a pipe or file, in which tables fold, and what they take
Row = dict[str, Any]  # of a table


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the options all benchmarks share; `doc` is the program's `__doc__`.

    From here on SIGTERM ends the program as Ctrl-C would: what it has made or started goes with it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options.add_argument("--quick", action="store_true", help="a smaller run: checks that it works, proves no figure")
    options.add_argument("--save", action="store_true", help="also write benchmarks/results/NAME.json")
    return options


def disk_parser(doc: str | None) -> argparse.ArgumentParser:
    """The same, of a program that measures a disk."""
    options = parser(doc)
    options.add_argument("--directory", type=Path, default=Path(), help="where on the disk to measure (default: here)")
    return options


def machine() -> dict[str, object]:
    """What of the machine decides a figure: processor, cores, memory (GiB), kernel, Python, libraries, GPU, driver."""
    cpu = _told("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = int((_told("/proc/meminfo", "MemTotal:") or "0").split()[0]) / 2**20
    found: Row = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1)}
    found |= {"kernel": platform.release(), "python": platform.python_version()}
    installed = {each.name: each.version for each in metadata.distributions() if each.name in ("numpy", "torch")}
    found |= {name: installed.get(name) for name in ("numpy", "torch")}
    asked = {"gpu": "name", "driver": "driver_version"}
    smi = {name: _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader") for name, what in asked.items()}
    return found | {name: told or None for name, told in smi.items()}


def commit() -> str:
    """The checked-out commit, short, with `-dirty` if the code differs from it; `unknown` outside a git checkout.

    Results and pages don't count as code: saving one benchmark would make the next one dirty. In a copy of a checkout
    that was made for another machine (docs/gpu.md) it is what `.gpu/commit` says.
    """
    git = ("git", "-C", str(ROOT))
    if not (head := _output(*git, "rev-parse", "--short=12", "HEAD")):
        return _told(str(ROOT / ".gpu" / "commit"), "") or "unknown"
    code = ("--", ".", ":!benchmarks/results", ":!*.md")
    return head + "-dirty" * bool(_output(*git, "status", "--porcelain", "--untracked-files=no", *code))


def report(
    name: str,
    rows: Sequence[SavedRow],
    targets: Sequence[Target],
    as_json: bool,
    save: bool = False,
    setup: SavedRow | None = None,
) -> int:
    """Print the results, as tables or as one JSON object; with `save`, also write benchmarks/results/NAME.json.

    `setup` is what of the command line decides the figures. Rows are held to the goals of `_goals.py` as well; what has
    none is told on stderr. Returns the exit status: 0 also if a target was missed, since a miss is a result.
    """
    targets = held(name, rows, targets)
    for line in left_out(name, rows, targets):
        progress(line)
    document = _document(name, rows, targets, setup)
    if save:
        _write(document)
    if as_json:
        print(json.dumps(document))
    else:
        _print_tables(document, targets)
    return 0


def keep(name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow) -> None:
    """Write benchmarks/results/NAME.json, also while a long run goes on: what it has is not lost by an interruption."""
    _write(_document(name, rows, targets, setup))


def _write(document: Row) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{document['benchmark']}.json").write_text(json.dumps(document, indent=1) + "\n")


def progress(message: str) -> None:
    """One line on stderr, so that a long run shows it is alive and stdout stays parseable."""
    print(message, file=sys.stderr, flush=True)


def _document(name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow | None) -> Row:
    document: Row = {"benchmark": name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    document |= {"machine": machine(), "commit": commit(), **({"setup": dict(setup)} if setup else {})}
    return document | {"results": [dict(row) for row in rows], "targets": [target.as_dict() for target in targets]}


def _print_tables(document: Row, targets: Sequence[Target]) -> None:
    console = Console()
    if not console.is_terminal and console.width == _DEFAULT:
        console.width = _WIDE
    caption = "  ·  ".join(f"{what} {value}" for what, value in document.get("setup", {}).items()) or None
    here = document["machine"]
    title = f"{document['benchmark']}  ·  {here['cpu']}, {here['cores']} cores  ·  {document['commit']}"
    for kind in _of_one_kind(document["results"]):
        table = Table(title=title, caption=caption)
        columns = list(dict.fromkeys(key for row in kind for key in row))
        for column in columns:
            numeric = all(isinstance(row.get(column), int | float | None) for row in kind)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in kind:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        console.print(table)
        title, caption = "", None
    if targets:
        verdicts = Table("target", "limit", "measured", "met")
        for target in targets:
            met = "[green]yes[/]" if target.met else "[red]no[/]"
            limit = f"{'≤' if target.at_most else '≥'} {target.limit:g}"
            verdicts.add_row(target.name, limit, f"{target.measured:.4g}", met)
        console.print(verdicts)


def _of_one_kind(rows: Sequence[SavedRow]) -> list[list[SavedRow]]:
    """Rows of one table: each has all columns of the one before it, or some of them and no other."""
    kinds: list[list[SavedRow]] = []
    for row in rows:
        last = kinds[-1][-1].keys() if kinds else set[str]()
        if kinds and (row.keys() <= last or row.keys() >= last):
            kinds[-1].append(row)
        else:
            kinds.append([row])
    return kinds


def _cell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _told(path: str, what: str) -> str:
    """What a file's first line that begins so says, behind a colon where it has one."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[-1].strip() for line in lines if line.startswith(what)), "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

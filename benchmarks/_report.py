"""What every benchmark shares: its command line, the machine it ran on, and the report it prints or saves."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from _goals import SavedRow, held, left_out
from _goals import Target as Target  # programs name their goals by it
from rich.console import Console
from rich.table import Table

_ROOT: Final = Path(__file__).resolve().parent.parent
_DEFAULT: Final = 80  # columns that rich takes for a pipe or file, in which tables fold
_WIDE: Final = 240  # … and what they take
RESULTS: Final = _ROOT / "benchmarks" / "results"


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


def machine() -> dict[str, object]:
    """What of the machine decides a figure: processor, cores, memory (GiB), kernel, Python, libraries, GPU, driver."""
    gpu, driver = (
        _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader") for what in ("name", "driver_version")
    )
    return {
        "cpu": _told("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_told("/proc/meminfo", "MemTotal:") or "0").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "gpu": gpu or None,
        "driver": driver or None,
    }


def commit() -> str:
    """The checked-out commit, short, with `-dirty` if the code differs from it; `unknown` outside a git checkout.

    Results and pages don't count as code: saving one benchmark would make the next one dirty. In a copy of a checkout
    that was made for another machine (docs/gpu.md) it is what `.gpu/commit` says.
    """
    head = _output("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    if not head:
        return _told(str(_ROOT / ".gpu" / "commit"), "") or "unknown"
    code = ("--", ".", ":!benchmarks/results", ":!*.md")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no", *code)
    return f"{head}{'-dirty' if changed else ''}"


def report(
    name: str,
    rows: Sequence[SavedRow],
    targets: Sequence[Target],
    as_json: bool,
    save: bool = False,
    setup: SavedRow | None = None,
) -> int:
    """Print the results, as tables or as one JSON object; with `save`, also write benchmarks/results/NAME.json.

    `setup` is what of the command line decides the figures.

    Rows of a column that is a goal for others are held to it as well (`_goals.py`); what has no goal is told on stderr.

    Returns the program's exit status: 0 also if a target was missed, since a miss is a result, told as such.
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
        _print_tables(name, rows, targets, setup or {})
    return 0


def keep(name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow) -> None:
    """Write benchmarks/results/NAME.json while a long run goes on: what it has is not lost if it is interrupted."""
    _write(_document(name, rows, targets, setup))


def progress(message: str) -> None:
    """One line on stderr, so that a long run shows it is alive and stdout stays parseable."""
    print(message, file=sys.stderr, flush=True)


def _document(
    name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow | None
) -> dict[str, object]:
    return {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        **({"setup": dict(setup)} if setup else {}),
        "results": [dict(row) for row in rows],
        "targets": [target.as_dict() for target in targets],
    }


def _write(document: Mapping[str, object]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{document['benchmark']}.json").write_text(json.dumps(document, indent=1) + "\n")


def _print_tables(name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow) -> None:
    console = Console()
    if not console.is_terminal and console.width == _DEFAULT:
        console.width = _WIDE
    caption = "  ·  ".join(f"{what} {value}" for what, value in setup.items()) or None
    title = f"{name}  ·  {machine()['cpu']}, {machine()['cores']} cores  ·  {commit()}"
    for kind in _of_one_kind(rows):
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
            limit = f"{'≤' if target.at_most else '≥'} {target.limit:g}"
            verdicts.add_row(
                target.name, limit, f"{target.measured:.4g}", "[green]yes[/]" if target.met else "[red]no[/]"
            )
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


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

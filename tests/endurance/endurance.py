"""What the long runs share: their command line, where a figure comes from, and how a verdict is told and kept."""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from _report import commit, machine
from rich.console import Console
from rich.table import Table

_SHOWN = 5  # of the things that went wrong
_LINE = 30.0  # seconds between two lines of progress


def options(doc: str | None, amount: str, default: float) -> argparse.ArgumentParser:
    """A command line with `--AMOUNT`, `--seed` and `--json FILE`. SIGTERM ends the program as Ctrl-C would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = int if isinstance(default, int) else float
    made.add_argument(f"--{amount}", type=kind, default=default, help=f"default {default:g}")
    made.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="printed at the start")
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    return made


def origin() -> dict[str, object]:
    """The machine and the commit that a figure belongs to."""
    return {"machine": machine(), "commit": commit()}


def tell(report: Mapping[str, Any], wrong: Sequence[str], save: Path | None) -> int:
    """Print the figures as a table, write them where asked; the exit status: 1 if anything was wrong."""
    if save is not None:
        save.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("what", "figure", title=f"{report['program']}, seed {report['seed']}, commit {report['commit']}")
    for name, value in report.items():
        if name not in ("program", "seed", "commit", "machine", "growth"):
            table.add_row(name, _short(value, name in wrong))
    for each in report.get("growth", []):
        table.add_row(f"growth of {each['name']}", f"{each['rss']:.0f} → {each['rss_end']:.0f} MiB, "
                      f"{each['slope']:+.1f} MiB/h over {each['minutes']:.0f} min; descriptors {each['descriptors']} → "
                      f"{each['descriptors_end']}, threads {each['threads']} → {each['threads_end']}")  # fmt: skip
    Console(width=120).print(table)
    failed = [name for name in wrong if report[name]]
    for name in failed:
        for each in report[name][:_SHOWN] if isinstance(report[name], list) else [report[name]]:
            print(f"{name}: {each}", file=sys.stderr)
    return 1 if failed else 0


def _short(value: Any, counts: bool) -> str:
    if isinstance(value, list) and counts:
        return str(len(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


class Progress:
    """A line of progress every half minute, so that a long run shows that it is alive."""

    def __init__(self, what: str, goal: int) -> None:
        self._what, self._goal, self._done = what, goal, 0
        self._started = self._told = time.monotonic()

    def add(self, number: int) -> None:
        """So many more are done."""
        self._done += number
        if time.monotonic() - self._told > _LINE:
            self._told = time.monotonic()
            print(f"{self._done:,} of {self._goal:,} {self._what}, {self._told - self._started:.0f} s", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def within(condition: Callable[[], bool]) -> bool:
    """Whether it comes about, within two minutes: a busy machine is no fault."""
    end = time.monotonic() + 120.0
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True

"""What every benchmark shares: its command line, the machine it ran on, races in turns, and the report it prints."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
from _goals import SavedRow, held, left_out
from _goals import Target as Target  # programs name their goals by it

from kvtier.tiers import KVTierError
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import COMPILED

ROOT: Final = Path(__file__).resolve().parent.parent
SHARED: Final = ROOT.parent / "shared"  # traces, and a trained model: beside the checkout, where they are
RESULTS: Final = ROOT / "benchmarks" / "results"
PYTHON: Final = "Python alone"  # a form of the core; the other one has extension modules
Row = dict[str, Any]  # of a table
Given = argparse.Namespace  # the command line; `given.error(message)` ends the program with status 2
Option = Callable[[argparse.ArgumentParser], object]
# Rows, then targets, then what of the command line decides the figures; or the exit status of what reported by itself.
Result = Sequence[SavedRow] | tuple[Any, ...] | int
K = TypeVar("K")
V = TypeVar("V")


# the command line and the report


def option(*names: str, **told: Any) -> Option:
    return lambda parser: parser.add_argument(*names, **told)


DISK: Final = option("--directory", type=Path, default=Path(), help="where on the disk to measure (default: here)")


def program(*options: Option) -> Callable[[Callable[[Given], Result]], Callable[[], int]]:
    """Make `main` of a function of the command line, which has the options all benchmarks share, and these.

    The last definition of a module: its program runs now. SIGTERM ends it as Ctrl-C would: what it has made or started
    goes with it. Its results are named after the module. A KVTierError is one line on stderr, and status 2.
    """

    def made(run: Callable[[Given], Result]) -> Callable[[], int]:
        def main() -> int:
            module = sys.modules[run.__module__]
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            parser = argparse.ArgumentParser(
                description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
            parser.add_argument("--quick", action="store_true", help="a smaller run: it works, but proves no figure")
            parser.add_argument("--save", action="store_true", help="also write benchmarks/results/NAME.json")
            for add in options:
                add(parser)
            given = parser.parse_args()
            given.name, given.error = Path(str(module.__file__)).stem, parser.error
            try:
                result = run(given)
            except KVTierError as error:
                print(f"{given.name}: {error}", file=sys.stderr)
                return 2
            if isinstance(result, int):
                return result
            parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
            return report(given, *parts)

        if run.__module__ == "__main__":
            sys.exit(main())
        return main

    return made


def report(
    given: Given, rows: Sequence[SavedRow], targets: Sequence[Target] = (), setup: SavedRow | None = None
) -> int:
    """Print the results, as tables or as one JSON object; with --save, also write benchmarks/results/NAME.json.

    Rows are held to the goals of `_goals.py` as well; what has none is told on stderr. Returns the exit status: 0 also
    if a target was missed, since a miss is a result.
    """
    targets = held(given.name, rows, targets)
    for line in left_out(given.name, rows, targets):
        progress(line)
    document = _document(given.name, rows, targets, setup)
    if given.save:
        _write(document)
    print(json.dumps(document) if given.json else "\n".join(_tables(document, targets)))
    return 0


def keep(given: Given, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow) -> None:
    """Write benchmarks/results/NAME.json, also while a long run goes on: what it has is not lost by an interruption."""
    _write(_document(given.name, rows, targets, setup))


def progress(message: str) -> None:
    """One line on stderr, so that a long run shows it is alive and stdout stays parseable."""
    print(message, file=sys.stderr, flush=True)


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


def table(rows: Sequence[SavedRow], nothing: str = "none is enough") -> str:
    """Markdown; numbers to the right. `nothing` stands for None."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return nothing if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    columns = list(dict.fromkeys(name for row in rows for name in row))
    aligned = ["--:" if all(not isinstance(row.get(name), str) for row in rows) else "---" for name in columns]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(aligned)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row.get(name)) for name in columns)} |" for row in rows)]) + "\n"


def _document(name: str, rows: Sequence[SavedRow], targets: Sequence[Target], setup: SavedRow | None) -> Row:
    document: Row = {"benchmark": name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    document |= {"machine": machine(), "commit": commit(), **({"setup": dict(setup)} if setup else {})}
    return document | {"results": [dict(row) for row in rows], "targets": [target.as_dict() for target in targets]}


def _write(document: Row) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{document['benchmark']}.json").write_text(json.dumps(document, indent=1) + "\n")


def _tables(document: Row, targets: Sequence[Target]) -> Iterator[str]:
    """Rows of one table: each has all columns of the one before it, or some of them and no other."""
    here = document["machine"]
    yield f"{document['benchmark']}  ·  {here['cpu']}, {here['cores']} cores  ·  {document['commit']}"
    yield "  ·  ".join(f"{what} {value}" for what, value in document.get("setup", {}).items()) + "\n"
    kinds: list[list[SavedRow]] = []
    for row in document["results"]:
        last = kinds[-1][-1].keys() if kinds else set[str]()
        if not kinds or not (row.keys() <= last or row.keys() >= last):
            kinds.append([])
        kinds[-1].append(row)
    yield from (table(kind, "") for kind in kinds)
    yield table([each.as_dict() for each in targets])


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


# races: the time of an action, actions by turns, speeds that are compared, the core's two forms


class Speed(NamedTuple):
    """What one run moved."""

    gb_per_s: float
    cpu_s_per_gb: float


class Race:
    """Speeds of sides, whatever tells them apart; a ratio is the median over pairs of one round."""

    def __init__(self) -> None:
        self.speeds: defaultdict[Any, list[Speed]] = defaultdict(list)

    def add(self, side: object, speed: Speed) -> None:
        self.speeds[side].append(speed)

    def rate(self, side: object) -> float:
        return median(speed.gb_per_s for speed in self.speeds[side])

    def cpu(self, side: object) -> float:
        """CPU seconds a GB."""
        return median(speed.cpu_s_per_gb for speed in self.speeds[side])

    def ratio(self, side: object, other: object) -> float:
        """How many times as fast one side was as the other."""
        ours, theirs = ([speed.gb_per_s for speed in self.speeds[each]] for each in (side, other))
        return of_pairs(ours, theirs)

    def best(self, sides: Iterable[K]) -> K:
        return max(sides, key=self.rate)


def of_pairs(
    ours: Sequence[float], theirs: Sequence[float], compare: Callable[[float, float], float] = lambda a, b: a / b
) -> float:
    """The median over rounds of what our time is by theirs of the same round, or `compare`d in another way."""
    return median(compare(a, b) for a, b in zip(ours, theirs, strict=True))


def took(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def speed_of(
    action: Callable[[], object], num_bytes: float, cpu_clock: Callable[[], float] = time.process_time
) -> Speed:
    cpu, wall = cpu_clock(), took(action)
    return Speed(num_bytes / wall / 1e9, (cpu_clock() - cpu) / num_bytes * 1e9)


def in_turns(actions: Mapping[K, Callable[[], V]], rounds: int, *, warm_up: int = 0) -> dict[K, list[V]]:
    """What each action returned: one after the other, every second round from the last to the first."""
    found: dict[K, list[V]] = {name: [] for name in actions}
    for number in range(-warm_up, rounds):
        for name in actions if number % 2 else reversed([*actions]):
            result = actions[name]()
            if number >= 0:
                found[name].append(result)
    return found


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval, from a bootstrap."""
    logs = np.log(np.array(ratios))
    draws = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def is_built(module: str = "kvtier.tiers.pool.core_compiled") -> bool:
    return extension(module) is not None


@contextmanager
def form(name: str) -> Iterator[None]:
    """What is opened now finds no extension module, if it is `PYTHON`."""
    with patch.dict(os.environ, {COMPILED: "off"} if name == PYTHON else {}):
        yield

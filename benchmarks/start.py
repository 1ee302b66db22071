"""What a start costs: CPU seconds of `import kvtier` and of helps, beside an interpreter that does nothing."""

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from _report import Target, parser, progress, report

STARTS: Final[dict[str, tuple[tuple[str, ...], float | None]]] = {  # program, CPU s at most
    "python -c pass": (("-c", "pass"), None),
    "import kvtier": (("-c", "import kvtier"), 0.1),
    "kvtier --help": (("-m", "kvtier.cli", "--help"), 0.25),
    "kvtier status --help": (("-m", "kvtier.cli", "status", "--help"), 0.25),
    "kvtier cluster up --help": (("-m", "kvtier.cli", "cluster", "up", "--help"), 0.25),
}


def cpu_seconds(arguments: Sequence[str]) -> float:
    """CPU time, user and system, of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"TERM": "dumb"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds = 3 if options.quick else 15
    took: dict[str, list[float]] = {name: [] for name in STARTS}
    for turn in range(rounds + 1):  # the first fills the page cache
        progress(f"round {turn} of {rounds}")
        for name, (arguments, _) in STARTS.items():
            took[name].append(cpu_seconds(arguments))
    medians = {name: statistics.median(taken[1:]) for name, taken in took.items()}
    rows = [{"start": name, "CPU s": medians[name], "best": min(took[name])} for name in STARTS]
    targets = [Target(name, limit, medians[name]) for name, (_, limit) in STARTS.items() if limit is not None]
    return report("start", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())

"""What a start costs: CPU seconds of `import kvtier` and of helps, beside an interpreter that does nothing."""

import os
import resource
import subprocess
import sys
from functools import partial
from statistics import median
from typing import Final

from _races import in_turns
from _report import Target, parser, progress, report

STARTS: Final[dict[str, tuple[tuple[str, ...], float | None]]] = {  # program, CPU s at most
    "python -c pass": (("-c", "pass"), None),
    "import kvtier": (("-c", "import kvtier"), 0.1),
    "kvtier --help": (("-m", "kvtier.cli", "--help"), 0.25),
    "kvtier status --help": (("-m", "kvtier.cli", "status", "--help"), 0.25),
    "kvtier cluster up --help": (("-m", "kvtier.cli", "cluster", "up", "--help"), 0.25),
}


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"TERM": "dumb"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds = 3 if options.quick else 15
    progress(f"{rounds} rounds")
    turns = {name: partial(cpu_seconds, *arguments) for name, (arguments, _) in STARTS.items()}
    took = in_turns(turns, rounds, warm_up=1)  # it fills the page cache
    rows = [{"start": name, "CPU s": median(each), "best": min(each)} for name, each in took.items()]
    targets = [Target(name, limit, median(took[name])) for name, (_, limit) in STARTS.items() if limit is not None]
    return report("start", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())

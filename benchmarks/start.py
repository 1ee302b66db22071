"""What a start costs: CPU seconds of `import kvtier` and of helps, beside an interpreter that does nothing."""

import os
import resource
import subprocess
import sys
from functools import partial
from statistics import median
from typing import Final

from _report import Given, Result, in_turns, program, progress
from _rig import kvtier

VERBS: Final = ("", "status ", "cluster up ")
STARTS: Final = {"python -c pass": ["-c", "pass"], "import kvtier": ["-c", "import kvtier"]} | {
    f"kvtier {verb}--help": kvtier(*verb.split(), "--help") for verb in VERBS
}


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"TERM": "dumb"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@program()
def main(options: Given) -> Result:
    rounds = 3 if options.quick else 15
    progress(f"{rounds} rounds")
    turns = {name: partial(cpu_seconds, arguments) for name, arguments in STARTS.items()}
    took = in_turns(turns, rounds, warm_up=1)  # it fills the page cache
    rows = [{"start": name, "CPU s": median(each), "best": min(each)} for name, each in took.items()]
    return rows

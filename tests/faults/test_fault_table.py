"""docs/faults.md tells the truth: every test it names exists; every row of its tables has one."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
ROW = re.compile(r"^\| ([A-Z]?\d+) \|", re.MULTILINE)  # of a table: a fault by its number, or a letter and a number
LISTED = re.compile(r"^([A-Z]?\d+) +tests/[\w/]+\.py::\w+$", re.MULTILINE)  # of a list: a fault's number, and a test


@cache
def named_in(path: str) -> frozenset[str]:
    """Test functions of a file, also those in classes; nothing is imported."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_test_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in named_in(path)]
    assert not missing, missing


def test_every_row_has_a_number_of_its_own_and_a_test() -> None:
    rows = ROW.findall(PAGE)
    assert [int(row) for row in rows if row.isdigit()] == list(range(1, 43))
    assert len(rows) == len(set(rows)), "a number twice"
    assert set(rows) == set(LISTED.findall(PAGE)), "a row without a test, or a test without a row"


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

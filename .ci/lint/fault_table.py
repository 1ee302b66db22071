"""Rules of docs/faults.md: every row has tests in tests/faults/rows.txt, they exist, and `make test` runs one."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from lint.tree import Tree

PAGE: Final = "docs/faults.md"
LIST: Final = "tests/faults/rows.txt"
FAULTS: Final = 42  # by number; none of them may go
_TEST: Final = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
_ROW: Final = re.compile(r"^\| ([A-Z]?\d+) \|", re.MULTILINE)  # of a table: a fault by its number, or with a letter
_LISTED: Final = re.compile(r"^([A-Z]?\d+) +(tests/[\w/]+\.py)::(\w+)$", re.MULTILINE)  # of the list
_MARK: Final = "pytest.mark.exhaustive"  # only `make test-all` runs it
_ELSEWHERE: Final = ("tests/interop/", "tests/gpu/")  # stories of an engine or a GPU that most machines lack

Function: Final = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def defined(file: Path) -> dict[str, bool]:
    """Functions of a file, also those in classes → whether each is exhaustive as a whole. Nothing is imported."""
    if not file.exists():
        return {}
    found: dict[str, bool] = {}

    def visit(parent: ast.AST, is_marked: bool) -> None:
        for node in ast.iter_child_nodes(parent):
            own = is_marked
            if isinstance(node, ast.ClassDef | Function):
                own = own or any(_is_mark(decorator) for decorator in node.decorator_list)
                if isinstance(node, Function):
                    found[node.name] = own and found.get(node.name, True)
            visit(node, own)

    tree = ast.parse(file.read_text())
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    visit(tree, any(_MARK in ast.unparse(mark.value) for mark in marks))
    return found


def _is_mark(decorator: ast.expr) -> bool:
    """A mark on the whole function: one inside `parametrize` is that of some cases."""
    return ast.unparse(decorator).startswith(_MARK)


def fault_tests(tree: Tree) -> Iterator[str]:
    """Every test that docs/faults.md and tests/faults/rows.txt name exists."""
    for where in (PAGE, LIST):
        for path, name in tree.each(_TEST.findall(tree.text(where))):
            if name not in defined(tree.root / path):
                yield f"{where}: {path}::{name}: no such test"


def fault_rows(tree: Tree) -> Iterator[str]:
    """Every row has its own number, and a test that `make test` runs.

    A row whose only tests are in tests/interop or tests/gpu is exempt: they need an engine or a GPU.
    """
    page = tree.text(PAGE)
    rows = list(tree.each(_ROW.findall(page)))
    if [int(row) for row in rows if row.isdigit()] != list(range(1, FAULTS + 1)):
        yield f"{PAGE}: the numbers of its faults are not 1 to {FAULTS}, each once and in order"
    if len(rows) != len({*rows}):
        yield f"{PAGE}: a row's number stands twice"
    listed: dict[str, list[tuple[str, str]]] = {}
    for row, path, name in _LISTED.findall(tree.text(LIST)):
        listed.setdefault(row, []).append((path, name))
    for row in sorted({*rows} ^ listed.keys()):
        yield f"{LIST}: {row}: a row of {PAGE} without a test, or a test without a row"
    for row, tests in listed.items():
        here = [(path, name) for path, name in tests if not path.startswith(_ELSEWHERE)]
        if here and all(defined(tree.root / path).get(name, False) for path, name in here):
            yield f"{LIST}: {row}: `make test` runs none of its tests: take `exhaustive` off one, or list another"


def fault_stories(tree: Tree) -> Iterator[str]:
    """Every test of tests/faults/test_fault_*.py stands in tests/faults/rows.txt."""
    named = {name for _, name in _TEST.findall(tree.text(LIST))}
    for path in tree.paths("tests/faults/test_fault_*.py"):
        stories = [name for name in defined(tree.root / path) if name.startswith("test_")]
        for name in tree.each(stories):
            if name not in named:
                yield f"{path}: {name}: {LIST} does not list it"

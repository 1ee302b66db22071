"""Parsers of bytes that strangers send, fuzzed by coverage: a value or a typed error, in bounded memory (FAULTS 39)."""

from pathlib import Path

import fuzz
import pytest
from extent import brief

pytest.importorskip("atheris", reason="no atheris for this Python or machine")

RUNS = {"bytes": brief(400, 5000), "http": 1500, "settings": 200}  # inputs for each parser: half a second at most
LONGEST = 60.0  # seconds for them, on a busy machine


@pytest.mark.parametrize("kind", brief(["bytes"], fuzz.KINDS))
def test_any_bytes_are_a_value_or_a_typed_error(kind: str) -> None:
    results = fuzz.fuzz_together(fuzz.KINDS[kind], LONGEST, seed=1, runs=RUNS[kind])
    assert [result.failure for result in results.values() if result.failure] == []
    assert {name: result.executions > 10 for name, result in results.items()} == dict.fromkeys(fuzz.KINDS[kind], True)


def test_among_several_targets_the_one_that_fails_is_found(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        f"import sys, types\nsys.path.insert(0, {str(Path(fuzz.__file__).parent)!r})\nimport fuzz_child\n"
        "def bad(data):\n    raise LookupError('planted')\n"
        "def good(data):\n    pass\n"
        "planted = types.SimpleNamespace(TARGETS={'frames': good, 'record': bad, 'replies': good})\n"
        "for name in sys.argv.pop(1).split(','):\n    fuzz_child.feed_in_a_fork(name, planted)\n"
    )
    results = fuzz.fuzz_together(["frames", "record", "replies"], LONGEST, 1, child, runs=RUNS["bytes"])
    assert [name for name, result in results.items() if result.failure] == ["record"]
    assert "planted" in results["record"].failure
    assert results["replies"].executions > 10


def test_a_parser_that_raises_something_else_is_found(tmp_path: Path) -> None:
    # it takes any bytes, but for those that begin with a Z
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, atheris\n"
        "def parse(data):\n    assert data[:1] != b'Z'\n"
        "atheris.Setup([sys.argv[0], *sys.argv[2:]], parse)\natheris.Fuzz()\n"
    )
    result = fuzz.fuzz("planted", 60, 1, child)
    assert "input 5a" in result.failure
    assert "AssertionError" in result.failure

"""How benchmarks hold figures to goals: no size, percentile or mean is left out because it misses.

`make lint` asks the same of what was saved.
"""

from typing import Any

import pytest
from _claims import PageRow
from _goals import GOALS, ColumnGoal, Target, held, left_out, number, without_mean, words
from _readme import JudgedRow, figures, lacking, saved

PAGE = """
## What was missed, and why

### Slow disk

It is slow.

## vLLM
"""


def document(benchmark: str, rows: list[dict[str, object]], targets: list[Target]) -> dict[str, Any]:
    return {"benchmark": benchmark, "results": rows, "targets": [target.as_dict() for target in targets]}


def test_a_row_without_a_goal_is_found_whatever_its_program_named() -> None:
    rows: list[dict[str, object]] = [
        {"what": "read", "KiB": size, "ratio": ratio, "GB/s": 3.25}
        for size, ratio in ((64, 0.31), (128, 0.93), (1024, 0.97))
    ]
    named = [Target("read, 1024 KiB", 0.9, 0.97, at_most=False), Target("read, 128 KiB", 0.9, 0.93, at_most=False)]
    [line] = left_out("new", rows, named)
    assert line.startswith("new: what=read; KiB=64: ratio 0.31")
    assert left_out("new", rows, [*named, Target("read, 64 KiB", 0.9, 0.31, at_most=False)]) == []
    assert left_out("new", rows, []) == []  # no goal anywhere
    assert left_out("new", [{"what": "count", "blocks": 3}, {"what": "count", "blocks": 4}], [Target("a", 3, 3)]) == []


def test_a_column_goal_holds_every_row_that_its_program_did_not() -> None:
    rows: list[dict[str, object]] = [{"what": "read", "KiB": size, "s": size / 1000} for size in (64, 128)]
    rows.append({"what": "write", "KiB": 64, "s": None})
    goal = ColumnGoal("s", 0.1, "{what}, {KiB} KiB: s", where="what=read")
    assert [(target.name, target.met) for target in goal(rows)] == [
        ("read, 64 KiB: s", True),
        ("read, 128 KiB: s", False),
    ]
    assert number(rows[2], "s") is None
    assert words(rows[0]) == "what=read; KiB=64"


def test_what_a_program_named_stays_as_it_is() -> None:
    rows: list[dict[str, object]] = [
        {"prompt tokens": length, "cold / l2": 20.5 + length, "cold / file": 7.5} for length in (1024, 4096)
    ]
    mine = Target("cold / L2 at 4096 tokens", 12, 4116.5, at_most=False)
    found = held("ttft", rows, [mine])
    assert found[0] is mine
    assert [target.name for target in found if "L2" in target.name] == [mine.name, "cold / L2 at 1024 tokens"]
    assert left_out("ttft", rows, found) == []
    step: dict[str, object] = {"what": "step, 16 stores, busy", "tiers": "daemon", "median": 118.7134993320797}
    theirs = Target("its own name for that step", 100, 118.7134993320797)
    assert held("service_overhead", [step], [theirs]) == [theirs]  # such a figure is one row's, whatever its name


def test_an_interval_shows_its_mean() -> None:
    end = Target("CPU with over without, lower end of 95 %", 1.02, 1.01)
    assert without_mean([end]) == [end.name]
    assert without_mean([end, Target("CPU with over without, mean", 1.02, 1.03)]) == []
    assert (
        without_mean([Target("overhead: lower end of the 95 % interval", 1, 1), Target("overhead: mean", 1, 1)]) == []
    )


@pytest.mark.parametrize(
    ("claim", "measured", "lines"),
    [
        (PageRow("a", "disk", "read"), 0.95, 0),
        (PageRow("a", "disk", "read"), 0.5, 1),  # missed without a cause
        (PageRow("a", "disk", "read", "Slow disk"), 0.5, 0),
        (PageRow("a", "disk", "read", "Fast disk"), 0.5, 1),  # of which the page says nothing
        (PageRow("a", "disk", "read", "Slow disk"), 0.95, 1),  # a cause of what is met
        (PageRow("a", "disk", "read", goal=0.97), 0.95, 1),  # a goal that was raised
        (PageRow("a", "disk", "read"), 1.4, 0),
        (PageRow("a", "disk", "read", limit=True), 1.05, 0),
        (PageRow("a", "disk", "read", limit=True), 1.4, 1),  # beaten by so much that it is no limit
        (PageRow("a", "disk", "read", "Slow disk", limit=True), 1.4, 0),
    ],
)
def test_a_miss_has_a_cause_and_what_is_met_has_none(claim: PageRow, measured: float, lines: int) -> None:
    results = {"disk": document("disk", [{"ratio": measured}], [Target("read: of fio", 0.9, measured, at_most=False)])}
    page = PAGE if claim.cause == "Slow disk" else PAGE.replace("### Slow disk", "")
    assert len(lacking(results, page, [claim])) == lines


def test_a_cause_that_no_row_names_and_a_target_without_a_row_are_found() -> None:
    results = {"disk": document("disk", [{"ratio": 0.5}], [Target("read: of fio", 0.9, 0.5, at_most=False)])}
    assert lacking(results, PAGE, []) == [
        "disk: read: of fio: 0 rows of _claims.py are about it; make it one",
        "'Slow disk': no row names this cause; take it out of the page",
    ]


def test_rows_say_how_many_are_met_and_what_is_above_its_limit() -> None:
    targets = [Target(f"read {each}", 0.9, each, at_most=False) for each in (0.5, 0.8996, 1.4)]
    line = JudgedRow(PageRow("reads", "disk", "^read", "Slow disk", limit=True), targets).line("page.md")
    assert line == "| reads | ≥0.9 | 0.5–1.4 | 1 of 3, above its limit ([why](page.md#slow-disk)) |"
    near = JudgedRow(PageRow("reads", "disk", "0.8996"), targets).line("")
    assert near == "| reads | ≥0.9 | 0.8996 | no |"  # three digits would say 0.9
    many = JudgedRow(PageRow("us", "disk", "us"), [Target("us", 500, 29042.2)]).line("")
    assert many == "| us | ≤500 | 29,042 | no |"


def test_a_result_from_before_a_column_is_said_to_be_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved()
    old["pool_throughput"]["targets"] = []
    old["pool_throughput"]["results"] = [{"verb": "lookup, lru"}]
    del old["ttft"]
    monkeypatch.setattr("_readme.saved", lambda: old)
    text = figures()
    assert "| pool, batches of 2,048" not in text
    missing = text.partition("Not measured yet:")[2]
    assert "python benchmarks/pool_throughput.py --vllm .venv-vllm/bin/python --save" in missing
    assert "- our engine, time to first token, 1,024 – 8,192 tokens: cold ÷ L2; " in missing
    assert "python benchmarks/ttft.py --save" in missing


def test_goals_are_no_hindrance_to_rows_of_other_columns() -> None:
    """A result from before a column, or after it went, has fewer targets; it never stops a program's report."""
    results = saved()
    for benchmark in GOALS:
        assert held(benchmark, [{"what": "something else", "seconds": 1.5}, {}], []) == []
        rows = results.get(benchmark, {"results": []})["results"]
        for column in {name for row in rows for name in row}:
            held(benchmark, [{name: value for name, value in row.items() if name != column} for row in rows], [])

"""Stories of benchmarks/engine_conversations.py: what counts as level, what a missing way leaves."""

import pytest
from engine_conversations import ARMS, COLUMNS, PHASES, Found, RunFigures, rows_of, targets_of


def figures(**changed: float) -> RunFigures:
    return dict.fromkeys((*COLUMNS, "other texts"), 1.0) | changed


def test_the_claim_is_against_the_best_of_the_others() -> None:
    found: Found = {phase: {arm: {0: figures(), 1: figures()} for arm in ARMS} for phase in PHASES}
    found["restart"]["native"] = dict.fromkeys((0, 1), figures(**{"TTFT p99 ms": 0.5}))
    missed = [target for target in targets_of(found) if not target.met]
    over = "restart, TTFT p99 ms: kvtier over native"
    assert [target.name for target in missed] == [f"{over}, lower end of 95 %", f"{over}, mean"]
    assert missed[0].measured == pytest.approx(2)
    # kvtier's file tier races vLLM's alone
    below = [target.name for target in targets_of(found) if "kvtier below native" in target.name]
    assert len(below) == 2 * len(PHASES) * len(COLUMNS)  # the interval's end and the mean
    assert all("over native files" in name for name in below)


def test_a_way_that_could_not_run_has_a_row_with_the_reason() -> None:
    found: Found = {phase: {arm: {0: figures()} for arm in ARMS if arm != "lmcache"} for phase in PHASES}
    rows = rows_of(found, {"lmcache": ["it could not be installed: no network"]})
    assert rows[-1] == {"way": "lmcache", "not run": "it could not be installed: no network"}
    assert not [row for row in rows if row.get("over") == "lmcache"]

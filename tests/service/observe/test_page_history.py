"""The past hour that a server keeps for the live page: every number of a status, in fixed memory."""

import math
from typing import Any

from kvtier.service.observe.live_page import PageHistory


def series(history: PageHistory) -> dict[tuple[str, ...], Any]:
    return {tuple(each["path"]): each["values"] for each in history.as_json()["series"]}


def test_numbers_are_known_by_where_they_stand() -> None:
    history = PageHistory(["uptime_s", "models"])
    model = {"model": "ab", "lookups": {"l2": 3, "miss": 1}, "open": True, "why": "text", "list": [1, 2]}
    history.add({"uptime_s": 5.5, "models": [model, {"model": "cd", "lookups": {"l2": 7}}], "pid": 17}, at=1.0)
    model["lookups"] = {"l2": 4, "miss": 1}
    history.add({"uptime_s": 6.5, "models": [model]}, at=2.0)
    assert history.as_json()["at"] == [1000, 2000]
    # What stays the same is told once; what is not there any more is not known; texts, lists and other parts are none.
    assert series(history) == {
        ("uptime_s",): [5.5, 6.5],
        ("models", "ab", "lookups", "l2"): [3, 4],
        ("models", "ab", "lookups", "miss"): 1,
        ("models", "cd", "lookups", "l2"): [7, None],
    }


def test_the_oldest_sample_goes_for_the_newest() -> None:
    history = PageHistory(["n"], kept=3)
    for number in range(5):
        history.add({"n": number}, at=number)
    assert history.as_json()["at"] == [2000, 3000, 4000]
    assert series(history) == {("n",): [2, 3, 4]}


def test_series_are_bounded_and_those_that_are_gone_make_room() -> None:
    history = PageHistory(["n"], kept=2, most=3)
    history.add({"n": {"a": 1, "b": 1, "c": 1, "d": 1}}, at=0)
    assert list(series(history)) == [("n", "a"), ("n", "b"), ("n", "c")]  # d is one too many
    history.add({"n": {"c": 2, "d": 2}}, at=1)  # a and b are still in the sample before
    assert ("n", "d") not in series(history)
    history.add({"n": {"c": 3, "d": 3}}, at=2)
    history.add({"n": {"c": 4, "d": 4}}, at=3)
    assert series(history) == {("n", "c"): [3, 4], ("n", "d"): [3, 4]}


def test_what_json_cannot_say_is_not_known() -> None:
    history = PageHistory(["n"])
    for value in (math.inf, math.nan, 1e300, 0.1234567):
        history.add({"n": value}, at=1)
    assert series(history) == {("n",): [None, None, 1e300, 0.123457]}

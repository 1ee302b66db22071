"""From how many tokens on loading wins, by measured times; and what the verb's forms say of it."""

import json
from pathlib import Path

import pytest
from command_rig import kvtier

from kvtier.service.breakeven import Breakeven, breakeven_from
from kvtier.service.simulation.value import LoadRates, rates_from
from kvtier.tiers.errors import ConfigError

COMPUTE = {100: 1.0, 200: 2.0, 400: 4.0}


def _deep(path: Path) -> Path:
    path.write_text("[" * 100_000)
    return path


def worth(**loads: dict[int, float]) -> Breakeven:
    return Breakeven("tiny", "cpu", 8.0, COMPUTE, loads, gpu_hour=3.6)


def test_from_how_many_tokens_on_loading_wins() -> None:
    found = worth(
        l2={100: 0.5, 200: 0.5, 400: 0.5},  # from the shortest on
        file={100: 1.5, 200: 1.5, 400: 1.5},  # between two of them
        redis={100: 9.0, 200: 9.0, 400: 9.0},
        none={},
    )
    assert [found.wins_from(tier) for tier in found.by_tier] == [100, 150, None, None]
    assert "file: loading wins from 150 tokens on" in found.verdict
    assert "redis: computing is faster up to 400 tokens" in found.verdict
    assert "none: it did not have the prompts" in found.verdict


def test_seconds_money_and_rates_for_programs_and_people() -> None:
    found = worth(l2={100: 0.5, 200: 1.0})
    assert found.json["kvtier_worth"] == 1
    assert found.json["prefill_tokens_per_second"] == 100.0
    assert found.json["l2_bytes_per_second"] == 1600.0
    assert found.json["times"][0] == {"tokens": 100, "compute": 1.0, "l2": 0.5}
    assert list(found.table.rows[0]) == ["100", "1000.0", "500.0", "0.5000"]
    assert list(found.table.rows[2]) == ["400", "4000.0", "–", "–"]
    with pytest.raises(ConfigError, match="use a price above 0"):
        Breakeven("tiny", "cpu", 8.0, COMPUTE, {}, gpu_hour=0.0)


def test_what_was_measured_is_shown_again_and_other_files_are_named(tmp_path: Path) -> None:
    found = worth(l2={100: 0.5, 200: 1.0}, redis={})
    path = tmp_path / "worth.json"
    path.write_text(json.dumps(found.json))
    assert breakeven_from(path, None) == found
    with pytest.raises(ConfigError, match="not JSON"):
        rates_from(_deep(tmp_path / "deep"), LoadRates())
    # Its rates are those that a simulation takes.
    assert rates_from(path, LoadRates()) == LoadRates(prefill=100.0, l2=1600.0)
    shown = kvtier("worth", "--from", path, "--gpu-hour", 7.2, columns="200").stdout
    assert "l2: loading wins from 100 tokens on; redis: it did not have the prompts" in shown
    assert "1.0000" in shown
    whole = path.read_text()
    for text, complaint in (
        ("[" * 100_000, "not JSON"),
        (whole.replace('"tokens": 100', '"tokens": Infinity'), "Expected `float` < "),
        (whole.replace('"tokens": 100', '"tokens": -100'), "Expected `float` > 0.0 - at `$.times"),
        (
            whole.replace('"bytes_per_token": 8.0', '"bytes_per_token": NaN'),
            "Expected `float` > 0.0 - at `$.bytes_per_token`",
        ),
        (whole.replace('"gpu_hour": 3.6', '"gpu_hour": 1' + "0" * 400), "Number out of range - at `$.gpu_hour`"),
        ("[]", 'no "kvtier_worth": 1 there'),
        ('{"kvtier_worth": 1}', "Object missing required field `model`"),
        (whole.replace("1.0", "-1.0"), "Expected `float` > 0.0 - at `$.times"),
    ):
        path.write_text(text)
        ended = kvtier("worth", "--from", path)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"kvtier: --from {path}: {complaint}")
    path.write_text(whole.replace('"tiny"', '"[/red]tiny"'))  # markup of the table's
    assert "kvtier worth: [/red]tiny on cpu" in kvtier("worth", "--from", path, columns="200").stdout
    path.write_text(whole.replace('"tiny"', '"\\u001b[31mred"'))  # what a terminal would obey
    assert "kvtier worth: \\x1b[31mred on cpu" in kvtier("worth", "--from", path, columns="200").stdout
    ended = kvtier("worth", "--from", path, "--gpu-hour", "inf")
    assert (ended.returncode, ended.stderr) == (2, "kvtier: --gpu-hour inf: use a number from 1e-09 to 1e+12\n")
    ended = kvtier("worth")
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvtier: DIR: name a checkpoint to measure")

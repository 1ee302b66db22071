"""The table of tiers: no two rows can be taken for each other, and every lower tier has a module that opens it."""

import ast
import inspect
from pathlib import Path

import pytest

import kvtier.tiers.file.opening
import kvtier.tiers.objects.opening
import kvtier.tiers.peers.opening
import kvtier.tiers.redis.opening
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.opening import TierModule, lower_modules
from kvtier.tiers.kinds import L1, L2, MISS, TIERS, TierKind, lookup_results, lower_tiers, tier_captions

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {  # other things of that name
    ("service/node/status.py", L2),  # the object in /status that describes host memory
    ("service/observe/top.py", L2),
    ("service/engine/server.py", L1),  # and in that of an engine's server, its own blocks
    ("service/reload.py", L1),  # the section [l1]
    ("service/doctor/doctor.py", "GPU"),  # the device itself
}
# For the type checker: the modules are what the table takes them for.
MODULES: dict[str, TierModule] = {
    "file": kvtier.tiers.file.opening,
    "peers": kvtier.tiers.peers.opening,
    "redis": kvtier.tiers.redis.opening,
    "objects": kvtier.tiers.objects.opening,
}


@pytest.mark.parametrize("field", ["name", "label", "shown", "medium"])
def test_no_two_tiers_can_be_taken_for_each_other(field: str) -> None:
    said = [getattr(kind, field) for kind in TIERS.values()]
    assert len(set(said)) == len(said)
    assert all(said)


def test_words_of_other_publishers_name_one_tier() -> None:
    words = [word for kind in TIERS.values() for word in (kind.medium, *kind.aliases)]
    assert len(set(words)) == len(words)


def test_rows_stand_under_their_names_nearest_first() -> None:
    assert list(TIERS) == [kind.name for kind in TIERS.values()]
    assert [*TIERS][:2] == [L1, L2]
    assert MISS not in TIERS
    assert lookup_results() == (*TIERS, MISS)
    assert [kind.name for kind in lower_tiers()] == [*TIERS][2:]
    weights = [kind.weight for kind in TIERS.values()]
    assert weights == sorted(weights, reverse=True)  # the nearer, the more it saves


def test_every_lower_tier_has_a_module_that_opens_it() -> None:
    assert dict(lower_modules()) == MODULES
    for module in MODULES.values():
        for verb in ("configured", "checked", "answers", "examine"):
            wanted = inspect.signature(getattr(TierModule, verb)).parameters
            assert [*inspect.signature(getattr(module, verb)).parameters] == [*wanted][1:]
        # A tier is off unless its section turns it on, and the doctor then has one finding of it at least.
        assert module.configured(Config(), bytes(32), _Shape()) is None
        assert module.checked(Config()) is None
        assert module.answers(Config()) == []
        assert module.examine(Config())


def test_nobody_else_knows_a_tiers_name_or_medium() -> None:
    # "file" and "redis" are also sections of the configuration: only the pages are searched for them.
    words = {L1, L2} | {word for kind in TIERS.values() for word in (kind.medium, *kind.aliases)}
    files = [path for folder in ("tiers", "connector", "engine", "service") for path in (ROOT / folder).rglob("*.py")]
    product = [(path, text) for path in files if any(f'"{word}"' in (text := path.read_text()) for word in words)]
    found = {
        (path.relative_to(ROOT).as_posix(), node.value)
        for path, text in product
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in words
    }
    assert not {place for place in found if place[0] != "tiers/kinds.py"} - ELSEWHERE
    pages = [path.read_text() for path in (ROOT / "service/observe/pages").iterdir()]
    assert not [word for word in words | {*TIERS} for page in pages if f'"{word}"' in page or f"'{word}'" in page]


def test_the_page_is_told_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "tape", TierKind("tape", "Tape", "tape robot", "TAPE", 0.1, module="nowhere"))
    assert tier_captions()[-1] == {
        "name": "tape",
        "label": "Tape",
        "shown": "tape robot",
        "medium": "TAPE",
        "lower": True,
    }
    assert [caption["lower"] for caption in tier_captions()] == [False, False, True, True, True, True, True]


class _Shape:
    block_size = 16
    block_bytes = 4096

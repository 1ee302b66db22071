"""A real block passes no folder that docs/architecture.md does not name."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import block_way  # noqa: E402

from kvtier.tiers.compiled import extension  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
GROWTH = 1.5  # of the saved figures: a thread that wakes up once more adds calls, another Python some

MIRROR = {"tiers/file/store.py", "tiers/file/slab_rows.py"}  # and no file that reads


def named() -> set[str]:
    """The folders the page names, as it writes them."""
    return set(re.findall(r"`([\w/]+)/`", PAGE.read_text()))


@pytest.fixture(scope="module")
def ways() -> Iterator[dict[str, block_way.Way]]:
    yield block_way.ways(6, ("connector",))  # the round with the fewest calls: a busy machine adds some
    assert sys.getprofile() is None  # nothing is followed any more


def test_a_block_passes_no_folder_that_the_page_leaves_out(ways: dict[str, block_way.Way]) -> None:
    passed = {str(Path(file).parent) for way in ways.values() for file in way.files}
    assert sorted(passed - named()) == []


def test_the_three_ways_differ_as_they_should(ways: dict[str, block_way.Way]) -> None:
    for where in ("in process", "daemon"):
        cold, l2, l3 = (set(ways[f"connector, {where}: {name}"].files) for name in block_way.WAYS)
        assert "tiers/file/slab_writer.py" in cold - l2 - l3
        assert "tiers/file/file_io.py" in l3 - l2
        # Memory alone: of the slab at most its mirror is asked what follows the block.
        assert {file for file in l2 if file.startswith("tiers/file/")} <= MIRROR
    assert not any(file.startswith("service/") for name, way in ways.items() if "process" in name for file in way.files)


def test_an_l2_hit_takes_25_calls_in_ten_files(ways: dict[str, block_way.Way]) -> None:
    """As this commit counts them; a twentieth more may come of another Python."""
    if extension("kvtier.tiers.pool.core_compiled") is None:
        pytest.skip("not built: `make compiled`")
    way = ways["connector, in process: L2 hit"]
    assert len(way.files) <= 10
    assert way.num_calls <= 25 * 1.05, way.calls


def test_no_way_has_grown_by_half(ways: dict[str, block_way.Way]) -> None:
    saved = json.loads((ROOT / "benchmarks" / "results" / "block_way.json").read_text())["results"]
    limits = {row["way"]: GROWTH * row["calls"] for row in saved}
    assert {name: way.num_calls for name, way in ways.items() if way.num_calls > limits[name]} == {}

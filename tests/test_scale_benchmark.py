"""Stories of benchmarks/scale.py: its arithmetic by hand, its limits, its short form, and its tables."""

import json
from dataclasses import replace
from typing import Any

import pytest
import scale
from command_rig import program
from scale import NODES, Assumptions, Limit, PaperFleet, PieceCosts, RequestMoves

ASSUMED = Assumptions(rate=2.0, token_bytes=1 << 20, block_tokens=16, l1_gib=1, l2_gib=2, slab_gib=4)
MEASURED = PieceCosts(
    consumer_us=4,
    index_bytes=200,
    change_us=0.2,
    decision_us={1: 100, 11: 200},
    follower_descriptors=10,
    follower_kib=1024,
    follower_idle_us=100,
    forward_us=1000,
    piece_us=50,
    redis_set_gb=2.0,
    redis_get_gb=4.0,
    peer_name_bytes=100,
    peer_name_us=0.2,
    peer_lookup_us=50,
)
MOVED = RequestMoves(1, 1600, 100, l1_stored=1600, l2_stored=1600, slab_stored=800, cold_read=16,
              redis_stored=1000, redis_read=100)  # fmt: skip
SIZES = {"a block": float(16 << 20), "large": float(160 << 20)}


@pytest.fixture
def fleet() -> PaperFleet:
    return PaperFleet(ASSUMED, MEASURED, [MOVED, replace(MOVED, admit_after=2, slab_stored=80, redis_stored=100)])


def test_events_are_what_comes_and_what_it_drives_out(fleet: PaperFleet) -> None:
    # 4,000 tokens come and 4,000 go: 500 blocks of 16 a request, 1,000 a second at two requests
    assert fleet.changes(1) == 1000
    assert PaperFleet(replace(ASSUMED, block_tokens=64), MEASURED, [MOVED]).changes(3) == 750
    assert fleet.event_cores(1) == pytest.approx(0.004 + 2 * 100e-6)  # and its two publishers, when silent


def test_a_decision_costs_what_was_measured_at_so_many_replicas(fleet: PaperFleet) -> None:
    assert [MEASURED.decision(n) for n in (1, 6, 11, 21)] == [100, 150, 200, 300]
    # forwarded, decided on, and a hundred pieces
    assert fleet.request_cores(1) == pytest.approx(2 * (1000 + 100 + 100 * 50) / 1e6)
    assert fleet.request_cores(100) == pytest.approx(1.418)  # 200 requests of 1,000 + 1,090 + 5,000 us


def test_redis_needs_servers_for_bytes_or_for_room(fleet: PaperFleet) -> None:
    written, read = fleet.redis_gb(5, 1)
    assert (written, read) == pytest.approx((10 * 1000 * (1 << 20) / 1e9, 10 * 100 * (1 << 20) / 1e9))
    # its network gives 25 Gbit/s: more than what it stores, less than what it would answer
    assert fleet.shards_for_bytes(5, 1) == pytest.approx(written / 2.0 + read / 3.125)
    assert fleet.shards_for_room(5) == 5
    rows = [row for row in fleet.redis() if row["nodes"] == 10]
    assert [row["shards"] for row in rows] == [12, 10]  # by bytes; fewer are stored, so by room
    assert rows[1]["$ a month"] == 10 * (30 + 64 * 3)


def test_a_daemon_follows_all_others(fleet: PaperFleet) -> None:
    assert fleet.peer_names(1) == fleet.peer_cores(1) == 0
    assert fleet.peer_names(3) == 2 * (2 << 30) / (16 << 20)
    # two requests a second of each other node: 200 changes of 4 us each and a lookup; and a publisher that is silent
    assert fleet.peer_cores(3) == pytest.approx(2 * (2 * (200 * 4 + 50) + 100) / 1e6)


def test_objects_are_put_once_and_got_twice_and_each_lookup_ends_in_vain(fleet: PaperFleet) -> None:
    puts, gets = fleet.object_rates(10, 1, 16 << 20)
    assert puts == 10 * 2 * 800 / 16
    assert gets == 2 * 10 * 2 * 16 / 16 + 10 * (2 + 0.1)


def test_a_limit_is_the_largest_fleet_within_it(fleet: PaperFleet) -> None:
    assert Limit("a", "b", lambda nodes: nodes / 7).nodes == 7
    assert Limit("a", "b", lambda nodes: nodes / 7.5).nodes == 7
    assert Limit("a", "b", lambda nodes: 2.0).nodes == 0
    assert Limit("a", "b", lambda nodes: 0.5).nodes is None
    for limit in fleet.limits(SIZES):
        held = limit.nodes
        assert held is not None
        assert limit.load(held + 1) > 1
        assert held == 0 or limit.load(held) <= 1, limit.what


@pytest.mark.exhaustive  # its pieces are shown above
@pytest.mark.timeout(300)
def test_the_short_form_measures_every_piece_and_every_size() -> None:
    ended = program(scale.main, "scale.py", "--quick", "--json", "--requests", "60", "--rate", "3")
    assert ended.returncode == 0
    document: dict[str, Any] = json.loads(ended.stdout)
    rows = document["results"]
    for part in ("redis", "objects"):
        assert {row["nodes"] for row in rows if row["part"] == part} == set(NODES)
    pieces = {row["piece"]: row["measured"] for row in rows if row["part"] == "a piece costs"}
    assert all(value > 0 for value in pieces.values()), pieces
    moved = [row for row in rows if row["part"] == "a request moves"]
    assert [row["admit_after"] for row in moved] == [1, 2]
    assert moved[0]["slab_stored"] > moved[1]["slab_stored"] > 0
    assert document["setup"]["rate"] == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rate", "0"], "--rate 0: give a number above 0"),
        (["--slab-gib", "-1"], "--slab-gib -1: give a number above 0"),
        (["--block-tokens", "64"], "--block-tokens 64: give 16"),
    ],
)
def test_a_figure_that_cannot_be_is_one_line(arguments: list[str], told: str) -> None:
    ended = program(scale.main, "scale.py", "--quick", "--requests", "20", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1

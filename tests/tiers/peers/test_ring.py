"""The ring alone: who owns a key, which keys are anchors, what owners learn; and the words of its messages."""

import os
import random
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
import peer_ring
import pytest
from doubles import FakeClock, chain_of

from kvtier.service.node import holder_index
from kvtier.service.node.holder_index import HolderIndex
from kvtier.tiers.peers import ring as ring_module
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.ring import (
    ANCHORS,
    HEARTBEAT,
    LAPSE,
    MAX_HOLDERS,
    MAX_PROBES,
    PACE,
    Keys,
    Report,
    Reports,
    Ring,
    anchors_of,
    keys_of,
    probes,
)
from kvtier.tiers.peers.stream import PeerAddress

MODEL = b"m" * 32


def nodes_of(count: int) -> list[PeerAddress]:
    return [(f"10.0.{i // 256}.{i % 256}", 9402) for i in range(count)]


def random_keys(count: int, seed: int = 1) -> Keys:
    return np.unique(np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64))


def owners_of(ring: Ring, key: int) -> list[PeerAddress]:
    return [ring.nodes[number] for number in ring.owners(np.array([key], np.uint64))[0]]


def test_every_node_makes_the_same_ring_and_shares_are_fair() -> None:
    nodes, keys = nodes_of(100), random_keys(20_000)
    ring = Ring(nodes)
    assert np.array_equal(ring.owners(keys), Ring(random.Random(1).sample(nodes, 100)).owners(keys))
    owners = ring.owners(keys)
    assert (owners[:, 0] != owners[:, 1]).all()
    shares = np.bincount(owners.reshape(-1), minlength=100) / (2 * len(keys) / 100)
    assert 0.5 < shares.min() <= shares.max() < 1.6


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_small_ring_has_as_many_owners_as_it_can(count: int) -> None:
    ring = Ring(nodes_of(count))
    for key in random_keys(200).tolist():
        assert len(set(owners_of(ring, key))) == min(count, 2)


def test_a_node_that_leaves_moves_only_its_own_part() -> None:
    nodes, keys = nodes_of(50), random_keys(5_000).tolist()
    before, after = Ring(nodes), Ring(nodes[:-1])
    moved = [key for key in keys if owners_of(before, key) != owners_of(after, key)]
    assert moved == [key for key in keys if nodes[-1] in owners_of(before, key)]
    # the replica stays, so that no key loses both its owners
    assert all(set(owners_of(before, key)) & set(owners_of(after, key)) for key in moved)


def test_anchors_are_found_without_depth_or_parent_and_queries_go_deep() -> None:
    chain = chain_of(1000)
    keys = keys_of(chain.hashes)
    assert keys.tolist() == [int.from_bytes(name[-8:], "little") for name in chain.hashes]
    anchors = anchors_of(keys)
    assert 1000 / ANCHORS / 2 < len(anchors) < 1000 / ANCHORS * 2
    # A later part of the chain, as a tier is queried for it, has the same anchors.
    assert set(anchors_of(keys_of(chain.hashes[300:])).tolist()) <= set(anchors.tolist())
    places = probes(keys)
    order = [i for i, key in enumerate(keys.tolist()) if key in set(anchors.tolist())]
    assert places == [order[(1 << i) - 1] for i in range(MAX_PROBES) if 1 << i <= len(order)]
    assert probes(keys[:0]) == []


# What owners learn


class FleetOfOwners:
    """Owners of a ring, and what a node holds. Messages are calls; some owners do not answer."""

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self.nodes = nodes_of(count)
        self.owners = {node: HolderIndex(1_000_000, clock) for node in self.nodes}
        self.clock = clock
        self.down: set[PeerAddress] = set()
        self.lost: set[PeerAddress] = set()  # take a report, and their answers are lost
        self.sent: list[tuple[PeerAddress, Report]] = []

    def send(self, owner: PeerAddress, report: Report) -> bool | None:
        self.sent.append((owner, report))
        if owner in self.down:
            return None
        taken = self.owners[owner].report(MODEL, report)
        return None if owner in self.lost else taken

    def round(self, reports: Reports, node: PeerAddress, keys: Keys, ring: Ring) -> int:
        """One round; returns how many reports it took."""
        before = len(self.sent)
        reports.step(node, keys, ring, lambda owner: True, self.send, self.clock)
        return len(self.sent) - before

    def settle(self, reports: Reports, node: PeerAddress, keys: Keys, ring: Ring) -> None:
        while self.round(reports, node, keys, ring):
            continue

    def require(self, ring: Ring, held: Collection[int], node: PeerAddress) -> None:
        """Each owner in the ring knows this node for exactly the keys of its part."""
        for number, owner in enumerate(ring.nodes):
            for key in held:
                [found] = self.owners[owner].holders(MODEL, [key])
                assert (node in found) is (number in ring.owners(np.array([key], np.uint64))[0])
            self.owners[owner].check()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_owners_know_what_a_node_holds_through_any_changes(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random program: blocks come and go, owners fail, restart, lose answers; nodes join and leave."""
    monkeypatch.setattr(ring_module, "_MAX_PENDING", 20)
    for seed in range(6):
        draw, fleet = random.Random(seed), FleetOfOwners(12, clock)
        pool = random_keys(300, seed).tolist()
        me, reports, held = fleet.nodes[0], Reports(), set(pool[:40])
        ring = Ring(fleet.nodes[:9])
        for _ in range(40):
            match draw.randrange(6):
                case 0:
                    fleet.down = set(draw.sample(fleet.nodes, 2))
                case 1:
                    fleet.lost = set(draw.sample(fleet.nodes, 2))
                case 2:
                    fleet.owners[draw.choice(fleet.nodes)] = HolderIndex(1_000_000, clock)
                case 3:
                    ring = Ring(fleet.nodes[: draw.randrange(2, 13)])
                case _:
                    held.symmetric_difference_update(draw.sample(pool, draw.randrange(60)))
            fleet.round(reports, me, np.array(sorted(held), np.uint64), ring)
        fleet.down, fleet.lost = set(), set()
        clock.advance(HEARTBEAT)  # owners that restarted are found out
        keys = np.array(sorted(held), np.uint64)
        fleet.settle(reports, me, keys, ring)
        fleet.require(ring, pool if ring.nodes == fleet.nodes else held, me)
        assert fleet.round(reports, me, keys, ring) == 0


def test_a_round_is_bounded_and_the_next_one_goes_on(clock: FakeClock) -> None:
    fleet, keys = FleetOfOwners(2 * PACE + 50, clock), random_keys(2_000)
    ring, reports = Ring(fleet.nodes), Reports()
    rounds = [fleet.round(reports, fleet.nodes[0], keys, ring) for _ in range(4)]
    assert rounds == [PACE, PACE, 50, 0]
    assert Counter(owner for owner, _ in fleet.sent).most_common(1)[0][1] == 1
    # A single change costs its two owners a report, and after a while all others a sign of life.
    assert fleet.round(reports, fleet.nodes[0], keys[1:], ring) == 2
    clock.advance(HEARTBEAT)
    assert sum(fleet.round(reports, fleet.nodes[0], keys[1:], ring) for _ in range(4)) == len(fleet.nodes)
    assert reports.counts["start_overs"] == len(fleet.nodes)


def test_an_owner_that_failed_gets_the_whole_in_the_next_round(clock: FakeClock) -> None:
    fleet, keys = FleetOfOwners(4, clock), random_keys(100)
    ring, reports = Ring(fleet.nodes), Reports()
    fleet.settle(reports, fleet.nodes[0], keys, ring)
    fleet.down = {fleet.nodes[1]}
    assert fleet.round(reports, fleet.nodes[0], keys[:50], ring) == 4
    fleet.down = set()
    assert fleet.round(reports, fleet.nodes[0], keys[:50], ring) == 1
    assert fleet.sent[-1][1].seq == 0
    fleet.require(ring, keys.tolist()[:50], fleet.nodes[0])


def test_an_owner_without_room_is_left_alone_for_a_while(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each node would send it a part of its keys every second, for ever."""
    monkeypatch.setattr(holder_index, "_MAX_REPORTERS", 1)
    fleet, keys = FleetOfOwners(3, clock), random_keys(100)
    ring, reports = Ring(fleet.nodes), Reports()
    for owner in fleet.owners.values():
        assert owner.report(b"another model".ljust(32), Report(("10.9.9.9", 1), 1, 0, [8], []))
    assert fleet.round(reports, fleet.nodes[0], keys, ring) == 3
    clock.advance(HEARTBEAT - 1)
    assert fleet.round(reports, fleet.nodes[0], keys, ring) == 0
    monkeypatch.setattr(holder_index, "_MAX_REPORTERS", 2)
    clock.advance(1)
    assert fleet.round(reports, fleet.nodes[0], keys, ring) == 3
    fleet.require(ring, keys.tolist(), fleet.nodes[0])


def test_a_block_that_comes_and_goes_between_reports_is_not_mentioned(clock: FakeClock) -> None:
    fleet, keys = FleetOfOwners(3, clock), random_keys(4)
    ring, reports = Ring(fleet.nodes), Reports()
    fleet.settle(reports, fleet.nodes[0], keys[:2], ring)
    for held in (keys, keys[:2]):
        reports.step(fleet.nodes[0], held, ring, lambda owner: False, fleet.send, clock)
    assert fleet.round(reports, fleet.nodes[0], keys[:2], ring) == 0


# The owner


def test_a_report_behind_a_gap_is_not_taken(clock: FakeClock) -> None:
    index, node = HolderIndex(100, clock), ("10.0.0.1", 1)
    assert not index.report(MODEL, Report(node, 7, 3, [8], []))  # an owner that restarted
    assert index.report(MODEL, Report(node, 7, 0, [8, 16], []))
    assert index.report(MODEL, Report(node, 7, 1, [24], [8]))
    for epoch, seq in ((7, 3), (7, 1), (8, 2)):
        assert not index.report(MODEL, Report(node, epoch, seq, [32], []))
    assert index.holders(MODEL, [8, 16, 24, 32]) == [[], [node], [node], []]
    assert index.holders(b"another model".ljust(32), [16]) == [[]]
    # number 0 replaces everything
    assert index.report(MODEL, Report(node, 9, 0, [40], []))
    assert (index.holders(MODEL, [16, 40]), index.num_keys) == ([[], [node]], 1)
    index.check()


def test_memory_is_bounded_and_costs_who_has_the_most(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    index = HolderIndex(1000, clock)
    small, large = nodes_of(2)
    index.report(MODEL, Report(small, 1, 0, range(1, 101), []))
    for seq in range(5):
        assert index.report(MODEL, Report(large, 1, seq, range(10_000 * (seq + 1), 10_000 * (seq + 1) + 400), []))
        assert index.num_keys <= 1000
    assert index.counts["keys_forgotten"] >= 1100
    assert index.holders(MODEL, [1, 100, 50_000, 10_000]) == [[small], [small], [large], []]
    index.check()
    monkeypatch.setattr(holder_index, "_MAX_REPORTERS", 2)
    assert not index.report(MODEL, Report(("10.9.9.9", 1), 1, 0, [7], []))
    assert index.counts["reports_refused"] == 1


def test_a_silent_node_is_forgotten(clock: FakeClock) -> None:
    index = HolderIndex(1000, clock)
    silent, other = nodes_of(2)
    for node in (silent, other):
        index.report(MODEL, Report(node, 1, 0, range(0, 5000, 8), []))
    clock.advance(LAPSE - 1)
    assert index.report(MODEL, Report(other, 1, 1, [], []))
    clock.advance(2)
    assert index.report(MODEL, Report(other, 1, 2, [], []))
    assert (index.holders(MODEL, [8]), index.counts["nodes_lapsed"]) == ([[other]], 1)
    assert not index.report(MODEL, Report(silent, 1, 1, [8], []))  # it starts over
    index.check()


def test_of_many_holders_not_all_readers_get_the_same(clock: FakeClock) -> None:
    index, nodes = HolderIndex(1000, clock), nodes_of(20)
    for node in nodes:
        index.report(MODEL, Report(node, 1, 0, [8], []))
    seen = [tuple(index.holders(MODEL, [8])[0]) for _ in range(50)]
    assert all(len(set(each)) == MAX_HOLDERS for each in seen)
    assert len({node for each in seen for node in each}) > MAX_HOLDERS


# Their messages


def test_messages_are_read_as_they_were_written() -> None:
    draw = random.Random(3)
    for node in (("10.1.2.3", 9402), ("fd00::1", 65535), ("::1", 1)):
        for added, removed in ((0, 0), (1, 0), (0, 3), (5, 4), (2048, 0)):
            keys = [draw.getrandbits(64) for _ in range(added + removed)]
            report = Report(node, draw.getrandbits(64), draw.getrandbits(16), keys[:added], keys[added:])
            assert wire.unpack_report(wire.pack_report(report)) == report
        found = [[node] * number for number in range(MAX_HOLDERS + 1)]
        packed = wire.pack_holders(found)
        assert len(packed) == wire.HOLDERS_BYTES * len(found)
        assert wire.unpack_holders(packed) == found
    for count in range(1, MAX_PROBES + 1):
        keys = [draw.getrandbits(64) for _ in range(count)]
        assert wire.unpack_query(wire.pack_query(keys)) == keys


def test_garbage_is_a_protocol_error_or_means_one_thing() -> None:
    """Random words, and true ones with flipped bits: never another exception, never two forms of one message."""
    draw = random.Random(5)
    true = [wire.pack_report(Report(("10.0.0.1", 1), 5, 1, [1, 2, 3], [4])), wire.pack_query([1, 2, 3])]
    num_wrong = 0
    for turn in range(3000):
        words = [os.urandom(32) for _ in range(draw.randrange(1, 5))]
        if turn % 2:
            whole = bytearray(b"".join(draw.choice(true)))
            whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            words = [bytes(whole[at : at + 32]) for at in range(0, len(whole), 32)]
        for pack, unpack in ((wire.pack_report, wire.unpack_report), (wire.pack_query, wire.unpack_query)):
            try:
                read = unpack(words)
            except wire.ProtocolError:
                num_wrong += 1
            else:
                assert pack(read) == words  # type: ignore[operator]
    assert num_wrong > 3000
    for data in (os.urandom(wire.HOLDERS_BYTES * 50), bytes(wire.HOLDERS_BYTES)):
        for nodes in wire.unpack_holders(data):
            assert len(nodes) <= MAX_HOLDERS
            assert all(0 < port < 65536 for _, port in nodes)


def test_a_simulated_fleet_finds_its_prompts_also_without_a_tenth_of_it() -> None:
    """As `benchmarks/peer_ring.py` simulates it: the real client, reports and owners of forty nodes."""
    rows = {row["what"]: row for row in peer_ring.simulate(40, 1024, 0.5, 3, 150)}
    assert rows["start"]["reports a node"] == 40
    assert rows["look-ups"]["found"] == 1
    for what in ("a tenth is dead, unknown", "known as dead", "list without them, at once"):
        assert rows[what]["found"] > 0.95, what  # both owners of a name may be dead
        assert rows[what]["owners queried"] < 2 * MAX_PROBES
    assert rows["… reported anew"]["found"] == 1

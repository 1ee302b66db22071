"""The ring over sockets: blocks are found by the owners of their names; owners that die, hang, lie, or are old."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doubles import SLOT_BYTES, chain_of, store, wait_until
from peers_rig import FINGERPRINT, Fleet, Node, ScriptedPeer, borrowing, peers_config, read
from service_rig import attach, end_child, load, where
from service_rig import store as store_at

from kvtier.tiers import peers
from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.link import PeerLink
from kvtier.tiers.peers.owners import Owners
from kvtier.tiers.peers.peer import MAX_PEERS
from kvtier.tiers.peers.ring import Report, Ring, keys_of, probes
from kvtier.tiers.peers.stream import PeerAddress
from kvtier.tiers.tier import Outcome


def at(node: Node | ScriptedPeer) -> PeerAddress:
    host, _, port = node.address.rpartition(":")
    return host, int(port)


def anchored(num_blocks: int = 24, first_token: int = 0) -> TokenChain:
    """A chain with an anchor that is not its first block."""
    while probes(keys_of((chain := chain_of(num_blocks, first_token)).hashes))[:1] in ([], [0]):
        first_token += 1000
    return chain


def tell(holder: PeerAddress, chain: TokenChain, *owners: Node, epoch: int = 1) -> None:
    """Report a chain to these owners, as its holder does."""
    keys = keys_of(chain.hashes)
    for owner in owners:
        assert owner.peer_server.index.report(FINGERPRINT, Report(holder, epoch, 0, keys.tolist(), []))


def test_a_prompt_costs_its_owners_a_question_and_its_holder_one(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=64) for _ in range(5)]
    chain, other = anchored(), anchored(first_token=500_000)
    assert store(made[0].hierarchy, chain) == 24
    tell(at(made[0]), chain, *made)
    with borrowing(key, *(node.address for node in made), index="ring") as tier:
        assert tier.locate(chain.hashes) == 24
        stats = tier.stats()
        assert stats["questions"] == 1
        assert 1 <= stats["owners_queried"] <= len(probes(keys_of(chain.hashes)))
        assert read(tier, chain) == [Outcome.OK] * 24
        # What nobody holds costs no query of nodes, but one of both its owners: one may have missed a report.
        assert tier.locate(other.hashes) == 0
        assert tier.stats()["questions"] == 1
        assert tier.stats()["owners_queried"] - stats["owners_queried"] >= 2
        assert tier.stats()["owners_unanswered"] == 0


def test_above_64_nodes_the_ring_needs_no_setting(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=32) for _ in range(MAX_PEERS + 1)]
    chain = anchored()
    assert store(made[9].hierarchy, chain) == 24
    tell(at(made[9]), chain, *made)
    with borrowing(key, *(node.address for node in made)) as tier:
        assert (tier.locate(chain.hashes), read(tier, chain)) == (24, [Outcome.OK] * 24)
        assert tier.stats()["questions"] == 1
    with borrowing(key, *(node.address for node in made), index="all", answering=MAX_PEERS) as tier:
        tier.locate(chain.hashes)
        assert tier.stats()["questions"] == MAX_PEERS


def test_what_a_node_stores_is_found_by_all_and_what_it_evicts_is_a_miss(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=64) for _ in range(3)]
    addresses, chain = [node.address for node in made], anchored()
    # The node's own tier, whose connections carry its reports.
    with borrowing(key, *addresses, index="ring", listen=made[0].address) as own:
        assert store(made[0].hierarchy, chain) == 24

        def report() -> None:
            own.report(made[0].model.keys(), made[0].peer_server.index)

        report()
        with borrowing(key, *addresses, index="ring") as tier:
            assert (tier.locate(chain.hashes), read(tier, chain)) == (24, [Outcome.OK] * 24)
            made[0].hierarchy.host.pool.evict(chain.hashes)
            assert read(tier, chain) == [Outcome.EVICTED] * 24  # before it is reported
            report()
            assert tier.locate(chain.hashes) == 0
            assert [node.peer_server.index.num_keys for node in made] == [0, 0, 0]
            # After a reset nothing is lent, or reported.
            assert store(made[0].hierarchy, chain) == 24
            report()
            assert tier.locate(chain.hashes) == 24
            made[0].hierarchy.reset()
            assert store(made[0].hierarchy, chain) == 24
            report()
            assert [node.peer_server.index.num_keys for node in made] == [0, 0, 0]


def test_a_dead_owner_is_passed_over_for_its_replica(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=64) for _ in range(4)]
    chain = anchored()
    keys = keys_of(chain.hashes)
    pairs = Ring([at(node) for node in made]).owners(keys[probes(keys)])
    nodes = {number: node for number, node in enumerate(sorted(made, key=at))}
    firsts = {int(first) for first, _ in pairs}
    holder = next(node for number, node in nodes.items() if number not in firsts or len(firsts) == len(nodes))
    assert store(holder.hierarchy, chain) == 24
    tell(at(holder), chain, *made)
    with borrowing(key, *(node.address for node in made), index="ring") as tier:
        victim = nodes[next(iter(firsts - {next(n for n, node in nodes.items() if node is holder)}))]
        victim.peer_server.close()
        assert (tier.locate(chain.hashes), read(tier, chain)) == (24, [Outcome.OK] * 24)


def test_an_owner_that_hangs_costs_a_part_of_the_deadline(key: Path, made: list[Node]) -> None:
    over = threading.Event()

    def hangs(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        over.wait(60.0)

    hung = [ScriptedPeer(key, hangs) for _ in range(2)]
    made.append(Node(key, slots=64))
    ring, mine, first_token = Ring([at(made[0]), *map(at, hung)]), at(made[0]), 0
    chain, pairs = chain_of(0), [[mine, mine]]
    while all(first == mine for first, _ in pairs) or not all(mine in pair for pair in pairs):
        first_token += 1000  # a hung node is queried first, and this one has all it does not answer
        chain = anchored(first_token=first_token)
        asked = keys_of(chain.hashes)[probes(keys_of(chain.hashes))]
        pairs = [[ring.nodes[number] for number in pair] for pair in ring.owners(asked)]
    assert store(made[0].hierarchy, chain) == 24
    tell(at(made[0]), chain, made[0])
    options = {"index": "ring", "deadline": "8s", "failures": 1, "retry_after": "60s"}
    with borrowing(key, made[0].address, *(each.address for each in hung), **options) as tier:
        began = time.monotonic()
        assert tier.locate(chain.hashes) == 24
        assert time.monotonic() - began < 8.0  # a quarter of it for hung owners, and the holder answers at once
        failed = tier.stats()["failed_timeout"]
        assert 1 <= failed <= 2
        # They are passed over from now on.
        assert tier.locate(chain.hashes) == 24
        assert tier.stats()["failed_timeout"] == failed
    over.set()
    for each in hung:
        each.close()


def of_one_owner(*nodes: Node | ScriptedPeer) -> tuple[TokenChain, Node | ScriptedPeer]:
    """A chain of 48 blocks whose anchors, one of the first eight and later ones, all have this first owner."""
    by_address, first_token = {at(node): node for node in nodes}, 0
    ring = Ring(by_address)
    while True:
        chain = chain_of(48, first_token)
        keys = keys_of(chain.hashes)
        places = probes(keys)
        firsts = {ring.nodes[first] for first, _ in ring.owners(keys[places])}
        if len(firsts) == 1 and len(places) > 1 and places[0] < 8 < places[1]:
            return chain, by_address[firsts.pop()]
        first_token += 1000


@pytest.mark.parametrize("num_known", [0, 8])
def test_what_an_owner_has_missed_its_replica_knows(key: Path, made: list[Node], num_known: int) -> None:
    """It has restarted, or was cut off from a holder: it knows who holds the beginning, but not who holds all of it."""
    made += [Node(key, slots=64) for _ in range(3)]
    chain, owner = of_one_owner(*made)
    beginner, holder = (node for node in made if node is not owner)
    assert store(holder.hierarchy, chain) == 48
    assert store(beginner.hierarchy, chain, 0, 8) == 8
    beginning = chain_of(8, first_token=int(np.frombuffer(chain.block_tokens(0), "<u4")[0]))
    assert beginning.hashes == chain.hashes[:8]
    for node in made:
        if node is not owner or num_known:
            tell(at(beginner), beginning, node)
        if node is not owner:
            tell(at(holder), chain, node)
    with borrowing(key, *(node.address for node in made), index="ring") as tier:
        assert (tier.locate(chain.hashes), read(tier, chain)) == (48, [Outcome.OK] * 48)


def test_holders_that_restarted_with_nothing_do_not_hide_one_that_has_it(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=64) for _ in range(4)]
    chain, _ = of_one_owner(*made)
    assert store(made[0].hierarchy, chain) == 48
    for holder in made[:3]:
        tell(at(holder), chain, *made)
    with borrowing(key, *(node.address for node in made), index="ring") as tier:
        for _ in range(12):  # owners name the three in any order
            assert tier.locate(chain.hashes) == 48
            tier.discard(chain.hashes)
        assert tier.stats()["questions"] <= 8 * len(made)


def test_an_owner_that_hangs_as_it_is_connected_to_costs_no_other_its_query(key: Path, made: list[Node]) -> None:
    def knows_nobody(
        connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, words: list[bytes]
    ) -> None:
        num = len(wire.unpack_query(words))
        connection.sendall(session.answer(verb, 0, wire.pack_holders([()] * num)))

    hung = ScriptedPeer(key, knows_nobody)
    made.append(Node(key, slots=64))
    ring, chain = Ring([at(made[0]), at(hung)]), chain_of(0)
    while {ring.nodes[i] for i, _ in ring.owners(keys_of(chain.hashes)[probes(keys_of(chain.hashes))])} != {
        *ring.nodes
    }:
        chain = chain_of(
            48, first_token=len(chain.hashes) and int(np.frombuffer(chain.block_tokens(0), "<u4")[0]) + 1000
        )
    assert store(made[0].hierarchy, chain) == 48
    tell(at(made[0]), chain, made[0])
    options = {"index": "ring", "connect_timeout": "4s", "deadline": "8s", "retry_after": "60s"}
    with borrowing(key, made[0].address, hung.address, **options) as tier:
        healthy, other = tier._peers[at(made[0])], tier._peers[at(hung)]
        hung.hangs = threading.Event()
        other.close_ready()
        link = healthy.connection(time.monotonic() + 20.0)  # another thread has it
        assert tier.locate(chain.hashes) == 48
        assert (healthy.answers, healthy.counts, other.answers) == (True, {}, False)
        healthy.put_back(link)
        hung.hangs.set()
    hung.close()


Said = Callable[[wire.PeerSession, wire.PeerVerb, int], bytes]


def honest_form(count: int, found: list[list[PeerAddress]]) -> Said:
    return lambda session, verb, num: session.answer(verb, count, wire.pack_holders(found * num))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (honest_form(1, [[("127.0.0.1", 1), ("10.255.0.1", 9), ("::2", 80)]]), None),  # nodes of no fleet
        (lambda session, verb, num: session.answer(verb, num, b"\xff" * wire.HOLDERS_BYTES * num), None),
        (lambda session, verb, num: session.answer(verb, 9, bytes(wire.HOLDERS_BYTES * num)), "garbage"),
        (lambda session, verb, num: session.answer(wire.PeerVerb.HELD, 1, bytes(wire.HOLDERS_BYTES * num)), "garbage"),
        (lambda session, verb, num: noise(num), "mac"),
        (lambda session, verb, num: b"", "hung_up"),
    ],
)
def test_an_owner_that_lies_is_a_miss(key: Path, made: list[Node], said: Said, reason: str | None) -> None:
    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        assert verb is wire.PeerVerb.HOLDERS
        keys = wire.unpack_query(names)
        if not (answer := said(session, verb, len(keys))):
            raise EOFError
        connection.sendall(answer)

    liar = ScriptedPeer(key, script)
    chain = anchored()
    with borrowing(key, liar.address, index="ring", failures=100) as tier:
        assert (tier.locate(chain.hashes), tier.lookup(chain.hashes)) == (0, 0)
        stats = tier.stats()
        assert stats.get("questions", 0) == 0
        failed = {name: count for name, count in stats.items() if name.startswith("failed")}
        assert failed == ({} if reason is None else {f"failed_{reason}": 1})
    liar.close()


def noise(num: int) -> bytes:
    return b"\xa5" * (wire.WORDS_BYTES + wire.HOLDERS_BYTES * num + wire.PROOF_BYTES)


def test_a_holder_that_an_owner_made_up_is_a_question_in_vain(key: Path, made: list[Node]) -> None:
    made += [Node(key, slots=64) for _ in range(2)]
    chain = anchored()
    tell(at(made[1]), chain, *made)  # it has none of them
    with borrowing(key, *(node.address for node in made), index="ring") as tier:
        assert (tier.locate(chain.hashes), tier.lookup(chain.hashes)) == (0, 0)
        assert tier.stats()["questions"] == 1
        assert not [name for name in tier.stats() if name.startswith("failed")]


@pytest.mark.parametrize("verb", [wire.PeerVerb.REPORT, wire.PeerVerb.HOLDERS])
def test_hostile_questions_end_the_connection_and_change_nothing(
    key: Path, made: list[Node], verb: wire.PeerVerb
) -> None:
    made.append(Node(key))
    draw = np.random.default_rng(9)
    blocks = wire.LentBlocks(FINGERPRINT, SLOT_BYTES, 4)
    for turn in range(40):
        link = wire_link(made[0], key, blocks)
        words = [draw.bytes(32) for _ in range(1 + turn % 4)]
        link.ask(verb, words, time.monotonic() + 20.0)
        with pytest.raises(peers.PeerFailed):
            link.read_held(0, time.monotonic() + 20.0)
        link.close()
    server = made[0].peer_server
    wait_until(lambda: server.counts["cut_off_keys"] == 40)
    assert server.index.num_keys == 0
    # And it still answers who asks rightly.
    link = wire_link(made[0], key, blocks)
    assert link.report(Report(("10.0.0.1", 1), 1, 0, [8], []), time.monotonic() + 20.0)
    assert not link.report(Report(("10.0.0.1", 1), 1, 5, [16], []), time.monotonic() + 20.0)
    link.ask_holders([8, 16], time.monotonic() + 20.0)
    assert link.read_holders(2, time.monotonic() + 20.0) == [[("10.0.0.1", 1)], []]
    link.close()


def wire_link(node: Node, key: Path, blocks: wire.LentBlocks) -> PeerLink:
    return PeerLink.opened(at(node), wire.shared_key(key), blocks, 60.0)


def test_a_ring_is_for_more_nodes_than_are_followed(key: Path) -> None:
    few = [("10.0.0.1", port) for port in range(1, MAX_PEERS + 1)]
    many = [*few, ("10.0.0.2", 1)]
    for index, addresses, wanted in (
        ("auto", few, False),
        ("auto", many, True),
        ("all", many, False),
        ("ring", few, True),
        ("ring", [], False),
    ):
        owners = Owners(peers_config(key, "10.0.0.1:1", listen="10.0.0.9:5", index=index).peers, FINGERPRINT)
        assert owners.adopt(addresses) is wanted
        # This node is in the ring, also if its list leaves it out.
        assert (owners.ring is not None and ("10.0.0.9", 5) in owners.ring.numbers) is wanted
    same = Owners(peers_config(key, "10.0.0.1:1", listen="10.0.0.1:1", index="ring").peers, FINGERPRINT)
    assert same.adopt(few)
    ring = same.ring
    assert ring is not None
    assert len(ring.nodes) == MAX_PEERS
    assert same.adopt(few[::-1])
    assert same.ring is ring
    everywhere = Owners(peers_config(key, "10.0.0.1:1", listen="0.0.0.0:5", index="ring").peers, FINGERPRINT)
    assert everywhere.adopt(few)
    assert everywhere.ring is not None
    assert len(everywhere.ring.nodes) == MAX_PEERS


# Daemons as processes


def test_a_fleet_finds_blocks_by_its_ring_also_after_a_kill_and_a_restart(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of(3, peers__index="ring")
    chain, other, late = anchored(), anchored(first_token=50_000), anchored(first_token=90_000)
    assert "queries a ring of owners" in "".join(fleet.daemons[0].lines)
    first, second, third = (attach(path) for path in fleet.sockets)
    assert store_at(first, chain) == 24
    wait_until(lambda: where(second, chain) == Attribution(24, peers=24))
    assert load(second, chain) == 24
    stats = fleet.peers(1)
    assert stats["answering"] == 2
    # An owner and holder dies. The others find what the second has, by the replica.
    assert store_at(second, other) == 24
    wait_until(lambda: where(third, other) == Attribution(24, peers=24))
    end_child(fleet.daemons[0].process)
    first.close()
    wait_until(lambda: where(third, chain) == Attribution(24, peers=24))
    assert load(third, chain) == 24
    # It restarts with nothing: the others report to it anew, and it finds what they have.
    fleet.daemons[0] = fleet.start(0)
    again = attach(fleet.sockets[0])
    wait_until(lambda: where(again, other) == Attribution(24, peers=24))
    assert load(again, other) == 24
    assert store_at(again, late) == 24
    wait_until(lambda: where(second, late) == Attribution(24, peers=24))
    assert "kvtier_peer_ring_total{" in fleet.metrics(1)
    for tiers in (again, second, third):
        tiers.close()


def test_a_node_that_listens_everywhere_finds_its_own_address(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(2, peers__index="ring"), anchored()
    end_child(fleet.daemons[0].process)
    fleet.daemons[0] = fleet.start(0, peers__listen=fleet.addresses[0].replace("127.0.0.1", "0.0.0.0"))
    first, second = (attach(path) for path in fleet.sockets)
    assert store_at(first, chain) == 24
    wait_until(lambda: where(second, chain) == Attribution(24, peers=24))
    assert load(second, chain) == 24
    first.close()
    second.close()

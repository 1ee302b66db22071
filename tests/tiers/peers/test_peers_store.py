"""The tier of other nodes' memory: located, read, verified; and what becomes of peers that die, hang or lie."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import SLOT_BYTES, chain_of, payload_of, store, wait_until
from node_rig import free_port
from peers_rig import Node, ScriptedPeer, TellingNode, block, borrowing, buffers, key_file, record, says_held

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.naming.kv_probe import KVProbe
from kvtier.tiers.peers import TAG_BYTES, wire
from kvtier.tiers.peers import peer as peer_module
from kvtier.tiers.peers.following import FEEDS, EventFeed
from kvtier.tiers.peers.peer import MAX_PEERS, PeerAddresses
from kvtier.tiers.peers.ring import MAX_NODES
from kvtier.tiers.peers.store import RESETS, PeersStore
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

HELD, LEND = wire.PeerVerb.HELD, wire.PeerVerb.LEND


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture
def made() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture
def node(key: Path, made: list[Node]) -> Node:
    made.append(Node(key))
    return made[0]


@cache
def probe_of(scale: float) -> KVProbe:
    return KVProbe.of([scale * np.random.default_rng(seed).normal(size=(2, 7, 32)) for seed in range(4)], "float32")


def read(tier: PeersStore, names: list[ChainHash]) -> list[BlockRecord | Outcome]:
    """Read blocks; what came has its name's bytes."""
    into = buffers(len(names))
    results = tier.read(names, into)
    for name, result, buffer in zip(names, results, into, strict=True):
        if isinstance(result, BlockRecord):
            assert result.chain_hash == name
            assert bytes(buffer) == payload_of(name)
    return results


def test_blocks_of_another_nodes_memory_are_located_and_read(key: Path, node: Node) -> None:
    chain = chain_of(6)
    assert store(node.hierarchy, chain, 0, 4) == 4
    with borrowing(key, node.address) as tier:
        # Nobody was asked yet, so nothing is known.
        assert (tier.lookup(chain.hashes), tier.holds(chain.hashes)) == (0, [False] * 6)
        assert tier.locate(chain.hashes) == 4
        assert (tier.lookup(chain.hashes), tier.holds(chain.hashes)) == (4, [True] * 4 + [False] * 2)
        # Records and bytes are those that were stored.
        assert read(tier, chain.hashes[:4]) == [record(chain, i) for i in range(4)]
        stats = tier.stats()
        assert (stats["locate_ok"], stats["read_ok"], stats["names"]) == (1, 4, 4)
        wait_until(lambda: (node.peer_server.counts["blocks"], node.peer_server.counts["bytes"]) == (4, 4 * SLOT_BYTES))
        # What it does not hold is a miss, and nothing is ever stored with a peer.
        assert read(tier, [chain.hashes[5]]) == [Outcome.ABSENT]
        assert tier.write([record(chain, 5)], buffers(1)) == [Outcome.UNSUPPORTED]
        # What an operator purges here is not known any more.
        tier.discard(chain.hashes)
        assert tier.lookup(chain.hashes) == 0


def test_a_block_that_left_since_it_was_located_is_a_miss(key: Path, node: Node) -> None:
    chain = chain_of(4)
    store(node.hierarchy, chain)
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 4
        node.hierarchy.host.pool.evict(chain.hashes[2:])
        results = read(tier, chain.hashes)
        assert results[:2] == [record(chain, 0), record(chain, 1)]
        assert results[2:] == [Outcome.EVICTED] * 2
        assert tier.lookup(chain.hashes) == 2


def test_blocks_that_several_nodes_hold_come_in_as_few_flights_as_can_be(key: Path, made: list[Node]) -> None:
    chain = chain_of(8)
    made += [Node(key), Node(key), Node(key)]
    store(made[0].hierarchy, chain, 0, 3)
    store(made[1].hierarchy, chain, 0, 5)
    store(made[2].hierarchy, chain, 5, 8)
    with borrowing(key, *(each.address for each in made)) as tier:
        assert tier.locate(chain.hashes) == 8
        assert read(tier, chain.hashes) == [record(chain, i) for i in range(8)]
        # The second has the longest run from the start, the third the rest. The first is left in peace.
        wait_until(lambda: [each.peer_server.counts["blocks"] for each in made] == [0, 5, 3])


def test_more_blocks_than_one_question_has_names(key: Path, made: list[Node]) -> None:
    made.append(Node(key, slots=1200))
    chain = chain_of(1100)
    assert store(made[0].hierarchy, chain) == 1100
    with borrowing(key, made[0].address) as tier:
        assert tier.locate(chain.hashes) == 1100
        results = read(tier, chain.hashes)
        assert all(isinstance(result, BlockRecord) for result in results[: wire.MAX_NAMES])
        assert results[wire.MAX_NAMES :] == [Outcome.ABSENT] * (1100 - wire.MAX_NAMES)


def test_a_node_whose_model_computes_otherwise_lends_nothing(
    key: Path, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    chain, later = chain_of(4), chain_of(4, first_token=100)
    store(node.hierarchy, chain)
    store(node.hierarchy, later)
    with borrowing(key, node.address) as tier:
        tier.set_kv_probe(probe_of(1.0).packed())
        # The node's engine has not said what its model computes: nothing to compare with.
        wait_until(lambda: tier.locate(chain.hashes) == 4)
        assert read(tier, chain.hashes) == [record(chain, i) for i in range(4)]
        # Now it has, and rounds otherwise.
        node.model.kv_probe = partial(probe_of, 1.0001)
        assert tier.locate(later.hashes) == 4
        # Another engine's model computes otherwise: connections of before are of no more use than new ones.
        node.model.kv_probe = partial(probe_of, 1.5)
        assert read(tier, chain.hashes) == [Outcome.EVICTED] * 4
        assert tier.locate(chain.hashes) == 0
    with borrowing(key, node.address, retry_after="50ms") as tier:
        tier.set_kv_probe(probe_of(1.0).packed())
        wait_until(lambda: tier.stats().get("failed_other_kv", 0) > 1)
        assert tier.locate(chain.hashes) == 0
        told = [line for line in caplog.messages if "computes other KV under this model's name" in line]
        assert len(told) == 1
        node.model.kv_probe = lambda: None
        wait_until(lambda: tier.locate(chain.hashes) == 4)


def test_a_dead_peer_costs_its_blocks_only_and_comes_back(key: Path, made: list[Node]) -> None:
    chain, other = chain_of(4), chain_of(4, first_token=100)
    made += [Node(key), Node(key)]
    store(made[0].hierarchy, chain)
    store(made[1].hierarchy, other)
    with borrowing(key, *(each.address for each in made)) as tier:
        assert tier.locate(chain.hashes) == tier.locate(other.hashes) == 4
        made[0].peer_server.close()
        results = read(tier, [*chain.hashes, *other.hashes])
        assert results[:4] == [Outcome.IO_ERROR] * 4
        assert results[4:] == [record(other, i) for i in range(4)]
        # Nobody is promised its blocks any more, and the next question does not wait for it.
        assert tier.lookup(chain.hashes) == 0
        assert tier.locate(chain.hashes) == 0
        assert tier.stats()["answering"] == 1
        assert tier.stats()["failed_no_connection"] >= 1
        assert tier.probe("read")
        # A daemon is started there again, with an empty memory at first.
        again = Node(key, address=made[0].address)
        made.append(again)
        wait_until(lambda: tier.stats()["answering"] == 2)
        assert tier.locate(chain.hashes) == 0
        store(again.hierarchy, chain)
        assert tier.locate(chain.hashes) == 4
        assert read(tier, chain.hashes) == [record(chain, i) for i in range(4)]


def test_another_key_is_another_world(key: Path, node: Node, tmp_path: Path) -> None:
    store(node.hierarchy, chain_of(2))
    with borrowing(key_file(tmp_path, "other"), node.address, answering=0) as tier:
        wait_until(lambda: tier.stats().get("failed_key", 0) >= 2)
        assert tier.locate(chain_of(2).hashes) == 0
        assert not tier.probe("read")
    assert node.peer_server.counts["stranger_proof"] >= 2
    assert node.peer_server.counts["blocks"] == 0


def test_ones_own_address_among_the_nodes_is_passed_over(key: Path, made: list[Node]) -> None:
    with ScriptedMyself(key) as address, borrowing(key, address, answering=0) as tier:
        wait_until(lambda: [peer.is_myself for peer in tier._peers.values()] == [True])
        assert tier.stats()["answering"] == 0
        assert not [name for name in tier.stats() if name.startswith("failed")]


class ScriptedMyself(Node):
    """A peer_server that says that it is this process."""

    def __init__(self, key: Path) -> None:
        super().__init__(key)
        self.peer_server._node = wire.own_node()

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *exception: object) -> None:
        self.close()


# A peer with the key that lies. Every lie is a miss with its reason, and ends in an open breaker.

Lie = Callable[[socket.socket, wire.PeerSession, list[bytes], TokenChain], None]


def _other_bytes(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """Bytes that are not those of the checksum, with a right tag."""
    blocks = [block(session, record(chain, i), bytes(SLOT_BYTES)) for i in range(len(names))]
    connection.sendall(session.answer(LEND, len(names)) + b"".join(blocks))


def _flipped_bit(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """As somebody on the way would do it, who does not have the key."""
    sent = bytearray(block(session, record(chain, 0), payload_of(names[0])))
    sent[session.head_bytes + 100] ^= 1
    connection.sendall(session.answer(LEND, 1) + sent)


def _other_block(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """Another block's record and bytes, whole in themselves."""
    other = chain_of(1, first_token=900)
    connection.sendall(session.answer(LEND, 1) + block(session, record(other, 0), payload_of(other.hashes[0])))


def _other_tag(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """The right block with the tag of another block."""
    sent, other = block(session, record(chain, 0), payload_of(names[0])), record(chain, 1)
    tag = block(session, other, payload_of(names[1]))[-TAG_BYTES:]
    connection.sendall(session.answer(LEND, 1) + sent[:-TAG_BYTES] + tag)


def _huge_count(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    connection.sendall(session.answer(LEND, 2**32 - 1))


def _unproven(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    connection.sendall(bytes(wire.WORDS_BYTES + wire.PROOF_BYTES))


def _cut_short(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """It dies in the middle of a block."""
    connection.sendall(session.answer(LEND, 1) + block(session, record(chain, 0), payload_of(names[0]))[:1000])
    connection.close()


def _never(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """It says nothing."""


def _dripping(connection: socket.socket, session: wire.PeerSession, names: list[bytes], chain: TokenChain) -> None:
    """A byte now and then."""
    sent = session.answer(LEND, 1) + block(session, record(chain, 0), payload_of(names[0]))
    for at in range(len(sent)):
        connection.sendall(sent[at : at + 1])
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("lie", "outcome", "reason"),
    [
        (_other_bytes, Outcome.CHECKSUM, "checksum"),
        (_flipped_bit, Outcome.CHECKSUM, "mac"),
        (_other_block, Outcome.KEY_MISMATCH, "other_block"),
        (_other_tag, Outcome.CHECKSUM, "mac"),
        (_huge_count, Outcome.IO_ERROR, "garbage"),
        (_unproven, Outcome.CHECKSUM, "mac"),
        (_cut_short, Outcome.IO_ERROR, "hung_up"),
        (_never, Outcome.TIMEOUT, "timeout"),
        (_dripping, Outcome.TIMEOUT, "timeout"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).lstrip("_"),
)
def test_a_lying_peer_is_a_miss_with_a_reason_and_is_left_alone(
    key: Path, lie: Lie, outcome: Outcome, reason: str
) -> None:
    chain = chain_of(3)

    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        if verb is HELD:
            says_held(connection, session, names)
        else:
            lie(connection, session, names, chain)

    peer = ScriptedPeer(key, script)
    deadline = "200ms" if outcome is Outcome.TIMEOUT else "20s"
    with borrowing(key, peer.address, deadline=deadline) as tier:
        tier.breaker_limits = 2, 60.0  # as at SIGHUP: nodes known before have the new limits, too
        (known,) = tier._peers.values()
        wait_until(lambda: known.breaker._limit == 2)
        for _ in range(2):
            wait_until(lambda: tier.locate(chain.hashes) == 3)
            assert read(tier, chain.hashes) == [outcome] * 3
            assert tier.lookup(chain.hashes) == 0
        stats = tier.stats()
        assert (stats[f"failed_{reason}"], stats[f"read_{outcome}"]) == (2, 6)
        # Two in a row: it is not even connected to any more, though it would welcome us.
        welcomed = peer.num_welcomed
        time.sleep(0.2)
        assert (tier.locate(chain.hashes), tier.stats()["answering"], peer.num_welcomed) == (0, 0, welcomed)
        assert not tier.probe("read")
    peer.close()


def test_a_peer_that_claims_what_it_does_not_say_right_is_not_asked_for_blocks(key: Path) -> None:
    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        assert verb is HELD
        connection.sendall(session.answer(HELD, len(names), b"\7" * len(names)))

    peer = ScriptedPeer(key, script)
    with borrowing(key, peer.address) as tier:
        assert tier.locate(chain_of(3).hashes) is Outcome.IO_ERROR
        assert tier.stats()["failed_garbage"] == 1
    peer.close()


def test_a_hung_peer_does_not_take_a_good_ones_answer_with_it(key: Path, node: Node) -> None:
    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        """Neither questions nor blocks are answered."""

    chain = chain_of(4)
    store(node.hierarchy, chain)
    peer = ScriptedPeer(key, script)
    with borrowing(key, peer.address, node.address, deadline="500ms") as tier:
        assert tier.locate(chain.hashes) == 4
        assert tier.stats()["failed_timeout"] == 1
        assert read(tier, chain.hashes) == [record(chain, i) for i in range(4)]
    peer.close()


def test_after_a_reset_nothing_is_borrowed_and_nothing_is_lent(
    key: Path, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RESETS, "_fingerprints", set())
    chain = chain_of(2)
    store(node.hierarchy, chain)
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 2
        # The other node was reset: blocks that come there later have other bytes under the same names.
        node.hierarchy.reset()
        store(node.hierarchy, chain)
        assert read(tier, chain.hashes) == [Outcome.EVICTED] * 2
        assert tier.locate(chain.hashes) == 0
        # This one was reset: until the process ends, what others have may be what was to be forgotten.
        tier.reset()
        assert "raise [cache] epoch" in caplog.text
        assert (tier.lookup(chain.hashes), tier.locate(chain.hashes)) == (0, 0)
        assert read(tier, chain.hashes) == [Outcome.EPOCH] * 2
    with borrowing(key, node.address, answering=0) as again:
        assert again.locate(chain.hashes) == 0


def test_closed_means_closed(key: Path, node: Node) -> None:
    chain = chain_of(2)
    store(node.hierarchy, chain)
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 2
        tier.close()
        assert read(tier, chain.hashes) == [Outcome.CLOSED] * 2
        assert tier.locate(chain.hashes) == 0
        tier.close()
    wait_until(lambda: not node.peer_server.num_connections)


# The nodes that [peers] names: what is no address, and how many of them count.


@pytest.mark.parametrize(
    "node", ["a:65536", "a:99999", "a:0", "a:\u0663", "a:-1", "a\0b:1", "\x1b[2J:1", "a b:1", "::1:80", ":80"]
)
def test_what_is_no_address_of_a_node_is_one_line(node: str, tmp_path: Path) -> None:
    # A resolver takes port 65536 + 80 for 80, and would ask whoever is there.
    with pytest.raises(ConfigError, match=r"\[peers\] nodes \[.*not a list of HOST:PORT; write one") as refused:
        Config.load(peers={"nodes": [node], "key_file": tmp_path / "key"})
    assert str(refused.value).isprintable()


def test_so_many_addresses_count_whatever_their_order_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [f"127.0.0.1:{port}" for port in range(1, MAX_PEERS + 41)]
    addresses = PeerAddresses(nodes)
    with caplog.at_level(logging.WARNING):
        chosen = set(addresses.look_up())
        assert len(chosen) == MAX_PEERS
        assert set(addresses.look_up()) == chosen
    assert [record.message for record in caplog.records] == ["[peers] nodes: 104 addresses, 64 of them are used"]
    assert set(PeerAddresses(nodes[::-1]).look_up()) == chosen
    # one more, or one less, changes one at most
    assert len(chosen - set(PeerAddresses([*nodes, "127.0.0.1:5000"]).look_up())) <= 1
    assert len(set(PeerAddresses(nodes[1:]).look_up()) - chosen) <= 1


@pytest.mark.parametrize("most", [MAX_PEERS, MAX_NODES])
def test_machines_choose_for_themselves_unless_they_are_a_ring(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    nodes, chosen = [f"127.0.0.1:{port}" for port in range(1, most * 2)], list[set[Any]]()
    for name in ("node-a", "node-b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        chosen.append(set(PeerAddresses(nodes, most=most).look_up()))
    assert len(chosen[0]) == most
    assert (chosen[0] == chosen[1]) is (most == MAX_NODES)


def test_a_resolver_that_hangs_keeps_no_peer_away(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, over = f"127.0.0.1:{free_port()}", threading.Event()
    node = Node(key, address=address)
    with borrowing(key, address) as tier:
        monkeypatch.setattr(peer_module, "looked_up", lambda name: over.wait(60.0) and [])
        tier._looked_up_at = float("-inf")
        wait_until(lambda: tier._resolving is not None)
        node.close()
        assert tier.locate(chain_of(2).hashes) is not None
        assert tier.stats()["answering"] == 0
        node = Node(key, address=address)
        wait_until(lambda: tier.stats()["answering"] == 1, 20.0)
        over.set()
    node.close()


def test_peers_that_do_not_answer_keep_no_other_away_for_long(key: Path) -> None:
    address, silent = f"127.0.0.1:{free_port()}", [socket.create_server(("127.0.0.1", 0)) for _ in range(48)]
    nodes = [f"127.0.0.1:{each.getsockname()[1]}" for each in silent]
    node = Node(key, address=address)
    with borrowing(key, *nodes, address, answering=1, connect_timeout="1s", failures=1000) as tier:
        node.close()
        tier.locate(chain_of(2).hashes)
        node = Node(key, address=address)
        wait_until(lambda: tier.stats()["answering"] == 1, 20.0)  # one after the other takes 48 s
    node.close()
    for each in silent:
        each.close()


def test_connections_are_maintained_though_no_thread_is_free_for_events(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, address = list[bytes](), f"127.0.0.1:{free_port()}"

    def none_free(fingerprint: bytes, *_: object) -> EventFeed:
        tries.append(fingerprint)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(FEEDS, "open", none_free)
    node: Node = TellingNode(key, chain_of(2), address=address)
    with borrowing(key, address) as tier:
        wait_until(lambda: tries)
        node.close()
        tier.locate(chain_of(2).hashes)
        assert tier.stats()["answering"] == 0
        node = Node(key, address=address)
        wait_until(lambda: tier.stats()["answering"] == 1)
        assert tier.stats()["not_tended"] >= 1
    node.close()


def test_no_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, answers = [0.0], {"a:1": ["10.0.0.1", "10.0.0.2"], "b:1": ["10.0.0.3"]}

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        if not answers[f"{host}:{port}"]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(0, 0, 0, "", (address, port)) for address in answers[f"{host}:{port}"]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    addresses = PeerAddresses(["a:1", "b:1"], clock=lambda: now[0])
    known = [("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1)]
    assert addresses.look_up() == known
    answers["a:1"] = []
    for now[0] in (10.0, 20.0, 3590.0):
        assert addresses.look_up() == known
    assert len(caplog.messages) == 1
    assert "its last addresses stay for now" in caplog.text
    answers["a:1"] = ["10.0.0.9"]  # an answer: the others are gone
    assert addresses.look_up() == [("10.0.0.9", 1), ("10.0.0.3", 1)]
    answers["a:1"] = []
    now[0] += 3601.0
    assert addresses.look_up() == [("10.0.0.3", 1)]

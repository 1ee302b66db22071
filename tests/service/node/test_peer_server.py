"""Node to node: daemons as processes, each with an L2 of its own, that read one another's blocks out of memory."""

import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, hierarchy_of, wait_until
from doubles import store as store_in
from peers_rig import FINGERPRINT, PATIENCE, Fleet, Node, Sizes, borrowing, buffers, key_file
from peers_rig import FINGERPRINT as MODEL
from service_rig import Serve, attach, end_child, load, store, where

from kvtier.service.node import peer_server
from kvtier.service.node.peer_server import LentModel
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.link import PeerLink
from kvtier.tiers.peers.peer import MAX_PEERS, MAX_READY
from kvtier.tiers.peers.stream import PeerFailed
from kvtier.tiers.tier import BlockRecord, Outcome


def test_a_block_computed_on_one_node_is_loaded_from_its_memory_on_another(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(3), chain_of(8)
    first, second, third = (attach(path) for path in fleet.sockets)
    assert store(first, chain) == 8
    # The second computed nothing: it loads all of it, and says from where.
    wait_until(lambda: where(second, chain) == Attribution(8, peers=8))
    assert load(second, chain) == 8
    # Now its own memory has them, as has the first. The third has its choice.
    assert where(second, chain) == Attribution(8, l2=8)
    wait_until(lambda: where(third, chain) == Attribution(8, peers=8))
    assert load(third, chain) == 8
    # Both sides are counted, and so is who answers.
    status = fleet.status(1)
    (model,) = status["models"]
    assert (model["tiers"]["peers"]["answering"], model["tiers"]["peers"]["failures"]) == (2, {})
    assert model["lookups"]["peers"] >= 8
    with urllib.request.urlopen(f"http://{fleet.daemons[1].http}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert "kvtier_peers_answering{" in metrics
    assert 'kvtier_lent_total{event="welcomed"}' in metrics
    wait_until(lambda: sum(fleet.status(i)["lent"].get("blocks", 0) for i in range(3)) >= 16)
    # Nobody was offered a store for its peers.
    for tiers in (first, second, third):
        stats = tiers.stats()
        assert not [name for name in stats if "store" in name and 'tier="peers"' in name and stats[name]]
        tiers.close()
    assert [daemon.end(signal.SIGTERM) for daemon in fleet.daemons] == [0, 0, 0]


def test_a_node_that_is_killed_is_a_miss_and_is_back_when_it_is_back(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(2), chain_of(8)
    known, other = chain_of(4, first_token=500), chain_of(4, first_token=900)
    first, second = (attach(path) for path in fleet.sockets)
    assert (store(first, chain), store(first, known)) == (8, 4)
    wait_until(lambda: load(second, known) == 4)  # by now they know each other
    # It hangs, is asked, and dies: what is on its way is a miss, and the engine computes it.
    fleet.daemons[0].process.send_signal(signal.SIGSTOP)
    claim = second.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)
    assert second.poll(claim) is PENDING
    fleet.daemons[0].process.kill()
    fleet.daemons[0].process.wait(60)
    began = time.monotonic()
    wait_until(lambda: second.poll(claim) is not PENDING)
    assert second.poll(claim) == 0
    assert time.monotonic() - began < 20.0  # its end is heard, not waited for
    assert claim.found == Attribution(8, miss=8)
    assert (where(second, chain), store(second, chain)) == (Attribution(8, miss=8), 8)
    assert load(second, chain) == 8
    first.close()
    # It starts anew, with an empty memory, and reads the blocks back from the one that has them.
    end_child(fleet.daemons[0].process)
    fleet.daemons[0] = fleet.start(0)
    again = attach(fleet.sockets[0])
    wait_until(lambda: load(again, chain) == 8)
    assert store(again, other) == 4
    wait_until(lambda: load(second, other) == 4)
    again.close()
    second.close()


def test_other_models_and_tenants_are_not_found(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(2), chain_of(4)
    first, second = attach(fleet.sockets[0]), attach(fleet.sockets[1], fingerprint=b"another model".ljust(32, b"."))
    assert store(first, chain) == 4
    same = attach(fleet.sockets[1])
    wait_until(lambda: where(same, chain) == Attribution(4, peers=4))
    # The names are equal, the model is not.
    assert where(second, chain) == Attribution(4, miss=4)
    # A tenant's salt is in every name.
    assert where(same, chain_of(4, salt="tenant")) == Attribution(4, miss=4)
    for tiers in (first, second, same):
        tiers.close()


# One daemon's side, in this process


@pytest.fixture
def node(key: Path) -> Iterator[Node]:
    made = Node(key)
    yield made
    made.close()


def connected(node: Node) -> socket.socket:
    host, _, port = node.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def linked(node: Node, key: Path, blocks: wire.LentBlocks | None = None) -> PeerLink:
    host, _, port = node.address.rpartition(":")
    wanted = blocks or wire.LentBlocks(MODEL, SLOT_BYTES, BLOCK_SIZE)
    return PeerLink.opened((host, int(port)), wire.shared_key(key), wanted, 60.0)


def ends(connection: socket.socket) -> bool:
    """Whether the other end hangs up."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n".ljust(wire.HELLO_BYTES, b" "), b"\xff" * 4096, os.urandom(4096)]
)
def test_a_stranger_is_cut_off(node: Node, said: bytes) -> None:
    with connected(node) as connection:
        connection.sendall(said)
        assert ends(connection)
    wait_until(lambda: not node.peer_server.num_connections)
    assert sum(count for event, count in node.peer_server.counts.items() if event.startswith("stranger")) == 1
    assert not node.peer_server.counts["welcomed"]


def test_whoever_says_nothing_is_cut_off_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_HELLO_SECONDS", 0.3)
    with connected(node) as connection:
        assert ends(connection)
    wait_until(lambda: node.peer_server.counts["stranger_timeout"] == 1)


def test_strangers_take_no_place_from_who_has_the_key(node: Node, key: Path) -> None:
    strangers = [connected(node) for _ in range(peer_server.MAX_STRANGERS)]
    wait_until(lambda: node.peer_server.num_connections == peer_server.MAX_STRANGERS)
    linked(node, key).close()  # it gets in at once: whoever has waited longest gives way
    assert ends(strangers[0])
    assert node.peer_server.counts["too_many"] == 1
    more = [connected(node) for _ in range(3)]
    wait_until(lambda: node.peer_server.counts["too_many"] >= 3)
    assert ends(strangers[1])
    node.peer_server.check()
    for each in (*strangers, *more):
        each.close()
    wait_until(lambda: not node.peer_server.num_connections)
    linked(node, key).close()


def test_all_nodes_of_a_fleet_may_come_at_once(node: Node, key: Path) -> None:
    """As after a restart: each node has an address of its own, and proves the key after a round trip."""
    connections = list[socket.socket]()
    host, _, port = node.address.rpartition(":")
    for i in range(200):
        connections.append(socket.create_connection((host, int(port)), source_address=(f"127.9.{i}.1", 0)))
    blocks = wire.LentBlocks(MODEL, SLOT_BYTES, BLOCK_SIZE)
    for connection in connections:
        challenge = connection.recv(wire.CHALLENGE_BYTES, socket.MSG_WAITALL)
        session = wire.PeerSession(
            wire.shared_key(key), wire.unpack_challenge(challenge), bytes(wire.NONCE_BYTES), blocks
        )
        connection.sendall(session.hello(b"n" * wire.NODE_BYTES))
        answer = connection.recv(wire.WELCOME_BYTES, socket.MSG_WAITALL)
        assert session.read_welcome(answer)[0] is wire.Greeting.WELCOME
        connection.close()
    assert node.peer_server.counts["too_many"] == 0


def test_a_hello_for_other_blocks_of_the_model_is_refused_with_its_reason(node: Node, key: Path) -> None:
    with pytest.raises(PeerFailed, match="other_blocks"):
        linked(node, key, wire.LentBlocks(MODEL, 2 * SLOT_BYTES, BLOCK_SIZE))
    wait_until(lambda: node.peer_server.counts["stranger_other_blocks"] == 1)


def test_a_question_that_was_recorded_is_worth_nothing_on_another_connection(node: Node, key: Path) -> None:
    chain = chain_of(2)
    store_in(node.hierarchy, chain)
    link = linked(node, key)
    question = link._session.question(wire.PeerVerb.LEND, chain.hashes)
    link._session.number -= 1
    other = linked(node, key)
    other._stream.connection.sendall(question)
    assert ends(other._stream.connection)
    wait_until(lambda: node.peer_server.counts["cut_off_proof"] == 1)
    # On its own connection it is worth one answer.
    link._stream.connection.sendall(question)
    link._session.number += 1
    results: dict[int, BlockRecord | Outcome] = {}
    link.read_blocks(chain.hashes, buffers(2), results.__setitem__, time.monotonic() + 60)
    assert len(results) == 2
    link._stream.connection.sendall(question)
    assert ends(link._stream.connection)
    wait_until(lambda: node.peer_server.counts["cut_off_proof"] == 2)
    link.close()
    other.close()


def test_too_many_names_end_the_connection(node: Node, key: Path) -> None:
    link = linked(node, key)
    link._stream.connection.sendall(b"\2\0\0\0" + (2**32 - 1).to_bytes(4, "little") + bytes(64))
    assert ends(link._stream.connection)
    wait_until(lambda: node.peer_server.counts["cut_off_question"] == 1)
    link.close()


def test_who_reads_too_slowly_is_cut_off_and_its_lease_ends(tmp_path: Path) -> None:
    made = Node(key_file(tmp_path), slots=4096, deadline="300ms", bandwidth="1GB")
    chain = chain_of(2048)
    assert store_in(made.hierarchy, chain) == 2048
    link = linked(made, tmp_path / "key")
    link._stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(64):  # questions whose answers nobody reads: more than the kernel's buffers hold
        try:
            link.ask(wire.PeerVerb.LEND, chain.hashes[:1024], time.monotonic() + 1.0)
        except PeerFailed:
            break
    wait_until(lambda: made.peer_server.counts["cut_off_timeout"] == 1)
    wait_until(lambda: not made.peer_server.num_connections)
    assert made.hierarchy.host.pool.counts().leased == 0
    assert made.peer_server._in_flight == 0
    link.close()
    made.close()


def test_a_block_whose_bytes_changed_in_memory_is_not_lent(node: Node, key: Path) -> None:
    chain = chain_of(4)
    store_in(node.hierarchy, chain)
    with node.hierarchy.host.pool.lease(chain.hashes) as lease:
        node.hierarchy.host.region.slot(lease.slots[2])[0] ^= 1
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 4
        results = tier.read(chain.hashes, buffers(4))
        assert [isinstance(result, BlockRecord) for result in results[:2]] == [True, True]
        assert results[2:] == [Outcome.IO_ERROR] * 2
        # Its node has dropped it, so that nobody is told of it again.
        assert node.hierarchy.host.pool.holds(chain.hashes) == [True, True, False, True]
        assert node.peer_server.counts["cut_off_rotten"] == 1
        wait_until(lambda: tier.locate(chain.hashes) == 2)
        assert all(isinstance(result, BlockRecord) for result in tier.read(chain.hashes[:2], buffers(2)))


def test_what_is_lent_at_once_is_bounded(tmp_path: Path) -> None:
    made = Node(key_file(tmp_path), in_flight=4 * SLOT_BYTES, deadline="300ms")
    chain = chain_of(4)
    store_in(made.hierarchy, chain)
    with borrowing(tmp_path / "key", made.address) as tier:
        assert tier.locate(chain.hashes) == 4
        with made.peer_server._room(3 * SLOT_BYTES, time.monotonic() + 60) as has_room:  # somebody else's
            assert has_room
            assert tier.read(chain.hashes, buffers(4)) == [Outcome.EVICTED] * 4
            assert made.peer_server.counts["no_room"] == 1
        assert tier.locate(chain.hashes) == 4
        assert all(isinstance(result, BlockRecord) for result in tier.read(chain.hashes, buffers(4)))
    made.close()


def test_while_a_model_is_closed_nothing_of_it_is_sent(node: Node, key: Path) -> None:
    chain = chain_of(4)
    store_in(node.hierarchy, chain)
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 4
        node.model.close()
        assert tier.read(chain.hashes, buffers(4)) == [Outcome.EVICTED] * 4
        assert tier.locate(chain.hashes) == 0


# Settings


def test_without_a_key_nothing_is_lent_or_borrowed() -> None:
    for options in ({"listen": "127.0.0.1:0"}, {"nodes": ["127.0.0.1:1"]}):
        with pytest.raises(ConfigError, match=r"^\[peers\] .*: key_file is missing.*give it to all nodes$"):
            Config.load(peers=options)


def test_an_address_that_cannot_be_had_is_one_line(node: Node, key: Path) -> None:
    config = Config.load(peers={"listen": node.address, "key_file": str(key)}).peers
    with pytest.raises(ConfigError, match=r'^\[peers\] listen "127.0.0.1:\d+": Address already in use; choose'):
        peer_server.PeerServer(config)


def test_off_it_costs_nothing(home: Path, serve: Serve) -> None:
    daemon = serve()
    tiers = attach(home / "s")
    assert store(tiers, chain_of(2)) == 2
    (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
    assert (daemon.daemon.peer_server, namespace.lent, namespace.hierarchy.ports) == (None, None, [])
    own = ("kvtier-lend", "kvtier-peers")
    # another story's look may end meanwhile
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith(own)])
    tiers.close()


def test_a_tag_is_computed_once_for_a_block_in_its_slot(node: Node, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, tags = chain_of(4), list[int]()
    kept = LentModel.keep_tag

    def counted(model: LentModel, *args: Any) -> None:
        tags.append(1)
        kept(model, *args)

    monkeypatch.setattr(LentModel, "keep_tag", counted)
    store_in(node.hierarchy, chain)
    for expected in (4, 4):
        with borrowing(key, node.address) as tier:
            assert tier.locate(chain.hashes) == 4
            assert all(isinstance(result, BlockRecord) for result in tier.read(chain.hashes, buffers(4)))
        wait_until(lambda: not node.hierarchy.host.pool.counts().leased)
        assert len(tags) == expected
    # Other blocks take the slots: none of them has an older one's tag.
    wait_until(lambda: not node.hierarchy.host.pool.counts().leased)
    node.hierarchy.host.pool.evict(chain.hashes)
    others = chain_of(32, first_token=300)
    assert store_in(node.hierarchy, others) == 32
    with borrowing(key, node.address) as tier:
        assert tier.locate(others.hashes) == 32
        assert all(isinstance(result, BlockRecord) for result in tier.read(others.hashes, buffers(32)))
    wait_until(lambda: not node.hierarchy.host.pool.counts().leased)
    assert len(tags) == 36


def test_without_a_spare_thread_a_caller_is_sent_away(node: Node, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "kvtier-lend-to":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(PeerFailed):
            linked(node, key)
    assert node.peer_server.counts["not_accepted"] == 1
    wait_until(lambda: node.peer_server.num_connections == 0)  # counted until it is closed
    store_in(node.hierarchy, chain_of(2))
    link = linked(node, key)
    link.ask(wire.PeerVerb.HELD, chain_of(2).hashes, time.monotonic() + PATIENCE)
    assert link.read_held(2, time.monotonic() + PATIENCE) == [True, True]
    link.close()


def test_a_thousand_strangers_leave_no_file_and_no_thread(node: Node) -> None:
    host, _, port = node.address.rpartition(":")
    before = (len(list(Path("/proc/self/fd").iterdir())), threading.active_count())
    for i in range(1000):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as stranger:
            stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", bytes(wire.HELLO_BYTES))[i % 3])
    counts = node.peer_server.counts
    wait_until(lambda: sum(counts.values()) == 1000 and node.peer_server.num_connections == 0)
    assert {reason.partition("_")[0] for reason in counts} <= {"stranger", "too"}, counts
    wait_until(lambda: (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) <= before)


def test_there_is_a_place_for_a_whole_fleet(node: Node, key: Path) -> None:
    # As many nodes as a lender's names may stand for, with as many connections as each keeps for two models.
    links = [linked(node, key) for _ in range(MAX_PEERS * MAX_READY * 2)]
    wait_until(lambda: node.peer_server.counts == {"welcomed": len(links)})
    for link in links:
        link.close()
    wait_until(lambda: not node.peer_server.num_connections)


def test_a_model_that_was_closed_is_forgotten(node: Node) -> None:
    # A daemon opens and closes models as long as it runs.
    first = node.model
    other = hierarchy_of(4)
    again = node.peer_server.lend(other, FINGERPRINT, Sizes())
    first.close()  # the one before, after the model is lent anew
    assert list(node.peer_server._models.values()) == [again]
    again.close()
    assert not node.peer_server._models
    other.close()

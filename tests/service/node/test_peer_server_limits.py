"""A daemon that lends has no thread left, is closed while somebody calls, and closes models: nothing is left behind."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, hierarchy_of, store, wait_until
from peers_rig import FINGERPRINT, PATIENCE, Node, Sizes, key_file

from kvtier.tiers.peers import wire
from kvtier.tiers.peers.link import PeerLink
from kvtier.tiers.peers.peer import MAX_PEERS, MAX_READY
from kvtier.tiers.peers.stream import PeerFailed


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture
def node(key: Path) -> Iterator[Node]:
    made = Node(key)
    yield made
    made.close()


def link_to(node: Node, key: Path) -> PeerLink:
    host, _, port = node.address.rpartition(":")
    blocks = wire.LentBlocks(FINGERPRINT, SLOT_BYTES, BLOCK_SIZE)
    return PeerLink.opened((host, int(port)), wire.shared_key(key), blocks, PATIENCE)


def test_without_a_thread_to_spare_a_caller_is_sent_away_and_the_next_is_served(
    node: Node, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "kvtier-lend-to":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(PeerFailed):
            link_to(node, key)
    assert node.peer_server.counts["not_accepted"] == 1
    wait_until(lambda: node.peer_server.num_connections == 0)  # counted until it is closed
    store(node.hierarchy, chain_of(2))
    link = link_to(node, key)
    link.ask(wire.PeerVerb.HELD, chain_of(2).hashes, time.monotonic() + PATIENCE)
    assert link.hear_held(2, time.monotonic() + PATIENCE) == [True, True]
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
    links = [link_to(node, key) for _ in range(MAX_PEERS * MAX_READY * 2)]
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

"""Many peers that hang at once, and an address that becomes this process's own: no batch takes longer for them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from doubles import SLOT_BYTES, chain_of, payload_of, record_of, store
from peers_rig import Node, Script, ScriptedPeer, block, borrowing, buffers, key_file, peers_config, says_held

from kvtier.tiers.breaker import Breaker
from kvtier.tiers.peers import store as tiers_store
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.link import IsMyself, PeerLink
from kvtier.tiers.peers.opening import examine
from kvtier.tiers.peers.peer import OtherNode
from kvtier.tiers.peers.stream import PeerFailed
from kvtier.tiers.shared.stream import ByteStream
from kvtier.tiers.tier import BlockRecord, Outcome


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the story is over: so long hangs who hangs."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def peer_of(key: Path) -> Iterator[Callable[[Script], ScriptedPeer]]:
    peers: list[ScriptedPeer] = []

    def make(script: Script) -> ScriptedPeer:
        peers.append(ScriptedPeer(key, script))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_peers_that_all_begin_to_answer_and_stop_cost_one_deadline(
    key: Path, peer_of: Callable[[Script], ScriptedPeer], over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_store, "_HELD_TIME", 1.0)

    def begins(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        connection.sendall(session.answer(verb, len(names), b"\1" * len(names))[:1])
        over.wait(60.0)

    peers = [peer_of(begins) for _ in range(40)]
    with borrowing(key, *(peer.address for peer in peers), deadline="1s") as tier:
        began = time.monotonic()
        assert tier.locate(chain_of(4).hashes) is Outcome.TIMEOUT
        assert time.monotonic() - began < 10.0  # each would have had that second of its own
        assert tier.stats()["failed_timeout"] == 40


def test_peers_that_hang_when_asked_for_new_connections_cost_one_deadline(
    key: Path, peer_of: Callable[[Script], ScriptedPeer], over: threading.Event
) -> None:
    chain = chain_of(12)

    def has(block: int) -> Script:
        def script(
            connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]
        ) -> None:
            connection.sendall(session.answer(verb, len(names), bytes(name == chain.hashes[block] for name in names)))

        return script

    peers = [peer_of(has(block)) for block in range(12)]
    with borrowing(key, *(peer.address for peer in peers), deadline="1s", connect_timeout="10s") as tier:
        assert tier.locate(chain.hashes) == 12
        for peer in peers:
            peer.hangs = over
        in_use = [each.connection(time.monotonic() + 60.0) for each in tier._peers.values()]  # as by another thread
        began = time.monotonic()
        results = tier.read(chain.hashes, buffers(12))
        assert time.monotonic() - began < 5.0  # not ten seconds for each
        assert set(results) == {Outcome.TIMEOUT}
        for link in in_use:
            link.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on loopback")
def test_an_address_of_ipv6_is_said_as_it_is_written(key: Path) -> None:
    node, chain = Node(key, address="[::1]:0"), chain_of(2)
    assert node.address.startswith("[::1]:")
    store(node.hierarchy, chain)
    with borrowing(key, node.address) as tier:
        assert tier.locate(chain.hashes) == 2
    (finding,) = examine(peers_config(key, node.address))
    assert finding.check == f"peer {node.address}"
    node.close()


def test_a_batch_may_have_months(key: Path) -> None:
    # `bandwidth` is a byte a second at the least.
    chain, nodes = chain_of(512), [Node(key, slots=600), Node(key, slots=600)]
    assert store(nodes[0].hierarchy, chain, 0, 256) == store(nodes[1].hierarchy, chain, 256, 512) == 256
    with borrowing(key, *(node.address for node in nodes), bandwidth=1) as tier:
        names = chain.hashes * 2
        assert tier._seconds(len(names)) > 2**31 / 1000
        assert tier.locate(chain.hashes) == 512
        assert all(isinstance(result, BlockRecord) for result in tier.read(names, buffers(len(names))))
    for node in nodes:
        node.close()


def test_an_address_that_becomes_this_processs_own_is_a_failure_and_no_exception() -> None:
    def connect(address: tuple[str, int], seconds: float) -> PeerLink:
        raise IsMyself

    node = OtherNode(("127.0.0.1", 1), connect, Breaker(5, 1.0, time.monotonic))
    with pytest.raises(PeerFailed):
        node.connection(time.monotonic() + 60.0)
    node.tend()
    assert node.is_myself
    assert not node.counts


def test_what_is_asked_again_and_again_takes_no_more_files(key: Path) -> None:
    def garbage(connection: socket.socket, *_: object) -> None:
        connection.sendall(b"\0" * 3000)

    peer = ScriptedPeer(key, garbage)
    before = open_files()
    with borrowing(key, peer.address, failures=1000, retry_after="1ms") as tier:
        for _ in range(100):
            tier.locate(chain_of(2).hashes)
            for each in tier._peers.values():
                each.tend()
        assert tier.stats()["failed_mac"] >= 50
    peer.close()
    node = Node(key)
    for _ in range(50):
        with borrowing(key, node.address):
            pass
    node.close()
    deadline = time.monotonic() + 20.0
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before


def test_the_doctor_asks_peers_that_hang_at_once_and_names_those_without_address(key: Path) -> None:
    hung = [socket.create_server(("127.0.0.1", 0)) for _ in range(16)]
    nodes = [f"127.0.0.1:{each.getsockname()[1]}" for each in hung]
    began = time.monotonic()
    findings = examine(peers_config(key, "no-such-node.invalid:1", *nodes))
    assert time.monotonic() - began < 20.0  # not two seconds for each
    assert {(each.check, each.found) for each in findings} == {
        ("peer no-such-node.invalid:1", "no address"),
        *((f"peer {node}", "no good answer: timeout") for node in nodes),
    }
    for each in hung:
        each.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def garbage(peer: socket.socket, over: threading.Event) -> None:
    peer.sendall(b"\xff" * 3 * SLOT_BYTES)


def silence(peer: socket.socket, over: threading.Event) -> None:
    over.wait(60.0)


def an_end(peer: socket.socket, over: threading.Event) -> None:
    peer.shutdown(socket.SHUT_RDWR)


def a_byte_at_a_time(peer: socket.socket, over: threading.Event) -> None:
    with suppress(OSError):
        while not over.wait(0.01):
            peer.sendall(b"\0")


@pytest.mark.parametrize("is_plain", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize(
    ("then", "outcome", "reason"),
    [
        (garbage, Outcome.CHECKSUM, "mac"),
        (silence, Outcome.TIMEOUT, "timeout"),
        (an_end, Outcome.IO_ERROR, "hung_up"),
        (a_byte_at_a_time, Outcome.TIMEOUT, "timeout"),
    ],
)
def test_a_peer_that_stops_amid_a_block_costs_that_one_and_those_behind_it(
    key: Path,
    peer_of: Callable[[Script], ScriptedPeer],
    over: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    is_plain: bool,
    then: Callable[[socket.socket, threading.Event], None],
    outcome: Outcome,
    reason: str,
) -> None:
    """What came whole is served; once the read has returned nothing is written into its slots."""
    monkeypatch.setattr(ByteStream, "is_plain", is_plain)
    chain = chain_of(3)

    def lends(peer: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        if verb is wire.PeerVerb.HELD:
            says_held(peer, session, names)
            return
        whole = [block(session, record_of(chain, i), payload_of(name)) for i, name in enumerate(names)]
        peer.sendall(session.answer(verb, len(names)) + whole[0] + whole[1][: session.head_bytes + SLOT_BYTES // 2])
        then(peer, over)

    with borrowing(key, peer_of(lends).address, deadline="500ms") as tier:
        assert tier.locate(chain.hashes) == 3
        into = buffers(3)
        first, *others = tier.read(chain.hashes, into)
        assert first == record_of(chain, 0)
        assert bytes(into[0]) == payload_of(chain.hashes[0])
        assert others == [outcome] * 2
        assert tier.stats()[f"failed_{reason}"] == 1
        after = [bytes(each) for each in into]
        time.sleep(0.1)
        assert [bytes(each) for each in into] == after

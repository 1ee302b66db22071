"""Blocks read from another node's memory by NIXL, over UCX's transports of one machine: shared memory and TCP."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from doubles import chain_of, payload_of, store, wait_until
from peers_rig import Fleet, Node, ScriptedPeer, block, borrowing, buffers, record, says_held
from service_rig import attach, load
from service_rig import store as store_by

from kvtier.service.node import peer_server
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.one_sided import METADATA_BYTES, RemoteMemory
from kvtier.tiers.peers.store import PeersStore
from kvtier.tiers.peers.stream import PeerFailed
from kvtier.tiers.tier import BlockRecord, Outcome


@pytest.fixture
def node(key: Path) -> Iterator[Node]:
    node = Node(key, transport="nixl")
    wait_until(lambda: node.model.memory() is not None)
    yield node
    node.close()


def reads_memory(tier: PeersStore) -> bool:
    """Whether its next read goes by NIXL."""
    return any(link.reads_memory for peer in tier._peers.values() for link in peer._ready)


def test_blocks_are_read_from_the_other_nodes_memory(key: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server._Loan, "send", None)  # nothing is sent over the connection
    chain = chain_of(6)
    store(node.hierarchy, chain)
    with borrowing(key, node.address, transport="nixl") as tier:
        assert reads_memory(tier)
        for _ in range(2):
            into = buffers(6)
            assert tier.locate(chain.hashes) == 6
            assert tier.read(chain.hashes, into) == [record(chain, i) for i in range(6)]
            assert [bytes(each) for each in into] == [payload_of(name) for name in chain.hashes]
        # One that left meanwhile is a miss, and the connection stays good.
        node.hierarchy.host.pool.evict(chain.hashes[2:])
        found = tier.read(chain.hashes, buffers(6))
        assert found[:2] == [record(chain, i) for i in range(2)]
        assert found[2:] == [Outcome.EVICTED] * 4
        assert tier.stats().get("failed_nixl", 0) == 0
    wait_until(lambda: node.hierarchy.host.pool.counts().leased == 0)
    assert node.peer_server.counts["blocks"] == 14


def test_a_block_that_changed_in_memory_is_a_miss_and_leaves_its_node(key: Path, node: Node) -> None:
    chain = chain_of(3)
    store(node.hierarchy, chain)
    with borrowing(key, node.address, transport="nixl") as tier:
        assert tier.locate(chain.hashes) == 3
        assert tier.read(chain.hashes[:2], buffers(2)) == [record(chain, 0), record(chain, 1)]  # they have tags now
        slot = node.hierarchy.host.pool.places(chain.hashes)[1]
        node.hierarchy.host.region.slot(slot)[7] ^= 1
        found = tier.read(chain.hashes, buffers(3))
        assert found == [record(chain, 0), Outcome.CHECKSUM, Outcome.CHECKSUM]
        assert tier.stats()["failed_mac"] == 1
        wait_until(lambda: node.hierarchy.host.pool.holds(chain.hashes) == [True, False, True])


def test_a_node_that_offers_no_memory_sends_blocks_all_the_same(key: Path) -> None:
    chain = chain_of(2)
    store((plain := Node(key)).hierarchy, chain)
    with borrowing(key, plain.address, transport="nixl") as tier:
        assert tier.locate(chain.hashes) == 2
        assert tier.read(chain.hashes, buffers(2)) == [record(chain, 0), record(chain, 1)]
        assert not reads_memory(tier)
    plain.close()


def test_a_node_of_a_release_without_it_sends_blocks_all_the_same(key: Path) -> None:
    chain = chain_of(1)

    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        if verb is wire.PeerVerb.MEMORY:
            raise wire.ProtocolError("question")
        if verb is wire.PeerVerb.HELD:
            says_held(connection, session, names)
        else:
            connection.sendall(session.answer(verb, 1) + block(session, record(chain, 0), payload_of(names[0])))

    peer = ScriptedPeer(key, script)
    with borrowing(key, peer.address, transport="nixl") as tier:
        assert tier.locate(chain.hashes) == 1
        assert tier.read(chain.hashes, buffers(1)) == [record(chain, 0)]
    peer.close()


@pytest.mark.parametrize("lie", ["another place", "metadata", "half a table"])
def test_a_lying_peer_is_a_miss_with_a_reason(key: Path, lie: str) -> None:
    chain = chain_of(2)
    memory = RemoteMemory()
    there = memoryview(bytearray(payload_of(chain.hashes[0]) + payload_of(chain.hashes[1])))
    memory.register(there)
    start = memoryview(there).cast("B")

    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        metadata = b"no metadata" if lie == "metadata" else memory.metadata
        if verb is wire.PeerVerb.MEMORY:
            connection.sendall(session.answer(verb, len(metadata), metadata.ljust(METADATA_BYTES, b"\0")))
        elif verb is wire.PeerVerb.HELD:
            says_held(connection, session, names)
        elif verb is wire.PeerVerb.LEND:
            connection.sendall(session.answer(verb, 0))
        elif verb is wire.PeerVerb.PLACES:
            (told, payload) = record(chain, 0), memoryview(payload_of(chain.hashes[0]))
            head = session.pack_head(told)
            place = head + wire.ADDRESS.pack(address_of(start) + len(payload)) + session.tag(head, payload)
            connection.sendall(session.answer(verb, 1) + (place[:40] if lie == "half a table" else place))
            if lie == "half a table":
                connection.shutdown(socket.SHUT_RDWR)

    peer = ScriptedPeer(key, script)
    with borrowing(key, peer.address, transport="nixl", retry_after="100s") as tier:
        assert tier.locate(chain.hashes[:1]) == 1
        [found] = tier.read(chain.hashes[:1], buffers(1))
        expected = {"another place": Outcome.CHECKSUM, "metadata": Outcome.EVICTED, "half a table": Outcome.IO_ERROR}
        assert found is expected[lie]
    peer.close()
    memory.close()


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_daemons_read_one_anothers_memory_and_one_that_is_killed_is_a_miss(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(2, peers__transport="nixl"), chain_of(8)
    first, second = (attach(path) for path in fleet.sockets)
    assert store_by(first, chain) == 8
    wait_until(lambda: load(second, chain) == 8)
    wait_until(lambda: fleet.status(0)["lent"].get("blocks") == 8)
    fleet.daemons[0].process.kill()
    fleet.daemons[0].process.wait(60)
    first.close()
    assert second.locate(chain.hashes, 60.0) == Attribution(8, l2=8)
    assert second.locate(chain_of(4, first_token=900).hashes, 60.0) == Attribution(4, miss=4)
    second.close()
    assert fleet.daemons[1].end(signal.SIGTERM) == 0


LENDER = """
import sys
import numpy as np
from kvtier.tiers.peers.one_sided import RemoteMemory
memory, blocks = RemoteMemory(), memoryview(bytearray(b"7" * (8 << 20)))
memory.register(blocks)
print(memory.metadata.hex(), np.frombuffer(blocks, np.uint8).ctypes.data, flush=True)
sys.stdin.read()
"""


@contextmanager
def lending() -> Iterator[tuple[subprocess.Popen[str], bytes, int]]:
    """A process that offers 8 MiB of sevens: itself, its metadata and the address."""
    with subprocess.Popen([sys.executable, "-c", LENDER], stdin=PIPE, stdout=PIPE, text=True) as lender:
        assert lender.stdout is not None
        metadata, address = lender.stdout.readline().split()
        try:
            yield lender, bytes.fromhex(metadata), int(address)
        finally:
            lender.kill()


@pytest.mark.parametrize("transports", ["all", "tcp,self"])
def test_a_read_from_a_process_that_is_killed_fails(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    memory, into = RemoteMemory(), memoryview(bytearray(8 << 20))
    with lending() as (lender, metadata, address):
        peer = memory.connect(metadata)

        def read() -> None:
            memory.read(peer, [address], [into], time.monotonic() + 5.0)

        read()
        assert bytes(into) == b"7" * len(into)
        lender.kill()
        lender.wait(60)
        with pytest.raises(PeerFailed) as failed:
            read()
    assert failed.value.reason in ("nixl", "timeout")
    memory.disconnect(peer)
    memory.close()


def test_bytes_that_come_after_the_deadline_reach_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX goes on with a transfer that was given up."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    memory = RemoteMemory()
    with lending() as (lender, metadata, address):
        peer = memory.connect(metadata)
        into = memoryview(bytearray(8 << 20))
        memory.read(peer, [address], [into], time.monotonic() + 60.0)
        into[:] = bytes(len(into))
        lender.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerFailed, match="timeout"):
            memory.read(peer, [address], [into], time.monotonic() + 0.05)
        lender.send_signal(signal.SIGCONT)
        # The late transfer ends, and its buffer is used again.
        wait_until(lambda: [*map(memory._agent.check_xfer_state, [late[0] for late in memory._late])] == ["DONE"])
        assert bytes(into) == bytes(len(into))
        memory.read(peer, [address], [into], time.monotonic() + 60.0)
        assert (bytes(into), memory._late, memory._num_lost) == (b"7" * len(into), [], 0)
        # One whose state NIXL cannot tell costs its buffer, and no later read.
        state_of = memory._agent.check_xfer_state

        def unsure(handle: Any) -> Any:
            if handle is None:
                raise RuntimeError("unknown")
            return state_of(handle)

        monkeypatch.setattr(memory._agent, "check_xfer_state", unsure)
        memory._late.append((None, memoryview(bytearray(1))))
        memory.read(peer, [address], [into], time.monotonic() + 60.0)
        assert (memory._late, memory._num_lost) == ([], 1)
        # Of a process that stays silent some buffers are lost, not more and more.
        lender.send_signal(signal.SIGSTOP)
        for expected in [*["timeout"] * 7, "nixl", "nixl"]:
            with pytest.raises(PeerFailed, match=expected):
                memory.read(peer, [address], [into], time.monotonic() + 0.01)
    memory.close()


def test_a_node_whose_memory_does_not_answer_is_read_over_tcp(
    key: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(2)
    store(node.hierarchy, chain)

    def late(*_: object) -> None:
        raise PeerFailed(Outcome.TIMEOUT, "timeout")

    with borrowing(key, node.address, transport="nixl") as tier:
        assert tier.locate(chain.hashes) == 2
        monkeypatch.setattr(RemoteMemory, "read", late)
        assert tier.read(chain.hashes, buffers(2)) == [Outcome.TIMEOUT] * 2
        wait_until(lambda: tier.locate(chain.hashes) == 2)
        assert tier.read(chain.hashes, buffers(2)) == [record(chain, 0), record(chain, 1)]
        assert not reads_memory(tier)


def test_another_versions_metadata_and_wild_addresses_are_not_given_to_nixl() -> None:
    memory = RemoteMemory()
    with lending() as (_, metadata, _address):
        with pytest.raises(PeerFailed, match="nixl"):
            memory.connect(b"nixl 0.0.1\0" + metadata.partition(b"\0")[2])
        peer = memory.connect(metadata)
        with pytest.raises(PeerFailed, match="garbage"):
            memory.read(peer, [2**64 - 1], buffers(1), time.monotonic() + 60.0)
    memory.close()


def test_after_the_end_nothing_is_read_and_nothing_breaks(key: Path, node: Node) -> None:
    chain = chain_of(1)
    store(node.hierarchy, chain)
    with borrowing(key, node.address, transport="nixl") as tier:
        [peer] = tier._peers.values()
        link = peer.connection(time.monotonic() + 60.0)
        tier.close()
        peer.put_back(link)
    memory = RemoteMemory()
    memory.close()
    memory.close()
    memory.disconnect("anybody")
    for call in (lambda: memory.metadata, lambda: memory.connect(b""), lambda: memory.register(buffers(1)[0])):
        with pytest.raises(PeerFailed, match=r"closed|nixl"):
            call()


def test_a_forked_child_leaves_the_agent_to_its_parent() -> None:
    program = """
import os
from kvtier.tiers.peers.one_sided import RemoteMemory
memory, part = RemoteMemory(), memoryview(bytearray(1 << 20))
memory.register(part)
if not (child := os.fork()):
    memory.close()
    del memory
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
memory.close()
print("whole")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["whole"]), ended.stderr


def test_a_model_that_is_closed_takes_its_memory_along(key: Path, node: Node) -> None:
    chain = chain_of(2)
    store(node.hierarchy, chain)
    with borrowing(key, node.address, transport="nixl") as tier:
        assert tier.locate(chain.hashes) == 2
        assert tier.read(chain.hashes, buffers(2)) == [record(chain, 0), record(chain, 1)]
        node.model.close()
        assert not any(isinstance(each, BlockRecord) for each in tier.read(chain.hashes, buffers(2)))


def test_without_nixl_one_line_says_what_to_install(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    for start in (lambda: Node(key, transport="nixl"), lambda: borrowing(key, transport="nixl").__enter__()):
        with pytest.raises(ConfigError, match=r'\[peers\] transport "nixl": needs NIXL; pip install nixl-cu12'):
            start()

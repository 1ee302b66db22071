"""What the stories of node to node share: a key, a node that lends out of a hierarchy, a peer that follows a script."""

import json
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from doubles import BLOCK_SIZE, SLOT_BYTES, hierarchy_of, payload_of, store, wait_until
from node_rig import event_ports, free_port
from service_rig import DaemonProcess, end_child

from kvtier.service.events.publisher import Publisher
from kvtier.service.node.peer_server import PeerFeeds, PeerServer
from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.hierarchy import EventSource, Hierarchy
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.following import FEEDS
from kvtier.tiers.peers.link import EventsAt
from kvtier.tiers.peers.store import PeersStore
from kvtier.tiers.tier import BlockRecord, Outcome

FINGERPRINT = b"a model of the peers' stories".ljust(32, b".")
PATIENCE = 60.0
PATIENT: Mapping[str, str] = {"connect_timeout": "20s", "deadline": "20s"}


class Sizes:
    """The blocks of the stories."""

    block_size = BLOCK_SIZE
    block_bytes = SLOT_BYTES


def key_file(directory: Path, name: str = "key") -> Path:
    """A key of its own in a file that nobody else may read."""
    path = directory / name
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return path


def peers_config(key: Path, *nodes: str, listen: str | None = None, **options: Any) -> Config:
    peers: dict[str, Any] = {**PATIENT, "key_file": key, "nodes": nodes, **options}
    if listen is not None:
        peers["listen"] = listen
    return Config.model_validate({"peers": peers})


class Node:
    """A hierarchy whose L2 is lent, in this process, as a daemon does it."""

    def __init__(self, key: Path, *, slots: int = 32, address: str = "127.0.0.1:0", **options: Any) -> None:
        self.hierarchy: Hierarchy = hierarchy_of(slots)
        config = peers_config(key, listen=address, **options).peers
        self.peer_server = PeerServer(config, node=os.urandom(wire.NODE_BYTES))
        self.model = self.peer_server.lend(self.hierarchy, FINGERPRINT, Sizes())

    @property
    def address(self) -> str:
        return self.peer_server.address

    def close(self) -> None:
        self.peer_server.check()
        self.peer_server.close()
        self.model.close()
        self.hierarchy.check()
        self.hierarchy.close()


@contextmanager
def borrowing(
    key: Path, *nodes: str, answering: int | None = None, listen: str | None = None, **options: Any
) -> Iterator[PeersStore]:
    """A tier over these nodes, once `answering` of them, or all, answer."""
    breaker = {"failures": options.pop("failures", 5), "retry_after": options.pop("retry_after", "1s")}
    config = peers_config(key, *nodes, listen=listen, **options).model_copy(
        update={"breaker": Config.model_validate({"breaker": breaker}).breaker}
    )
    store = PeersStore.open(config, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE)
    try:
        wanted = len(nodes) if answering is None else answering
        wait_until(lambda: store.stats()["answering"] >= wanted)
        yield store
        store.check()
    finally:
        store.close()


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SLOT_BYTES)) for _ in range(count)]


def read(tier: PeersStore, chain: TokenChain, first: int = 0, last: int | None = None) -> list[Outcome]:
    """Read blocks; what came has its name's bytes."""
    names = chain.hashes[first:last]
    into = buffers(len(names))
    results = tier.read(names, into)
    for name, result, buffer in zip(names, results, into, strict=True):
        if isinstance(result, BlockRecord):
            assert (result.chain_hash, bytes(buffer)) == (name, payload_of(name))
    return [Outcome.OK if isinstance(result, BlockRecord) else result for result in results]


def record(chain: TokenChain, i: int) -> BlockRecord:
    name = chain.hashes[i]
    return BlockRecord(name, chain.parent(i), chain.block_tokens(i), checksum(memoryview(payload_of(name))))


Script = Callable[[socket.socket, wire.PeerSession, wire.PeerVerb, list[bytes]], None]
"""Answers one question, or does what no node should do."""


class ScriptedPeer:
    """A peer with the key that welcomes everybody and then follows a script."""

    def __init__(self, key: Path, script: Script) -> None:
        self._key = wire.shared_key(key)
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_welcomed = 0
        self.hangs: threading.Event | None = None  # new connections get nothing until it is set
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        challenge = os.urandom(wire.NONCE_BYTES)
        if self.hangs is not None:
            self.hangs.wait(PATIENCE)
        try:
            connection.sendall(wire.pack_challenge(challenge))
            session, _ = wire.PeerSession.accept(self._key, challenge, _receive(connection, wire.HELLO_BYTES))
            connection.sendall(session.welcome(wire.Greeting.WELCOME, b"n" * wire.NODE_BYTES))
            self.num_welcomed += 1
            while True:
                words = _receive(connection, wire.WORDS_BYTES)
                verb, names = session.read_question(words, _receive(connection, session.question_bytes(words)))
                self._script(connection, session, verb, names)
        except (OSError, EOFError, wire.ProtocolError):
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := connection.recv(count - len(data))):
            raise EOFError
        data += piece
    return data


def says_held(connection: socket.socket, session: wire.PeerSession, names: list[bytes]) -> None:
    """It has all of them."""
    connection.sendall(session.answer(wire.PeerVerb.HELD, len(names), b"\1" * len(names)))


def block(session: wire.PeerSession, told: BlockRecord, payload: bytes) -> bytes:
    """A block as an honest node sends it."""
    head = session.pack_head(told)
    return head + payload + session.tag(head, memoryview(payload))


class Fleet:
    """Daemons that know one another."""

    def __init__(self, home: Path, key: Path, count: int, *, tell: bool = False, **options: str) -> None:
        """With `tell` each publishes its KV events."""
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.sockets = [home / f"{i}" for i in range(count)]
        self.key = key
        self._options, self._tell = options, tell
        self.daemons = [self.start(i) for i in range(count)]

    def start(self, number: int, **options: str) -> DaemonProcess:
        """The daemon of that number. Its own address is among the nodes, as behind one name for all."""
        given = {"host__size": "1MiB", "peers__connect_timeout": "20s", "peers__deadline": "20s", **self._options}
        peers = {"listen": self.addresses[number], "nodes": " ".join(self.addresses), "key_file": str(self.key)}
        given |= {f"peers__{name}": value for name, value in peers.items()}
        given |= (self.tells() if self._tell else {}) | options
        return DaemonProcess(self.sockets[number], **given)

    @staticmethod
    def tells() -> dict[str, str]:
        """Options with which other nodes can follow a daemon's KV events."""
        publish, replay = event_ports().values()
        events = {"publish": publish, "replay": replay, "allow_remote": "true"}
        return {f"events__{name}": value for name, value in events.items()}

    def status(self, number: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.daemons[number].http}/status", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def peers(self, number: int) -> dict[str, Any]:
        """What its status says of the tier in other nodes' memory; of one model."""
        (model,) = self.status(number)["models"]
        found: dict[str, Any] = model["tiers"]["peers"]
        return found

    def metrics(self, number: int) -> str:
        with urllib.request.urlopen(f"http://{self.daemons[number].http}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def close(self) -> None:
        for daemon in self.daemons:
            end_child(daemon.process)


class TellingNode(Node):
    """A node whose KV events tell what it holds, once the story says so: `tell`."""

    def __init__(
        self, key: Path, chain: TokenChain, *, events: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Chains begin where `chain` does."""
        super().__init__(key, **options)
        ports = event_ports()
        self.publisher = Publisher(EventsConfig.model_validate({**ports, **(events or {})}), has_peers=True)
        self.feed = self.publisher.feed(FINGERPRINT, EventSource(self.hierarchy))
        self.feed.begin_at(chain.root)
        at = EventsAt.bound(self.publisher.endpoint, self.publisher.replay_endpoint)
        self.model.events = lambda: replace(at, tells_all=self.feed.tells_all)

    def tell(self, chain: TokenChain | None = None, first: int = 0, last: int | None = None) -> None:
        """Store blocks of a chain, if one is given, and publish what changed since the last time."""
        if chain is not None:
            assert store(self.hierarchy, chain, first, last) == len(chain.hashes[first:last])
        wait_until(lambda: self.hierarchy.drain(PATIENCE))
        while self.feed.pump():
            continue
        assert self.publisher.flush(PATIENCE)

    def close(self) -> None:
        self.publisher.close()
        super().close()


@contextmanager
def following(key: Path, *nodes: str, keys: EventsConfig | None = None, **options: Any) -> Iterator[PeersStore]:
    """As `borrowing`, in a process that can follow KV events, as a daemon."""
    FEEDS.open = PeerFeeds(keys or EventsConfig()).open
    try:
        with borrowing(key, *nodes, **options) as store:
            yield store
    finally:
        FEEDS.open = None

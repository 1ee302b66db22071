"""What the stories of node to node share: a key, a node that lends out of a hierarchy, a peer that follows a script."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from doubles import BLOCK_SIZE, SLOT_BYTES, hierarchy_of, payload_of, wait_until

from kvtier.service.node.lending import Lender
from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.store import PeersStore
from kvtier.tiers.tier import BlockRecord

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
        self.lender = Lender(config, node=os.urandom(wire.NODE_BYTES))
        self.model = self.lender.lend(self.hierarchy, FINGERPRINT, Sizes())

    @property
    def address(self) -> str:
        return self.lender.address

    def close(self) -> None:
        self.lender.check()
        self.lender.close()
        self.model.close()
        self.hierarchy.check()
        self.hierarchy.close()


@contextmanager
def borrowing(key: Path, *nodes: str, answering: int | None = None, **options: Any) -> Iterator[PeersStore]:
    """A tier over these nodes, once `answering` of them, or all, answer."""
    breaker = {"failures": options.pop("failures", 5), "retry_after": options.pop("retry_after", "1s")}
    config = peers_config(key, *nodes, listen=None, **options).model_copy(
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
            session, _ = wire.PeerSession.heard(self._key, challenge, _receive(connection, wire.HELLO_BYTES))
            connection.sendall(session.welcome(wire.Greeting.WELCOME, b"n" * wire.NODE_BYTES))
            self.num_welcomed += 1
            while True:
                words = _receive(connection, wire.WORDS_BYTES)
                verb, names = session.read_question(words, _receive(connection, session.question_bytes(words)))
                self._script(connection, session, verb, names)
        except (OSError, EOFError, wire.WrongWords):
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

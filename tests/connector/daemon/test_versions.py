"""A daemon and an engine of different releases: they speak the lower version, or one line says what to upgrade."""

import logging
import socket as sockets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, wait_until
from service_rig import FINGERPRINT, PATIENCE, DaemonThread, attach, load, store

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.link import join
from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.host.host import HostRegion


def bodies_of(connection: sockets.socket) -> list[memoryview]:
    """The next frames."""
    reader = wire.FrameReader(wire.MAX_FRAME)
    while not (bodies := reader.feed(data := connection.recv(1 << 16))):
        assert data, "it hung up"
    return bodies


class OlderDaemon:
    """Speaks one version of the protocol, and refuses others in a frame of its own, as every release does."""

    def __init__(self, path: Path, version: int) -> None:
        self.region = HostRegion.allocate(8, SLOT_BYTES, shared=True, prefault=False)
        self.heard: list[int] = []
        self._version = version
        self._open: list[sockets.socket] = []
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            (body,) = bodies_of(connection)
            parts = msgpack.unpackb(body)
            self.heard.append(parts[1])
            if parts[1] != self._version:
                why = f"protocol version {parts[1]}, this side speaks {self._version}: run one kvtier on both sides"
                connection.sendall(wire.pack_frame(["kvtier", self._version, "Refused", why]))
                connection.close()
                continue
            said = wire.unpack_handshake(body)
            if isinstance(said, wire.Join):
                connection.sendall(wire.pack_handshake(wire.Joined(), self._version))
                connection.close()
                continue
            assert len(parts) == 3 + 6
            welcome = wire.Welcome(b"c" * 16, b"i" * 16, 8, SLOT_BYTES, 0, False, 60.0)
            assert self.region.fd is not None
            sockets.send_fds(connection, [wire.pack_handshake(welcome, self._version)], [self.region.fd])
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: sockets.socket) -> None:
        """Every lookup as release 0.1 answers it: four tiers."""
        try:
            while True:
                for request, operations in map(msgpack.unpackb, bodies_of(connection)):
                    if operations[0][0] == 10:
                        connection.sendall(wire.pack_frame([request, 0, [[4, 0, 1, 1, 1, 1]], []]))
        except (OSError, AssertionError):
            return

    def close(self) -> None:
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()
        self.region.close()


@pytest.fixture
def older(path: Path) -> Iterator[Callable[[int], OlderDaemon]]:
    daemons: list[OlderDaemon] = []

    def start(version: int) -> OlderDaemon:
        daemons.append(OlderDaemon(path, version))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


def test_an_engine_speaks_as_an_older_daemon_does(
    path: Path, older: Callable[[int], OlderDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = older(wire.OLDEST)
    with caplog.at_level(logging.WARNING):
        tiers = attach(path, kv_probe=b"what its model computes")
    assert daemon.heard == [wire.VERSION, wire.OLDEST]
    assert tiers.member is not None
    assert [f"a daemon of kvtier {wire.RELEASES[wire.OLDEST]}; upgrade it" in line for line in caplog.messages] == [
        True
    ]
    assert tiers.locate(chain_of(4).hashes, PATIENCE) == Attribution(4, l2=1, file=1, redis=1, miss=1)
    join(path, b"c" * 16)  # a worker of it does the same
    assert daemon.heard[2:] == [wire.VERSION, wire.OLDEST]
    tiers.close(0.1)


def test_a_client_that_needs_a_later_daemon_runs_without_one(
    path: Path, older: Callable[[int], OlderDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    older(wire.OLDEST)
    hello = wire.Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 8 * SLOT_BYTES, reset=False, lossy="fp8")
    with caplog.at_level(logging.WARNING):
        tiers = RemoteTiers(path, hello, patience=PATIENCE)
    assert tiers.member is None
    assert "[cache] lossy: a daemon before kvtier 0.2 does not know it; upgrade the daemon" in caplog.text
    tiers.close(0.1)


@pytest.mark.parametrize(("version", "which"), [(wire.OLDEST - 1, "the other side"), (wire.VERSION + 1, "this side")])
def test_versions_too_far_apart_are_one_line_and_the_engine_starts(
    path: Path, older: Callable[[int], OlderDaemon], caplog: pytest.LogCaptureFixture, version: int, which: str
) -> None:
    older(version)
    with caplog.at_level(logging.WARNING):
        tiers = attach(path)
    assert tiers.member is None
    (line,) = caplog.messages
    assert f"protocol version {version}, this side speaks {wire.OLDEST} to {wire.VERSION} (kvtier 0.1 to 0.2)" in line
    assert f"upgrade {which}; daemons before their engines" in line
    tiers.close(0.1)


def test_a_daemon_speaks_as_an_older_engine_does(home: Path) -> None:
    daemon = DaemonThread(home / "s", host={"size": 1 << 20})
    tiers, chain = attach(home / "s"), chain_of(4)
    try:
        store(tiers, chain)
        with sockets.socket(sockets.AF_UNIX) as older:
            older.connect(str(home / "s"))
            older.sendall(
                wire.pack_handshake(wire.Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 1 << 18, reset=False), wire.OLDEST)
            )
            (body,) = bodies_of(older)
            assert wire.version_of(body) == wire.OLDEST
            assert isinstance(wire.unpack_handshake_reply(body), wire.Welcome)
            older.sendall(wire.pack_request(1, [wire.Lookup(b"".join(chain.hashes), 1.0)]))
            ((_, _, [found], _),) = map(msgpack.unpackb, bodies_of(older))
            assert found == [4, 0, 4, 0, 0, 0]
            protocols = {each.protocol for each in daemon.daemon.call(daemon.daemon.clients)}
            assert protocols == {wire.OLDEST, wire.VERSION}
        assert load(tiers, chain) == 4
        with sockets.socket(sockets.AF_UNIX) as older:  # refused in its own words, too
            older.connect(str(home / "s"))
            older.sendall(
                wire.pack_handshake(wire.Hello(FINGERPRINT, BLOCK_SIZE, 2 * SLOT_BYTES, 1, reset=False), wire.OLDEST)
            )
            (body,) = bodies_of(older)
            parts = msgpack.unpackb(body)
            assert parts[:3] == ["kvtier", wire.OLDEST, "Refused"]
            assert len(parts) == 4
        tiers.close()
        wait_until(lambda: not daemon.daemon.call(daemon.daemon.clients))
        daemon.check()
    finally:
        daemon.close()


def test_blocks_of_tiers_that_an_older_engine_does_not_know_are_counted_as_shared_ones() -> None:
    found = Attribution(9, l1=1, l2=2, file=1, peers=2, redis=1, objects=1, miss=1)
    assert wire.pack_found(found, wire.OLDEST) == (9, 1, 2, 1, 4, 1)
    assert wire.unpack_found(wire.pack_found(found, wire.OLDEST)) == Attribution(9, l1=1, l2=2, file=1, redis=4, miss=1)
    assert wire.unpack_found(wire.pack_found(found)) == found
    assert wire.unpack_handshake_reply(msgpack.packb(["kvtier", wire.OLDEST, "Refused", "no room"])) == wire.Refused(
        "no room"
    )

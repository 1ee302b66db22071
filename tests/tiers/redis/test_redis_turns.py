"""The compiled way of blocks beside Python's: the same answers, whatever the server says and where it is cut."""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers.checksum import checksum
from kvtier.tiers.compiled import extension
from kvtier.tiers.redis import wire as redis_wire
from kvtier.tiers.redis.lanes import Lane
from kvtier.tiers.redis.names import Keyspace
from kvtier.tiers.redis.wire import Wire, WireError
from kvtier.tiers.shared import stream
from kvtier.tiers.shared.forms import ClearForm
from kvtier.tiers.tier import BlockRecord, Outcome

pytestmark = pytest.mark.skipif(
    extension("kvtier.tiers.shared.transfer_compiled") is None, reason="not built: `make compiled`"
)
COMPILED, PYTHON = True, False

PAYLOAD, TTL, EPOCH, NUM = 600, 1000, 7, 5
SPACE = Keyspace("t", ClearForm(b"a model of the turns".ljust(32, b"."), PAYLOAD, 4), PAYLOAD, 4)
HASHES = [bytes([i]) * 32 for i in range(NUM)]
PAYLOADS = [memoryview(bytes([65 + i]) * PAYLOAD) for i in range(NUM)]
RECORDS = [BlockRecord(HASHES[i], b"p" * 32, b"\1\0\0\0" * 4, checksum(PAYLOADS[i])) for i in range(NUM)]
KEYS = SPACE.keys(HASHES, EPOCH)
VALUES = [b"".join(map(bytes, SPACE.form.encode(RECORDS[i], PAYLOADS[i], EPOCH))) for i in range(NUM)]

Told = dict[int, object]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is told from slowness soon, and few bytes are received before somebody has asked for them."""
    monkeypatch.setattr(stream, "PATIENCE", 0.004)
    monkeypatch.setattr(redis_wire, "_BUFFER", 64)


def bulk(value: bytes | None) -> bytes:
    """A GET's answer."""
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


@dataclass
class Script:
    """What a server says of each block, whenever it is asked; a pause behind some bytes of all it says, and an end."""

    values: Sequence[bytes | None] = tuple(VALUES)
    expiry: Sequence[bytes] = (b":1\r\n",) * NUM
    pauses: Sequence[int] = ()
    end: int = 1 << 30

    def answer(self, command: list[bytes]) -> bytes:
        """To one command."""
        if command[0] == b"GETRANGE":
            return bulk(b"%016x" % EPOCH)
        i = KEYS.index(command[1])
        return {b"PEXPIRE": self.expiry[i], b"GET": bulk(self.values[i])}[command[0]]

    def serve(self, sock: socket.socket) -> None:
        """Until the other end is closed, or it ends itself."""
        said, pauses = 0, sorted(self.pauses)
        with suppress(OSError), sock.makefile("rb") as asked:
            while first := asked.readline():
                command = []
                for _ in range(int(first[1:])):
                    command.append(asked.read(int(asked.readline()[1:])))
                    asked.read(2)
                answer = self.answer(command)[: self.end - said]
                while answer:
                    here = next((at - said for at in pauses if said < at < said + len(answer)), len(answer))
                    sock.sendall(answer[:here])
                    said, answer = said + here, answer[here:]
                    if answer:
                        time.sleep(0.008)
                if said >= self.end:
                    sock.shutdown(socket.SHUT_WR)
                    break


def told(script: Script, is_plain: bool) -> tuple[Told, str]:
    """What a lane makes of it, and how the connection ended."""
    mine, server = socket.socketpair()
    found: Told = {}
    buffers = [memoryview(bytearray(PAYLOAD)) for _ in range(NUM)]
    ending = "clean"
    peer = threading.Thread(target=script.serve, args=[server])
    with server:
        with mine:
            wire = Wire(mine)
            wire.begin(time.monotonic() + 5)
            peer.start()
            wire._stream.is_plain = is_plain
            lane = Lane(wire, SPACE, KEYS, EPOCH, 4, TTL, asks_epoch=True)
            try:
                lane.get(HASHES, buffers, range(NUM), found.__setitem__)
                assert wire.is_clean
            except WireError as error:
                ending = f"{type(error).__name__} {error.outcome}"
        peer.join()
    for i, what in found.items():
        if isinstance(what, BlockRecord):
            assert what == RECORDS[i]
            assert buffers[i] == PAYLOADS[i]
    return found, ending


ANSWERS = (b"$16\r\n" + b"." * 18, *[b":1\r\n"] * NUM)
FIRST, EACH = sum(map(len, ANSWERS)), len(bulk(VALUES[0]))  # where the values begin, and how long each is
LAST = FIRST + NUM * EACH
NEAR = [at + around for at in (FIRST, FIRST + EACH, LAST - EACH) for around in range(-5, 14)] + [LAST - 2, LAST - 1]


def test_a_connection_that_ends_at_any_byte_gives_what_was_whole() -> None:
    for end in [*range(0, LAST, 61), *NEAR]:
        found, ending = told(Script(end=end), COMPILED)
        assert found == told(Script(end=end), PYTHON)[0], end
        assert len(found) == max(0, (end - FIRST) // EACH)
        assert ending == "WireError io_error"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_answers_in_any_pieces_are_the_same(data: st.DataObject) -> None:
    values = [
        data.draw(st.sampled_from([VALUES[i], VALUES[i], None, b"", b"x" * 40, VALUES[i - 1], VALUES[i][:-1] + b"!"]))
        for i in range(NUM)
    ]
    usual = st.sampled_from([b":1\r\n", b":1\r\n", b":0\r\n", b"-READONLY no\r\n"])
    expiry = [b":0\r\n" if values[i] is None else data.draw(usual) for i in range(NUM)]
    pauses = data.draw(st.lists(st.integers(1, LAST), max_size=3))
    fast = told(Script(values, expiry, pauses=pauses), COMPILED)
    slow = told(Script(values, expiry), PYTHON)
    assert fast[1] == slow[1] == "clean"
    for i in range(NUM):  # what is said to be gone is not asked for, unless it was before
        assert fast[0][i] == slow[0][i] or (expiry[i] == b":0\r\n" and Outcome.ABSENT in (fast[0][i], slow[0][i]))

"""What the daemon's stories share: daemons as processes and as threads, and clients that store, load and verify."""

import json
import os
import socket as sockets
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from doubles import BLOCK_SIZE, SLOT_BYTES, payload_of
from fault_rig import rest
from fork_rig import SERVICES, Forked

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.service.node.daemon import Daemon
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import Attribution, CacheTiers, Claim, Pending, Wanted
from kvtier.tiers.hierarchy.lower_tier import SplitPoint
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.pool import Reservation
from kvtier.tiers.tier import BlockRecord, ChildBlock, Outcome

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINT = b"a model of the daemon's stories".ljust(32, b".")
PATIENCE = 60.0  # seconds for an answer, for an end: a busy machine is no fault
PATIENT: Final[Mapping[str, Mapping[str, str]]] = {
    "cache": {"prefetch_deadline": "60s"},
    "file": {"deadline": "60s"},
    "redis": {"connect_timeout": "20s", "deadline": "20s"},
}
"""Options of daemons and engines whose stories are not about deadlines."""
Attach = Callable[..., RemoteTiers]  # the fixtures `attach` and `serve` of tests/service/conftest.py
Serve = Callable[..., "DaemonThread"]


def patient(sections: Mapping[str, Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Sections of a configuration, with all the patience they do not speak of."""
    return {**sections, **{name: {**options, **sections.get(name, {})} for name, options in PATIENT.items()}}


def patient_options() -> dict[str, str]:
    """The same as `section__option=value`."""
    return {f"{name}__{option}": value for name, options in PATIENT.items() for option, value in options.items()}


def environment(**options: str) -> dict[str, str]:
    """For child processes: this tree's kvtier, and `section__option=value` as variables."""
    variables = {f"KVTIER_{name.upper()}": value for name, value in options.items()}
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "rigs"))), **variables}


def take_last(lines: list[str]) -> str:
    """A server's line about its end, taken from the others; empty if it was killed."""
    return lines.pop() if lines and " kvtier: stopped after " in lines[-1] else ""


class ReadProcess:
    """A server as a process of its own, whose lines on stderr are read as they come."""

    def __init__(self, process: Forked) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self, signal: int, timeout: float = PATIENCE) -> int:
        """Send the signal; the exit status. What it says of its end is `last_line`."""
        self.process.send_signal(signal)
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        self.last_line = take_last(self.lines)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr


class DaemonProcess(ReadProcess):
    """`kvtier serve` as a process of its own."""

    def __init__(self, socket: Path, **options: str) -> None:
        """Start it and wait until it says that it is ready."""
        command = ["-m", "kvtier.cli", "serve", "--socket", str(socket)]
        options = {"service__archives": str(socket.parent), **options}
        options = {**patient_options(), "service__http": "127.0.0.1:0", **options}
        self._token_file = Path(f"{socket.absolute()}.token")
        process = Forked(command, SERVICES, env=environment(**options), stderr=subprocess.PIPE)
        assert process.stderr is not None
        self.first_line = process.stderr.readline()
        super().__init__(process)

    @property
    def http(self) -> str:
        """HOST:PORT of its pages."""
        return self.first_line.rpartition(" ")[2].strip()

    @property
    def operator(self) -> dict[str, str]:
        """What a verb over HTTP must carry, if no token is configured."""
        return {"authorization": f"Bearer {json.loads(self._token_file.read_text())['token']}"}


class DaemonThread:
    """The daemon's loop on a thread of this process."""

    def __init__(self, socket: Path, *, lease_deadline: float = 60.0, **sections: Mapping[str, object]) -> None:
        self.daemon = Daemon(Config.model_validate(patient(sections)), socket, lease_deadline=lease_deadline)
        self._thread = threading.Thread(target=self.daemon.run)
        self._thread.start()

    def check(self) -> None:
        """Every law, once nothing is on its way any more."""
        for namespace in self.daemon.call(self.daemon.namespaces):
            rest(namespace.hierarchy)
        self.daemon.call(self.daemon.check)

    def close(self, timeout: float = PATIENCE) -> None:
        """`timeout`: as long as it tries to write, to tiers that are off, too."""
        self.daemon.stop()
        self._thread.join(PATIENCE)
        assert self.daemon.close(timeout)


def attach(
    socket: Path,
    *,
    size: int = 64 * SLOT_BYTES,
    fingerprint: bytes = FINGERPRINT,
    slot_bytes: int = SLOT_BYTES,
    deadline: float = PATIENCE,
    kv_probe: bytes | None = None,
) -> RemoteTiers:
    """A client of the daemon at `socket`; patient, unless the story is about its `deadline`."""
    hello = wire.Hello(fingerprint, BLOCK_SIZE, slot_bytes, size, reset=False, kv_probe=kv_probe)
    return RemoteTiers(socket, hello, patience=PATIENCE, deadline=deadline)


def body_of(frame: bytes) -> memoryview:
    bodies: list[memoryview] = wire.FrameReader(wire.MAX_FRAME).feed(frame)
    [body] = bodies
    return body


def unpack_request(body: bytes | memoryview) -> tuple[int, list[Any]]:
    """What a client's frame says: its number and operations."""
    [request] = wire.FrameReader(wire.MAX_FRAME, wire.REQUESTS).feed(len(body).to_bytes(4, "little") + body)
    return request.number, request.operations


def unpack_reply(body: bytes | memoryview) -> wire.Reply:
    """What a daemon's frame says."""
    [reply] = wire.FrameReader(wire.MAX_FRAME, wire.REPLIES).feed(len(body).to_bytes(4, "little") + body)
    return reply


def news_of(
    claim: int,
    found: Attribution,
    refusal: Outcome | None,
    good_for: float,
    slots: list[int],
    generations: list[int],
    children: Sequence[ChildBlock] = (),
    split: SplitPoint | None = None,
) -> wire.News:
    """What a daemon says of a claim."""
    columns = array("q", slots).tobytes(), array("q", generations).tobytes()
    return wire.News(claim, wire.pack_found(found), refusal, good_for, *columns, children, split)


def wanted(chain: TokenChain, first: int = 0, last: int | None = None) -> Wanted:
    return Wanted(chain.hashes[first:last], chain.parent(first), chain.tenant)


def records(reservation: Reservation, chain: TokenChain) -> list[BlockRecord]:
    at = {chain_hash: i for i, chain_hash in enumerate(chain.hashes)}
    return [BlockRecord(h, chain.parent(at[h]), chain.block_tokens(at[h]), 0) for h in reservation.hashes]


def fill(tiers: CacheTiers, reservation: Reservation) -> None:
    """What a worker's d2h copies do."""
    region = tiers.region
    assert region is not None
    for slot, chain_hash in zip(reservation.slots, reservation.hashes, strict=True):
        region.slot(slot)[:] = payload_of(chain_hash, region.slot_bytes)


def store(tiers: CacheTiers, chain: TokenChain, first: int = 0, last: int | None = None, *, below: bool = True) -> int:
    """Reserve, fill, seal, and wait until it is found, and with `below` written; how many blocks were taken."""
    (reservation,) = tiers.reserve([wanted(chain, first, last)])
    if reservation is None:
        return 0
    fill(tiers, reservation)
    tiers.seal(reservation, records(reservation, chain), tiers.epoch)
    assert tiers.drain(PATIENCE, below=below)
    return len(reservation)


def store_partial(tiers: CacheTiers, chain: TokenChain) -> BlockRecord:
    """Store a chain's unfinished last block; what it is, whether or not there was room."""
    tail = chain.partial_block(chain.num_tokens)
    assert tail is not None
    [reservation] = tiers.reserve([Wanted([tail.chain_hash], tail.parent, chain.tenant, is_partial=True)])
    if reservation is not None and len(reservation):
        fill(tiers, reservation)
        tiers.seal(reservation, [tail], tiers.epoch)
    assert tiers.drain(PATIENCE)
    return tail


def ask(tiers: CacheTiers, chain: TokenChain, timeout: float = PATIENCE) -> tuple[Claim, int]:
    """Ask, and wait for the answer: the claim, and how many blocks are promised."""
    claim = tiers.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)
    deadline = time.monotonic() + timeout
    while isinstance(promised := tiers.poll(claim), Pending):
        assert time.monotonic() < deadline, "no answer"
        tiers.wait_progress(0.1)
    return claim, promised


def where(tiers: CacheTiers, chain: TokenChain) -> Attribution:
    """Where the chain's blocks are; no claim is left behind."""
    claim, _ = ask(tiers, chain)
    tiers.cancel(claim)
    assert claim.found is not None
    return claim.found


def verify(tiers: CacheTiers, lease: Lease) -> None:
    """I1: the leased slots hold the bytes of the leased names."""
    region = tiers.region
    for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
        assert region is not None
        assert bytes(region.slot(slot)) == payload_of(chain_hash, region.slot_bytes)


def load(tiers: CacheTiers, chain: TokenChain) -> int:
    """Claim what there is of a chain, verify its bytes, let go; how many blocks."""
    claim, _ = ask(tiers, chain)
    with tiers.lease(claim) as lease:
        verify(tiers, lease)
        return len(lease)


def raw(socket: Path) -> sockets.socket:
    """A connection to a daemon, without manners."""
    connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(str(socket))
    return connection


def greeted(socket: Path) -> sockets.socket:
    """A connection that was welcomed, and has no manners either."""
    connection = raw(socket)
    connection.sendall(
        wire.pack_handshake(wire.Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 64 * SLOT_BYTES, reset=False))
    )
    assert b"Welcome" in connection.recv(4096)
    return connection


def client_child(socket: Path, *what: str) -> Forked:
    """A client in a process of its own, `_client_child.py`."""
    program = ROOT / "tests" / "service" / "node" / "_client_child.py"
    return Forked([str(program), str(socket), *what], SERVICES, env=environment(), stdout=subprocess.PIPE)


def says(process: Forked) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def attached(tiers: RemoteTiers) -> bool:
    """Whether there is a link now; tries to attach where it is time."""
    tiers.tick()
    return tiers.member is not None


def drops(tiers: CacheTiers, reason: Outcome) -> float:
    return tiers.stats().get(f'kvtier_store_dropped_total{{tier="l2",reason="{reason}"}}', 0)


def misses(tiers: CacheTiers, reason: Outcome) -> float:
    return tiers.stats().get(f'kvtier_miss_total{{reason="{reason}"}}', 0)


def end_child(child: "subprocess.Popen[str] | Forked", signals: Sequence[int] = ()) -> None:
    """Kill a child that is still there, and close its pipes."""
    for signal in signals:
        child.send_signal(signal)
    if child.poll() is None:
        child.kill()
    child.wait(PATIENCE)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()

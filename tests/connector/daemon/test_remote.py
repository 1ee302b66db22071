"""Stories of the daemon's client: a daemon that is not there, does not answer, lies, or belongs to somebody else."""

import gc
import logging
import os
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from doubles import BLOCK_SIZE, SLOT_BYTES, FakeClock, chain_of, payload_of, wait_until
from service_rig import (
    FINGERPRINT,
    PATIENCE,
    DaemonThread,
    ask,
    attach,
    attached,
    drops,
    environment,
    fill,
    load,
    misses,
    news_of,
    records,
    store,
    unpack_request,
    verify,
    wanted,
    where,
)

from kvtier.connector import SchedulerSide, WorkerReport
from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution, Claim, Wanted, load_and_lease
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.pool import Reservation
from kvtier.tiers.tier import ChildBlock, Outcome

Client = Callable[..., RemoteTiers]


class FakeDaemon:
    """Welcomes one client after another, and then says what the story wants it to say, or nothing."""

    def __init__(self, path: Path, welcome: bool = True) -> None:
        self.region = HostRegion.allocate(8, SLOT_BYTES, shared=True, prefault=False)
        self.hellos: list[object] = []
        self.welcomes = threading.Event()  # clients wait here for theirs
        self.welcomes.set()
        self.connection: sockets.socket | None = None
        self._welcome = welcome
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            (body,) = wire.FrameReader(wire.MAX_FRAME).feed(connection.recv(4096))
            self.hellos.append(wire.unpack_handshake(body))
            if self._welcome:
                assert self.welcomes.wait(PATIENCE)
                welcome = wire.Welcome(b"c" * 16, b"i" * 16, 8, SLOT_BYTES, 0, False, 60.0)
                assert self.region.fd is not None
                try:
                    sockets.send_fds(connection, [wire.pack_handshake(welcome)], [self.region.fd])
                except BrokenPipeError:  # its client has waited long enough
                    connection.close()
                    continue
            if self.connection is not None:
                self.connection.close()
            self.connection = connection

    def say(self, frame: bytes) -> None:
        wait_until(lambda: self.connection is not None)
        assert self.connection is not None
        self.connection.sendall(frame)

    def close(self) -> None:
        self.welcomes.set()
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()
        if self.connection is not None:
            self.connection.close()
        self.region.close()


Fake = Callable[..., FakeDaemon]


@pytest.fixture
def fake(path: Path) -> Iterator[Fake]:
    daemons: list[FakeDaemon] = []

    def start(**options: bool) -> FakeDaemon:
        daemons.append(FakeDaemon(path, **options))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def served(path: Path) -> Iterator[DaemonThread]:
    """A daemon of this process; at the end its laws hold."""
    daemon = DaemonThread(path, host={"size": 1 << 20})
    yield daemon
    daemon.check()
    daemon.close()


@pytest.fixture
def client(path: Path) -> Iterator[Client]:
    """`client(…)`: of whatever daemon is there, on a clock of the story if one is given; closed before its daemon."""
    clients: list[RemoteTiers] = []

    def start(clock: FakeClock | None = None, patience: float = PATIENCE, **options: Any) -> RemoteTiers:
        hello = wire.Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 1 << 18, reset=False)
        made = attach(path, **options) if clock is None else RemoteTiers(path, hello, patience, clock, **options)
        clients.append(made)
        return made

    yield start
    for each in clients:
        each.close(0.1)


def asked(tiers: RemoteTiers, chain: TokenChain) -> Claim:
    return tiers.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)


def news(number: int, *slots: int, blocks: int = 4) -> bytes:
    """The first claim is number 1."""
    found = Attribution(blocks, l2=len(slots), miss=blocks - len(slots))
    return wire.pack_reply(0, 0, [], [news_of(number, found, None, 0.0, [*slots], [1] * len(slots))])


def children_told(*children: ChildBlock) -> bytes:
    """Of the first claim, of four blocks."""
    told = news_of(1, Attribution(4, miss=4), None, 0.0, [], [], children)
    return wire.pack_reply(0, 0, [], [told])


# not there


def test_a_daemon_that_is_not_there_yet(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = chain_of(4)
    with caplog.at_level(logging.WARNING):
        tiers = attach(path)
    assert [r.message for r in caplog.records] == [
        f'[service] socket "{path}": [Errno 2] No such file or directory; until this is attached, everything is a miss'
    ]
    # Every question has an answer, none waits, and every loss is counted.
    assert (tiers.region, tiers.num_slots, tiers.member, tiers.has_lower) == (None, 0, None, False)
    found = where(tiers, chain)
    assert found == Attribution(4, miss=4)
    tiers.count(found)
    assert misses(tiers, Outcome.BREAKER_OPEN) == 4
    assert tiers.reserve([wanted(chain), wanted(chain)]) == [None, None]
    assert drops(tiers, Outcome.BREAKER_OPEN) == 8
    assert tiers.holds(chain.hashes) == [False] * 4
    assert tiers.locate(chain.hashes, 1.0) == Attribution(4, miss=4)
    assert not tiers.drain(1.0)
    tiers.computed(100, 0.1)
    tiers.wait_progress(0.01)
    tiers.check()
    # It is started, and found by whoever asks.
    daemon = DaemonThread(path, host={"size": 1 << 20})
    wait_until(lambda: attached(tiers))
    assert tiers.num_slots == 64
    assert store(tiers, chain) == 4
    assert load(tiers, chain) == 4
    assert [r.message for r in caplog.records][1:] == [f'[service] socket "{path}": attached']
    tiers.close()
    tiers.close()
    assert where(tiers, chain).miss == 4  # closed: as if it had never been there
    assert tiers.reserve([wanted(chain)]) == [None]
    assert drops(tiers, Outcome.CLOSED) == 4
    daemon.check()
    daemon.close()


def test_trying_again_costs_less_and_less(client: Client, path: Path) -> None:
    clock = FakeClock()
    tiers = client(clock, 1.0)
    tries: list[float] = []
    path.symlink_to(path.with_name("nobody"))
    real = sockets.socket.connect

    def connect(self: sockets.socket, address: str) -> None:
        tries.append(clock.now)
        real(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.connector.daemon.link.socket.socket.connect", connect)
        for _ in range(600):
            clock.advance(0.05)
            tiers.tick()
    pauses = np.diff(tries)
    assert pauses[0] == pytest.approx(0.2, abs=0.06)
    assert pauses[-1] == pytest.approx(5.0, abs=0.06)
    assert len(tries) < 15


def test_a_missed_reset_is_repeated(served: DaemonThread, client: Client) -> None:
    tiers, witness, chain = client(), client(), chain_of(4)
    store(tiers, chain)
    # The connection breaks, and at that moment the weights change.
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    epoch = tiers.epoch
    tiers.reset()
    assert tiers.epoch > epoch
    assert load(witness, chain) == 4  # the daemon does not know
    wait_until(lambda: attached(tiers))
    assert where(tiers, chain).miss == 4
    assert where(witness, chain).miss == 4


# lost, and found again


def test_slots_of_a_lost_connection_are_kept_until_its_copies_have_ended(client: Client, path: Path) -> None:
    daemon = DaemonThread(path, host={"size": 16 * SLOT_BYTES})
    tiers, chain, other = client(), chain_of(4), chain_of(4, first_token=1000)
    store(tiers, chain)
    claim, _ = ask(tiers, chain)
    lease = tiers.lease(claim)
    (reservation,) = tiers.reserve([wanted(other)])
    pending, _ = ask(tiers, chain)
    assert reservation is not None
    region = tiers.region
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    assert tiers.poll(pending) == 0  # void
    wait_until(lambda: attached(tiers))
    assert tiers.region is region  # the same daemon has the same memory
    (lost,) = [client for client in daemon.daemon.call(daemon.daemon.clients) if not client.connected]
    assert (lost.claims, lost.leases, lost.reservations) == (0, 1, 1)
    # The copies end, late: nobody is served by them, and only now may others have the slots.
    lease.release()
    tiers.abandon(reservation, Outcome.COPY_FAILED)
    tiers.tick()
    tiers.tick()
    wait_until(lambda: len(daemon.daemon.call(daemon.daemon.clients)) == 1)
    assert daemon.daemon.counts["replaced"] == 1
    assert load(tiers, chain) == 4
    tiers.close()
    daemon.check()
    daemon.close()


def test_slots_that_a_device_may_still_write_to_stay_the_clients(client: Client, path: Path) -> None:
    daemon = DaemonThread(path, host={"size": 16 * SLOT_BYTES})
    tiers, chain = client(), chain_of(4)
    (reservation,) = tiers.reserve([wanted(chain)])
    assert reservation is not None
    tiers.quarantine(reservation, Outcome.COPY_FAILED)
    tiers.quarantine(reservation, Outcome.COPY_FAILED)
    tiers.abandon(reservation, Outcome.ABORTED)
    assert drops(tiers, Outcome.COPY_FAILED) == 4
    del reservation
    # Another link, or the client's end, gives none of them back: its process has not ended.
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    wait_until(lambda: attached(tiers))
    tiers.close()
    other = client()
    wait_until(lambda: attached(other))
    clients = daemon.daemon.call(daemon.daemon.clients)
    assert sum(client.reservations for client in clients) == 1
    [namespace] = daemon.daemon.call(daemon.daemon.namespaces)
    assert namespace.hierarchy.host.pool.counts().filling == 4
    other.close()
    daemon.close()


def test_memory_of_a_daemon_that_is_gone_is_free_for_the_next_one(client: Client, path: Path) -> None:
    """A machine may have room for it once."""
    daemon = DaemonThread(path, host={"size": 16 * SLOT_BYTES})
    tiers, chain = client(), chain_of(4)
    store(tiers, chain)
    claim, _ = ask(tiers, chain)
    lease, region, epoch = tiers.lease(claim), tiers.region, tiers.epoch
    assert region is not None
    daemon.close()
    wait_until(lambda: not attached(tiers) and bool(tiers.wanting))
    tiers.tick()
    assert tiers.region is region  # a copy may be under way
    verify(tiers, lease)
    lease.release()
    wait_until(lambda: not attached(tiers) and tiers.region is None)
    assert region.num_slots == tiers.num_slots == 0
    assert tiers.reserve([wanted(chain)]) == [None]
    assert load(tiers, chain) == 0
    daemon = DaemonThread(path, host={"size": 16 * SLOT_BYTES})
    wait_until(lambda: attached(tiers))
    assert tiers.epoch > epoch
    assert store(tiers, chain) == load(tiers, chain) == 4
    tiers.close()
    daemon.check()
    daemon.close()


@pytest.mark.parametrize("copies", [False, True])
def test_a_daemon_that_ends_frees_its_memory_though_idle_clients_map_it(
    client: Client, path: Path, copies: bool
) -> None:
    daemon = DaemonThread(path, host={"size": 64 * SLOT_BYTES})
    tiers, chain = client(), chain_of(4)
    store(tiers, chain)
    claim, _ = ask(tiers, chain)
    lease, region = tiers.lease(claim), tiers.region
    assert region is not None
    assert region.fd is not None
    if not copies:
        lease.release()
        tiers.tick()
        wait_until(lambda: not any(client.leases for client in daemon.daemon.call(daemon.daemon.clients)))
    assert os.fstat(region.fd).st_blocks > 0
    daemon.close()
    assert (os.fstat(region.fd).st_blocks > 0) == copies
    if copies:
        verify(tiers, lease)
        lease.release()


def test_what_finds_no_room_is_offered_again_and_counted_once(client: Client, path: Path, tmp_path: Path) -> None:
    daemon = DaemonThread(path, host={"size": 8 * SLOT_BYTES}, file={"path": str(tmp_path), "size": "4MiB"})
    tiers, chain = client(), chain_of(32)
    side = SchedulerSide(tiers)
    side.admit(SimpleNamespace(request_id="long", chain=chain, num_tokens=32 * BLOCK_SIZE + 1))
    side.store("long", 0, range(32))
    region, num_steps = tiers.region, 0
    assert region is not None
    while not side.idle:
        plan = side.build_plan()
        for op in plan.stores:
            for slot, block in zip(op.host_slots, op.device_blocks, strict=True):
                region.slot(slot)[:] = payload_of(chain.hashes[block])
        side.update(WorkerReport(tuple(op.op_id for op in plan.stores)))
        assert tiers.drain(PATIENCE)
        num_steps += 1
    assert num_steps > 1
    assert where(tiers, chain).miss == 0
    assert drops(tiers, Outcome.NO_SLOT) == 0
    # Where the engine cannot keep its blocks that is counted at once, on both sides.
    side = SchedulerSide(tiers, keeps_blocks=False)
    other = chain_of(32, first_token=1000)
    side.admit(SimpleNamespace(request_id="other", chain=other, num_tokens=32 * BLOCK_SIZE + 1))
    side.store("other", 0, range(32))
    [op] = side.build_plan().stores
    [namespace] = daemon.daemon.call(daemon.daemon.namespaces)
    assert drops(tiers, Outcome.NO_SLOT) == drops(namespace.hierarchy, Outcome.NO_SLOT) == 32 - len(op.host_slots) > 0
    side.close()
    tiers.close()
    daemon.check()
    daemon.close()


def sleep_through(tiers: RemoteTiers, clock: FakeClock, patch: pytest.MonkeyPatch) -> None:
    """Have the client's waits pass on its clock, in vain."""
    link = tiers._attachment.link
    assert link is not None

    def wait(timeout: float) -> bool:
        clock.advance(timeout + 0.001)
        return False

    patch.setattr(link, "wait", wait)


def test_a_daemon_that_does_not_answer_costs_one_deadline(fake: Fake, client: Client) -> None:
    daemon, clock = fake(), FakeClock()
    tiers, chain = client(clock, deadline=0.25), chain_of(4)
    daemon.welcomes.clear()
    assert tiers.num_slots == 8
    claim = asked(tiers, chain)
    assert tiers.poll(claim) is PENDING  # nothing waits here
    link = tiers._attachment.link
    assert link is not None

    with pytest.MonkeyPatch.context() as patch:
        sleep_through(tiers, clock, patch)
        started = clock.now
        assert tiers.reserve([wanted(chain)]) == [None]
        assert clock.now - started == pytest.approx(0.25, abs=0.03)  # not as long as a claim waits
        assert drops(tiers, Outcome.TIMEOUT) == 4
        assert tiers.reserve([wanted(chain)]) == [None]  # at once: nobody waits twice
        assert clock.now - started == pytest.approx(0.25, abs=0.03)
    assert drops(tiers, Outcome.TIMEOUT) == 8
    # It may only be slow: the connection stays, and what was asked waits for a deadline more.
    assert tiers.poll(claim) is PENDING
    clock.advance(0.26)
    late = asked(tiers, chain)
    assert [tiers.poll(claim), tiers.poll(late)] == [0, 0]
    assert late.missing is Outcome.TIMEOUT
    assert tiers._attachment.link is link
    # Silent for as long as that, it is as good as gone.
    clock.advance(4.8)
    tiers.tick()
    assert tiers.reserve([wanted(chain)]) == [None]
    assert drops(tiers, Outcome.BREAKER_OPEN) == 4
    daemon.welcomes.set()

    def found_again() -> bool:
        clock.advance(0.1)
        return attached(tiers) and len(daemon.hellos) == 2

    wait_until(found_again)


def test_an_answer_that_is_late_costs_a_step_and_not_the_daemon(served: DaemonThread, client: Client) -> None:
    tiers, first, second = client(deadline=0.05), chain_of(4), chain_of(4, 100)
    member, gate, is_held = tiers.member, threading.Event(), threading.Event()

    def hold() -> bool:
        is_held.set()
        return gate.wait(PATIENCE)

    served.daemon.submit(hold)
    assert is_held.wait(PATIENCE)
    # Two steps meet a daemon that does not get to them: one waits, neither stores anything.
    assert tiers.reserve([wanted(first), wanted(second)]) == [None, None]
    assert tiers.reserve([wanted(first)]) == [None]
    assert drops(tiers, Outcome.TIMEOUT) == 12
    # It gets to them: the same connection is of use again, and what was granted in vain is given back.
    gate.set()
    got: list[Reservation] = []

    def stores_again() -> bool:
        got.extend(each for each in tiers.reserve([wanted(first)]) if each is not None)
        return bool(got)

    wait_until(stores_again)
    assert len(got[0]) == 4
    assert tiers.member == member
    [one] = served.daemon.call(served.daemon.clients)
    assert one.reservations == 1
    [namespace] = served.daemon.call(served.daemon.namespaces)
    assert namespace.hierarchy.host.pool.counts().filling == 4
    tiers.abandon(got[0], Outcome.ABORTED)


def test_a_slow_look_into_other_tiers_costs_a_look_and_not_the_link(fake: Fake, client: Client) -> None:
    daemon, clock, chain = fake(), FakeClock(), chain_of(4)
    tiers = client(clock, deadline=0.25)
    link, nothing = tiers._attachment.link, Attribution(4, miss=4)
    assert link is not None
    with pytest.MonkeyPatch.context() as patch:
        sleep_through(tiers, clock, patch)
        assert tiers.locate(chain.hashes, 0.0) == nothing
        expired = clock.now
        assert tiers.locate(chain.hashes, 0.0) == nothing  # at once: the daemon does one such at a time
        assert not tiers.drain(1.0)  # has time, and waits for the other one to end
        assert clock.now - expired == pytest.approx(1.5, abs=0.1)
    # Its other answers are not late for that, and the link is the same.
    assert (tiers._attachment.link, link.overdue) == (link, {})
    daemon.say(wire.pack_reply(1, 0, [wire.pack_found(Attribution(4, miss=4))], []))
    wait_until(lambda: (tiers.tick(), not link.overdue_aside)[1])
    daemon.say(wire.pack_reply(2, 0, [wire.pack_found(found := Attribution(4, l2=4))], []))
    assert tiers.locate(chain.hashes, 0.0) == found
    # One that never answers is cut off.
    with pytest.MonkeyPatch.context() as patch:
        sleep_through(tiers, clock, patch)
        assert tiers.locate(chain.hashes, 0.0) == nothing
    clock.advance(5.0)
    tiers.tick()
    assert tiers._attachment.link is not link


def test_a_promise_that_is_lost_while_the_daemon_is_silent_is_counted(fake: Fake, client: Client) -> None:
    daemon, clock, chain = fake(), FakeClock(), chain_of(4)
    tiers = client(clock, deadline=0.25)
    claim = asked(tiers, chain)
    daemon.say(news(1, 0, 1, 2, 3))
    wait_until(lambda: tiers.poll(claim) == 4)
    clock.advance(29.0)
    with pytest.MonkeyPatch.context() as patch:
        sleep_through(tiers, clock, patch)
        assert tiers.reserve([wanted(chain)]) == [None]
    clock.advance(1.0)  # past half of the promise's deadline, and nobody answers a second question
    assert tiers.poll(claim) is PENDING
    assert tiers.poll(claim) == 0
    assert misses(tiers, Outcome.TIMEOUT) == 4
    assert len(tiers.lease(claim)) == 0


def test_a_step_of_more_stores_than_a_message_takes(served: DaemonThread, client: Client) -> None:
    chain = chain_of(1)
    tiers = client()
    member, gate = tiers.member, threading.Event()
    names = [number.to_bytes(32, "little") for number in range(5000)]
    step = [Wanted([name], chain.root, chain.tenant, is_partial=True) for name in names]
    granted = [each for each in tiers.reserve(step) if each is not None and len(each)]
    assert len(granted) == 64
    assert drops(tiers, Outcome.NO_SLOT) == 5000 - 64
    for each in granted:
        tiers.abandon(each, Outcome.ABORTED)
    # Those of an answer that is late are given back too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "_deadline", 0.05)
        served.daemon.submit(lambda: gate.wait(PATIENCE))
        assert tiers.reserve(step) == [None] * 5000
    gate.set()
    tiers.check()
    assert tiers.member == member
    [one] = served.daemon.call(served.daemon.clients)
    assert one.reservations == 0


def test_a_question_waits_long_only_for_a_daemon_that_says_it_has_read_it(fake: Fake, client: Client) -> None:
    """What a lower tier holds takes time; a daemon that is stopped would take a request all of that time."""
    daemon, clock, chain = fake(), FakeClock(), chain_of(4)
    tiers = client(clock, 2.5, deadline=0.25)
    claim = asked(tiers, chain)
    tiers.tick()
    wait_until(lambda: daemon.connection is not None)
    assert daemon.connection is not None
    ((request, _),) = map(unpack_request, wire.FrameReader(wire.MAX_FRAME).feed(daemon.connection.recv(1 << 16)))
    daemon.say(wire.pack_reply(request, 0, [], []))
    link = tiers._attachment.link
    assert link is not None
    assert link.wait(PATIENCE)
    clock.advance(2.4)
    assert tiers.poll(claim) is PENDING
    clock.advance(0.2)
    assert tiers.poll(claim) == 0
    assert claim.found == Attribution(4, miss=4)
    tiers.count(claim.found, claim.missing)
    assert misses(tiers, Outcome.TIMEOUT) == 4  # and for no other reason
    assert misses(tiers, Outcome.ABSENT) == misses(tiers, Outcome.BREAKER_OPEN) == 0
    # It is stopped before the next one: a deadline, then nobody waits any more, and steps store nothing.
    stopped = asked(tiers, chain)
    tiers.tick()
    clock.advance(0.24)
    assert tiers.poll(stopped) is PENDING
    clock.advance(0.02)
    assert tiers.poll(stopped) == 0
    assert tiers.reserve([wanted(chain)]) == [None]
    assert (misses(tiers, Outcome.TIMEOUT), drops(tiers, Outcome.TIMEOUT)) == (8, 4)
    assert tiers._attachment.link is link
    clock.advance(4.8)
    tiers.tick()
    assert tiers.member is None


def test_a_daemon_that_never_says_welcome_costs_one_deadline(fake: Fake, client: Client) -> None:
    clock, chain = FakeClock(), chain_of(2)
    tiers = client(clock)
    daemon = fake(welcome=False)
    clock.advance(0.2)
    early = asked(tiers, chain)
    wait_until(lambda: bool(daemon.hellos))
    clock.advance(0.2)
    late = asked(tiers, chain)
    assert [tiers.poll(early), tiers.poll(late)] == [PENDING, PENDING]
    clock.advance(0.06)  # the hello was said a deadline ago, whoever asked when
    assert [tiers.poll(early), tiers.poll(late)] == [0, 0]
    for claim in (early, late):
        assert claim.found is not None
        tiers.count(claim.found, claim.missing)
    assert misses(tiers, Outcome.BREAKER_OPEN) == 4
    for _ in range(100):
        claim = asked(tiers, chain)
        assert tiers.poll(claim) == 0  # nor does anybody wait for it any more


def test_a_question_waits_for_a_daemon_that_is_late(fake: Fake, client: Client) -> None:
    """Its client was not welcomed when it started; the first request computed what the daemon had."""
    clock, chain = FakeClock(), chain_of(4)
    tiers = client(clock)
    daemon = fake()
    daemon.welcomes.clear()
    clock.advance(0.2)
    claim = asked(tiers, chain)
    expired = asked(tiers, chain)
    assert tiers.poll(claim) is PENDING
    tiers.cancel(expired)
    daemon.welcomes.set()
    wait_until(lambda: attached(tiers))
    assert tiers.poll(claim) is PENDING  # now it is asked: claim number 1
    daemon.say(news(1, 0, 1, 2, 3))
    wait_until(lambda: tiers.poll(claim) == 4)
    assert len(tiers.lease(claim)) == 4


def test_a_daemon_restarted_while_idle_has_the_first_answer(client: Client, path: Path) -> None:
    daemon, clock, chain = DaemonThread(path, host={"size": 1 << 20}), FakeClock(), chain_of(4)
    tiers = client(clock)
    daemon.close()
    daemon = DaemonThread(path, host={"size": 1 << 20})
    clock.advance(0.2)
    claim, promised = ask(tiers, chain)
    assert promised == 0
    assert claim.found is not None
    tiers.count(claim.found, claim.missing)
    assert (misses(tiers, Outcome.ABSENT), misses(tiers, Outcome.BREAKER_OPEN)) == (4, 0)  # it was asked
    tiers.close()
    daemon.check()
    daemon.close()


def test_a_query_without_waiters_is_withdrawn(fake: Fake, client: Client) -> None:
    """Otherwise the daemon would keep its promise, and the room of it, until the lease deadline."""
    daemon, chain = fake(), chain_of(4)
    tiers = client()
    # The daemon says nothing before the caller's deadline: nothing comes of the claim.
    lease = load_and_lease(tiers, chain.hashes, chain.root, time.monotonic() + 0.05)
    assert lease is not None
    assert not len(lease)
    # The next message says so.
    tiers.tick()
    wait_until(lambda: daemon.connection is not None)
    assert daemon.connection is not None
    bodies = wire.FrameReader(wire.MAX_FRAME).feed(daemon.connection.recv(1 << 16))
    told = [operation for body in bodies for operation in unpack_request(body)[1]]
    assert [type(operation) for operation in told] == [wire.Ask, wire.Cancel]


def test_a_promise_that_expired_in_a_long_step_is_claimed_once_more(fake: Fake, client: Client) -> None:
    """A step that compiles on a busy machine may take longer than a promise is good for; the blocks are still there."""
    daemon, clock, chain = fake(), FakeClock(), chain_of(4)
    tiers = client(clock, 2.5)
    claim = asked(tiers, chain)
    daemon.say(news(1, 0, 1, 2, 3))
    wait_until(lambda: tiers.poll(claim) == 4)
    clock.advance(30.0)
    assert tiers.poll(claim) is PENDING
    daemon.say(news(2, 4, 5, 6))  # meanwhile one block had to go
    wait_until(lambda: tiers.poll(claim) == 3)
    assert misses(tiers, Outcome.EVICTED) == 1
    # Not for ever: a request would wait for steps that are all as long.
    clock.advance(30.0)
    assert tiers.poll(claim) == 0
    assert misses(tiers, Outcome.TIMEOUT) == 3
    assert len(tiers.lease(claim)) == 0

    # An answer that comes as late is no promise either.
    def has_come() -> bool:
        tiers.tick()
        return late.found is not None

    late = asked(tiers, chain)
    clock.advance(31.0)
    daemon.say(news(3, 0, 1, 2, 3))
    wait_until(has_come)
    assert tiers.poll(late) is PENDING
    daemon.say(news(4, 0, 1, 2, 3))
    wait_until(lambda: tiers.poll(late) == 4)


def test_a_promise_of_a_lost_link_is_claimed_on_the_next(served: DaemonThread, client: Client) -> None:
    tiers, chain = client(), chain_of(4)
    store(tiers, chain)
    claim, promised = ask(tiers, chain)
    assert promised == 4
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    wait_until(lambda: attached(tiers))
    assert tiers.poll(claim) is PENDING
    wait_until(lambda: tiers.poll(claim) == 4)
    # Nobody is waited for: where there is no link when the engine looks, it computes, and the reason is counted.
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    assert tiers.poll(claim) == 0
    assert misses(tiers, Outcome.BREAKER_OPEN) == 4
    # Promised and taken too late: counted as well.
    wait_until(lambda: attached(tiers))
    claim, promised = ask(tiers, chain)
    tiers._attachment.cut(ConnectionResetError("cable pulled"))
    assert len(tiers.lease(claim)) == 0
    assert misses(tiers, Outcome.BREAKER_OPEN) == 8


def test_a_promise_is_not_taken_late(fake: Fake, client: Client) -> None:
    """The daemon keeps it for a minute since it last heard of it; the client trusts half of that."""
    daemon, clock, chain = fake(), FakeClock(), chain_of(4)
    tiers = client(clock, 2.5)
    claims = [asked(tiers, chain) for _ in range(3)]
    tiers.tick()
    for number in (1, 2, 3):
        daemon.say(news(number, 0, 1, 2, 3))
    wait_until(lambda: [tiers.poll(claim) for claim in claims] == [4, 4, 4])
    clock.advance(29.9)
    with tiers.lease(claims[0]) as lease:
        assert (lease.hashes, lease.slots) == (chain.hashes, [0, 1, 2, 3])
    assert tiers.poll(claims[1]) == 4  # this renews it
    clock.advance(0.2)
    assert len(tiers.lease(claims[2])) == 0  # too late
    assert misses(tiers, Outcome.TIMEOUT) == 4
    clock.advance(29.0)
    assert len(tiers.lease(claims[1])) == 4
    gc.collect()  # that one was dropped instead of released: the daemon hears of it all the same


# mad


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        wire.pack_frame([0, 0, [], [[1, [4, 0, 4, 0, 0, 1], None, 0.0, b"", b"", []]]]),  # does not sum
        wire.pack_frame([0, 0, [], [[1, [4, 0, 0, 0, 0, 4], None, 0.0, b"", b""]]]),  # as version 1 had it
        children_told(ChildBlock(b"n" * 32, bytes(4 * BLOCK_SIZE + 4))),  # longer than a block
        children_told(*(ChildBlock(bytes([n]) * 32, bytes(4)) for n in range(9))),  # too many
        news(1, 0, 1, 8),  # a slot outside the region
        news(1, 0, 1, blocks=5),  # of other blocks than asked about
        wire.pack_frame([0, -1, [], []]),
        wire.pack_frame(["kvtier", 3, "Welcome"]),
    ],
)
def test_a_daemon_that_lies_is_left_alone(fake: Fake, client: Client, frame: bytes) -> None:
    daemon = fake()
    tiers, chain = client(), chain_of(4)
    claim = asked(tiers, chain)
    daemon.say(frame)
    wait_until(lambda: tiers.poll(claim) == 0)
    assert tiers.member is None
    assert len(tiers.lease(claim)) == 0


ONE, NINTH = b"\1" + b"\0" * 7, b"\x08" + b"\0" * 7


@pytest.mark.parametrize("answer", [None, [], [None], [ONE, ONE], [ONE, ONE, NINTH, ONE], [b"", b"", b"", b""], 7])
def test_slots_that_were_never_granted(fake: Fake, client: Client, answer: object) -> None:
    daemon = fake()
    tiers, chain = client(), chain_of(4)
    daemon.say(b"")
    threading.Timer(0.05, lambda: daemon.say(wire.pack_frame([2, 0, [answer], []]))).start()
    assert tiers.reserve([wanted(chain)]) == [None]


# refused


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (wire.pack_handshake(wire.Refused("no room, lower it")), "no room, lower it"),
        (
            wire.pack_handshake(wire.Welcome(b"c" * 16, b"i" * 16, 8, SLOT_BYTES, 0, False, 1.0)),
            "a welcome without its region",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame of 1347703880 bytes"),
    ],
)
def test_what_a_daemon_says_at_start_is_the_users_to_read_and_ends_no_engine(
    path: Path, fake: Fake, client: Client, frame: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = fake(welcome=False)
    threading.Thread(target=daemon.say, args=(frame,)).start()
    tiers = client()
    told = tiers.wanting["daemon"]
    assert told.startswith(f'[service] socket "{path}": ')
    assert why in told
    assert "\n" not in told
    assert [each.message for each in caplog.records] == [f"{told}; until this is attached, everything is a miss"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_users_socket_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    program = (
        "import os, socket, sys, time; os.setuid(12345); s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
        "s.listen(); print('ready', flush=True); time.sleep(60)"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "ready\n"
    with pytest.raises(ConfigError, match="user 12345 serves it, this is user 0"):
        attach(path)
    stranger.kill()
    stranger.wait(60)
    stranger.stdout.close()


# threads


def test_threads_that_store_and_load_side_by_side(served: DaemonThread, client: Client) -> None:
    tiers = client(size=1 << 20)

    def work(number: int) -> None:
        for round_ in range(15):
            chain = chain_of(4, first_token=10_000 * number + 100 * round_)
            (reservation,) = tiers.reserve([wanted(chain)])
            assert reservation is not None
            fill(tiers, reservation)
            tiers.seal(reservation, records(reservation, chain), tiers.epoch)
            assert tiers.drain(60)
            assert load(tiers, chain) == 4
            assert tiers.holds(chain.hashes) == [True] * 4

    at_once(*(partial(work, number) for number in range(3)))

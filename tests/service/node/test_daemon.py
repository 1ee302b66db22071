"""Stories of the daemon: blocks shared by processes, clients that die, hang and babble, daemons that come back."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_rig import kvtier
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, wait_until
from extent import brief
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_rig import (
    FINGERPRINT,
    PATIENCE,
    Attach,
    DaemonProcess,
    DaemonThread,
    Serve,
    ask,
    attach,
    attached,
    client_child,
    drops,
    end_child,
    environment,
    fill,
    greeted,
    load,
    misses,
    raw,
    records,
    says,
    store,
    verify,
    wanted,
    where,
)
from service_rig import attach as attach_client

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Ask, Holds, pack_frame, pack_request
from kvtier.service.node.daemon import _TICK, Daemon
from kvtier.service.node.loop import Listener, Loop
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, KVMismatch
from kvtier.tiers.hierarchy import io_queue
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution, Overlap, Pending
from kvtier.tiers.naming.kv_probe import KVProbe
from kvtier.tiers.tier import Outcome

# sharing


def test_what_one_process_stores_another_loads(home: Path, serve: Serve, attach: Attach) -> None:
    serve()
    tiers, chain = attach(), chain_of(4)
    assert where(tiers, chain) == Attribution(4, miss=4)
    assert store(tiers, chain) == 4
    reader = client_child(home / "s", "load")
    assert says(reader) == "4"  # and every byte was right, in a process that never saw them
    assert reader.wait(60) == 0
    end_child(reader)


def test_a_block_being_filled_is_found_by_nobody_and_stored_once(serve: Serve, attach: Attach) -> None:
    serve()
    one, other, chain = attach(), attach(), chain_of(4)
    (filling,) = one.reserve([wanted(chain)])
    assert filling is not None
    assert where(other, chain) == Attribution(4, miss=4)
    (again,) = other.reserve([wanted(chain)])  # the first one is at it
    assert again is not None
    assert not again.hashes
    fill(one, filling)
    one.seal(filling, records(filling, chain), one.epoch)
    one.tick()
    wait_until(lambda: load(other, chain) == 4)


def test_a_socket_that_was_removed_is_there_again(
    home: Path, serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.service.node.daemon._LOOK", 0.05)
    served = serve()
    one, chain = attach(), chain_of(4)
    store(one, chain)
    (home / "s").unlink()  # by a cleaner of temporary files
    wait_until(lambda: "it was removed, and is there again" in caplog.text)
    other = attach()
    assert other.member is not None
    assert load(other, chain) == 4
    assert load(one, chain) == 4  # who was attached stays so
    # Where it cannot be made again, that is said: engines cannot get in.
    (home / "s").unlink()
    (home / "s").write_text("a file of somebody's")
    wait_until(lambda: bool(served.daemon.health.wanting))
    (found,) = served.daemon.health.wanting
    assert (found.part, found.is_needed) == ("socket", True)
    assert "a file that is no socket is there" in found.why
    (home / "s").unlink()
    wait_until(lambda: not served.daemon.health.wanting)  # `done`: it listens
    assert load(attach(), chain) == 4


def test_a_moved_directory_leaves_no_room_for_a_second_daemon(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.node.daemon._LOOK", 0.05)
    at = home / "run"
    at.mkdir()
    with ExitStack() as running:
        served = DaemonThread(at / "s", host={"size": 1 << 20})
        running.callback(served.close)
        at.rename(home / "moved")
        at.mkdir(mode=0o700)
        wait_until((at / "s").exists)
        with pytest.raises(ConfigError, match=f"the daemon with pid {os.getpid()} serves it"):
            Listener(at / "s")
        # Where another one was first, its socket is left alone, and health says why no engine gets in here.
        at.rename(home / "moved again")
        at.mkdir(mode=0o700)
        with closing(Listener(at / "s")) as other:
            wait_until(lambda: bool(served.daemon.health.wanting))
            assert "serves it" in served.daemon.health.wanting[0].why
            running.close()
            assert other.is_there  # nor does the end of this one take it away


def test_a_directory_replaced_at_start_keeps_the_other_socket(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, chmod, others = home / "run", os.chmod, list[Listener]()
    at.mkdir()

    def replaced(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr("os.chmod", chmod)
        at.rename(home / "moved")
        at.mkdir(mode=0o700)
        others.append(Listener(at / "s"))
        chmod(*arguments, **named)

    monkeypatch.setattr("os.chmod", replaced)  # bound, and not looked at yet
    ours = Listener(at / "s")
    with closing(others[0]) as other:
        assert [ours.is_there, other.is_there] == [False, True]
        ours.close()
        assert other.is_there


def test_models_that_name_no_size_get_half_of_what_is_left(serve: Serve, attach: Attach) -> None:
    serve(host={"size": 1 << 20})
    shares = [attach(size=0, fingerprint=bytes([number]) * 32) for number in range(3)]
    assert [each.num_slots for each in shares] == [128, 64, 32]
    asked = attach(size=1 << 20, fingerprint=b"a" * 32)  # who asks for all of it gets the rest
    assert asked.num_slots == 32
    for tiers in (*shares, asked):
        store(tiers, chain_of(4))
        assert load(tiers, chain_of(4)) == 4


def test_two_models_never_see_each_other_and_share_one_budget(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": 32 * SLOT_BYTES})
    one = attach(size=20 * SLOT_BYTES)
    other = attach(size=20 * SLOT_BYTES, fingerprint=b"o" * 32)
    assert (one.num_slots, other.num_slots) == (20, 12)  # what it asked for; what was left
    chain = chain_of(4)
    store(one, chain)
    assert where(other, chain).miss == 4
    third = attach(size=12 * SLOT_BYTES, fingerprint=b"t" * 32)  # it starts without, and says why
    assert "has 0 of 128KiB for this model, 8 of its blocks take 32KiB; raise it there" in third.wanting["daemon"]
    assert where(third, chain).miss == 4
    # Whoever leaves first makes room: the second model's tiers are idle, and go. The third one comes by itself.
    other.close()
    wait_until(lambda: attached(third))
    assert (third.num_slots, third.wanting) == (12, {})
    assert len(served.daemon.call(served.daemon.namespaces)) == 2
    assert load(one, chain) == 4


def test_tiers_stay_warm_when_nobody_uses_them(serve: Serve, attach: Attach) -> None:
    serve()
    chain = chain_of(4)
    first = attach()
    store(first, chain)
    first.close()
    second = attach()
    assert load(second, chain) == 4


def test_a_number_of_a_file_that_was_closed_is_not_the_old_file() -> None:
    """Two files are ready in one round; the first one's handler closes the second, and opens one of its number."""
    loop, said = Loop(), list[str]()
    readers = [os.eventfd(1), os.eventfd(1)]

    def replace(old: int) -> None:
        for fd in readers:
            loop.forget(fd)
        os.close(old)
        assert os.eventfd(0) == old
        loop.watch(old, lambda events: said.append("the new file is not ready"))

    for fd, other in (readers, readers[::-1]):
        loop.watch(fd, lambda events, other=other: replace(other))

    def turn() -> float:
        if next(rounds, None) is None:
            loop.stop()
        return 0.0

    rounds = iter(range(3))
    loop.run(turn)
    assert said == []
    loop.close()
    for fd in readers:
        os.close(fd)


def test_the_same_model_with_other_blocks_is_refused(serve: Serve, attach: Attach) -> None:
    serve()
    attach()
    why = attach(slot_bytes=2 * SLOT_BYTES).wanting["daemon"]
    assert "4 tokens in 8192 bytes: this model's here are 4 tokens in 4096; run one kvtier everywhere" in why


def test_a_reset_is_everybodys(serve: Serve, attach: Attach) -> None:
    serve()
    one, other, chain = attach(), attach(), chain_of(4)
    store(one, chain, 0, 2)
    (admitted_before,) = other.reserve([wanted(chain, 2)])
    assert admitted_before is not None
    epoch = other.epoch
    one.reset()
    assert where(one, chain).miss == 4
    wait_until(lambda: attached(other) and other.epoch == epoch + 1)  # it was told
    fill(other, admitted_before)
    other.seal(admitted_before, records(admitted_before, chain), epoch)
    assert other.drain(60)
    assert where(other, chain).miss == 4


# the slab


def test_blocks_come_back_from_the_slab_for_another_client(serve: Serve, disk_dir: Path, attach: Attach) -> None:
    serve(host={"size": 16 * SLOT_BYTES}, file={"path": disk_dir, "size": 1 << 22})
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    for n in range(1, 5):  # L2 has sixteen slots: the first chain goes
        store(tiers, chain_of(4, first_token=1000 * n))
    other = attach()
    assert where(other, chain)["file"] == 4
    assert load(other, chain) == 4  # PENDING first, then the daemon pushes the news
    assert where(other, chain)["l2"] == 4


@pytest.mark.parametrize("end", brief([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM]))
def test_a_daemon_that_is_started_anew(home: Path, disk_dir: Path, end: signal.Signals, attach: Attach) -> None:
    options = {"host__size": "1MiB", "file__path": str(disk_dir), "file__size": "4MiB"}
    daemon = DaemonProcess(home / "s", **options)
    ready = (
        f" INFO kvtier: ready on {home / 's'}, 1MiB of host memory, its token in {home / 's.token'}, http on 127.0.0.1:"
    )
    assert ready in daemon.first_line
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    region, epoch = tiers.region, tiers.epoch
    claim, promised = ask(tiers, chain)
    assert promised == 4
    lease = tiers.lease(claim)
    (reservation,) = tiers.reserve([wanted(chain_of(4, first_token=1000))])
    assert reservation is not None

    assert daemon.end(end) == (-signal.SIGKILL if end == signal.SIGKILL else 0)
    assert where(tiers, chain) == Attribution(4, miss=4)  # no exception: a miss
    assert tiers.reserve([wanted(chain)]) == [None]
    assert drops(tiers, Outcome.BREAKER_OPEN) == 4
    assert region is not None
    assert bytes(region.slot(lease.slots[0]))  # a copy that goes on reads what is no use to it, and nothing faults

    daemon = DaemonProcess(home / "s", **options)
    wait_until(lambda: attached(tiers))
    assert tiers.region is not region
    assert tiers.epoch > epoch  # who knows what was reset meanwhile
    assert where(tiers, chain) == Attribution(4, file=4)  # the slab is warm
    assert load(tiers, chain) == 4
    lease.release()  # void, and harmless
    tiers.seal(reservation, records(reservation, chain_of(4, first_token=1000)), tiers.epoch)
    assert drops(tiers, Outcome.CLOSED) == 4
    tiers.tick()
    assert region.num_slots == 0  # nothing copies to the old memory any more: it is unmapped
    tiers.check()
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0
    assert not (home / "s").exists()


# clients that die


def test_a_killed_client_gives_everything_back(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve()
    witness = attach()
    holder = client_child(home / "s", "hold")
    assert says(holder) == "ready"
    held = [client for client in served.daemon.call(served.daemon.clients) if client.leases]
    assert [(client.pids, client.leases, client.reservations) for client in held] == [([holder.pid], 1, 1)]
    end_child(holder)
    wait_until(lambda: len(served.daemon.call(served.daemon.clients)) == 1)
    served.check()
    counts = served.daemon.counts
    assert (counts["leases_reclaimed"], counts["reservations_reclaimed"]) == (1, 1)
    assert load(witness, chain_of(4, first_token=1000)) == 4  # what it had sealed is everybody's
    assert where(witness, chain_of(4, first_token=2000)).miss == 4


def test_slots_wait_for_a_worker_that_outlives_its_client(home: Path, serve: Serve) -> None:
    """A DMA may outlive the socket."""
    served = serve()
    holder = client_child(home / "s", "join")
    worker = int(says(holder).removeprefix("joined "))
    holder.kill()
    holder.wait(60)
    wait_until(lambda: [client.connected for client in served.daemon.call(served.daemon.clients)] == [False])
    time.sleep(0.2)
    (dead,) = served.daemon.call(served.daemon.clients)
    assert (dead.pids, dead.leases, dead.reservations) == ([worker], 1, 1)
    served.daemon.call(served.daemon.check)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not served.daemon.call(served.daemon.clients))
    served.check()
    end_child(holder)


def test_a_hundred_clients_killed_leave_nothing_behind(home: Path, attach: Attach) -> None:
    """FAULTS 41."""
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    witness = attach()
    store(witness, chain_of(4))
    files = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    cycles = client_child(home / "s", "cycles", "100")
    assert says(cycles) == "done"
    assert cycles.wait(60) == 0
    end_child(cycles)
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) == files)
    witness.check()  # no lease, no filling slot
    assert load(witness, chain_of(4)) == 4  # nobody else noticed
    witness.close()
    assert daemon.end(signal.SIGTERM) == 0
    assert daemon.lines == []


def test_a_client_that_says_goodbye_leaves_at_once(serve: Serve, attach: Attach) -> None:
    served = serve()
    tiers, chain = attach(), chain_of(4)
    (reservation,) = tiers.reserve([wanted(chain)])
    tiers.close()  # in this process, which lives on
    wait_until(lambda: not served.daemon.call(served.daemon.clients))
    served.check()
    assert reservation is not None


def test_a_stopped_client_holds_up_nobody_and_its_promise_lapses(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": 16 * SLOT_BYTES}, lease_deadline=1.0)
    tiers, chain = attach(), chain_of(8)
    store(tiers, chain)
    claim, promised = ask(tiers, chain)
    assert promised == 8
    # It is not scheduled for a while, and neither polls nor reads.
    other = attach()
    wait_until(lambda: served.daemon.counts["promises_lapsed"] == 1)
    assert store(other, chain_of(8, first_token=1000)) == 8
    assert store(other, chain_of(8, first_token=2000)) == 8  # in the very slots that were promised
    # Back again: what it was promised is gone, and it knows without asking.
    assert len(tiers.lease(claim)) == 0
    assert tiers.poll(claim) == 0
    assert load(other, chain_of(8, first_token=2000)) == 8


def test_a_client_that_is_stopped_keeps_what_it_copies_from(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": 16 * SLOT_BYTES})
    witness = attach()
    holder = client_child(home / "s", "hold")
    assert says(holder) == "ready"
    holder.send_signal(signal.SIGSTOP)
    for n in range(4):  # eight slots are free or may go, whatever the stopped one does
        assert store(witness, chain_of(8, first_token=10_000 * (n + 1))) == 8
    held = [client.leases for client in served.daemon.call(served.daemon.clients)]
    assert sorted(held) == [0, 1]
    assert load(witness, chain_of(4, first_token=1000)) == 4  # leased: nothing took its place
    holder.send_signal(signal.SIGCONT)
    end_child(holder)
    wait_until(lambda: len(served.daemon.call(served.daemon.clients)) == 1)


def test_a_daemon_that_is_stopped_costs_one_deadline_and_is_found_again(home: Path) -> None:
    daemon, chain = DaemonProcess(home / "s", host__size="1MiB"), chain_of(4)
    tiers = attach_client(home / "s", deadline=3.0)
    store(tiers, chain)
    claim, _ = ask(tiers, chain)
    lease = tiers.lease(claim)
    daemon.process.send_signal(signal.SIGSTOP)
    assert tiers.reserve([wanted(chain_of(4, first_token=1000))]) == [None]
    assert drops(tiers, Outcome.TIMEOUT) == 4
    assert tiers.reserve([wanted(chain_of(4, first_token=1000))]) == [None]  # at once, and so is the rest
    wait_until(lambda: not attached(tiers))  # silent for five seconds: there is none any more
    assert tiers.reserve([wanted(chain_of(4, first_token=1000))]) == [None]
    assert (drops(tiers, Outcome.TIMEOUT), drops(tiers, Outcome.BREAKER_OPEN)) == (8, 4)
    assert where(tiers, chain).miss == 4
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: attached(tiers))
    assert load(tiers, chain) == 4
    # What it reserved for an answer that came too late it was told to give up, on the connection that is gone.
    lease.release()
    wait_until(lambda: store(tiers, chain_of(4, first_token=1000)) == 4)
    tiers.check()
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0


def test_a_promise_that_is_asked_about_does_not_lapse(serve: Serve, attach: Attach) -> None:
    serve(lease_deadline=4.0)
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    claim, _ = ask(tiers, chain)
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        assert tiers.poll(claim) == 4
        time.sleep(0.02)
    with tiers.lease(claim) as lease:
        assert len(lease) == 4


# clients that babble


def test_a_client_that_never_reads_is_cut_off(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve()
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    rude = greeted(home / "s")

    def ask_for_ever() -> None:
        for number in range(1, 10_000):
            rude.sendall(pack_request(number, [Holds(b"".join(chain.hashes * 8192))]))  # the answer takes 32 KiB

    with pytest.raises(OSError, match=r"pipe|reset"):
        ask_for_ever()
    wait_until(lambda: served.daemon.counts["slow_reader"] == 1)
    assert load(tiers, chain) == 4
    rude.close()


def test_more_answers_than_fit_at_once_come_as_their_client_reads(serve: Serve, attach: Attach) -> None:
    """As where many requests begin with one long document: an answer takes 16 bytes a block."""
    served = serve(host={"size": 4096 * SLOT_BYTES})
    tiers, chain = attach(size=4096 * SLOT_BYTES), chain_of(2048)
    assert store(tiers, chain) == 2048
    member = tiers.member
    claims = [tiers.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE) for _ in range(256)]  # 8 MiB of answers
    answers = dict[int, int | Pending]()
    while len(answers) < len(claims):
        found = {i: tiers.poll(claim) for i, claim in enumerate(claims) if i not in answers}
        answers |= {i: each for i, each in found.items() if each is not PENDING}
        tiers.wait_progress(0.1)
    assert set(answers.values()) == {2048}
    assert tiers.member == member  # it was never cut off
    for claim in claims:
        tiers.cancel(claim)
    tiers.tick()
    wait_until(lambda: served.daemon.call(served.daemon.clients)[0].claims == 0)


def test_answers_that_are_not_read_keep_no_slots(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve(lease_deadline=1.0, host={"size": 4096 * SLOT_BYTES})
    tiers, chain = attach(size=4096 * SLOT_BYTES), chain_of(2048)
    store(tiers, chain)
    with greeted(home / "s") as rude:
        for number in range(1, 65):
            rude.sendall(pack_request(0, [Ask(number, chain.root, 0, 4, b"".join(chain.hashes), Overlap.NONE)]))
        wait_until(lambda: served.daemon.counts["slow_reader"] == 1)
        [namespace] = served.daemon.call(served.daemon.namespaces)
        wait_until(lambda: namespace.hierarchy.host.pool.counts().leased == 0)
    assert load(tiers, chain) == 2048


@pytest.mark.parametrize("is_legible", [True, False])  # False: garbage came just before
def test_a_promise_taken_just_before_its_client_is_cut_off_keeps_its_slots(
    serve: Serve, attach: Attach, is_legible: bool
) -> None:
    served = serve(host={"size": 64 * SLOT_BYTES})
    one, other, chain = attach(), attach(), chain_of(8)
    store(one, chain)
    claim, _ = ask(one, chain)
    assert one.member is not None
    session, is_busy, goes_on = served.daemon._sessions[one.member[1]], threading.Event(), threading.Event()

    def turn() -> None:
        """Another client's message, by which this one has most unread bytes of all."""
        is_busy.set()
        assert goes_on.wait(PATIENCE)
        session.cut_off("it keeps too much", "buffer_full", is_legible=is_legible)

    served.daemon.loop.call(turn)
    assert is_busy.wait(PATIENCE)
    lease = one.lease(claim)  # the daemon has not read this
    goes_on.set()
    wait_until(lambda: served.daemon.counts["buffer_full_holding"] == 1)
    for number in range(1, 9):
        store(other, chain_of(8, first_token=1000 * number))
    assert len(lease) == 8
    verify(one, lease)  # while its copies run nobody overwrites them
    lease.release()
    one.tick()
    wait_until(lambda: attached(one) and served.daemon.counts["replaced"] == 1)


def test_a_name_given_twice_a_version_of_the_future_and_silence(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve()
    tiers, chain = attach(), chain_of(4)
    for frame, why in [
        (pack_frame(["kvtier", 99, "Hello"]), "protocol version 99, this side speaks 6 to 10"),
        (pack_frame(["kvtier", 10, "Hello", b"short", 4, 4096, 1, False, [], None, None]), "length >= 32"),
        (pack_frame(["kvtier", 10, "Join", b"x" * 16]), "no such client"),
        (b"\xff\xff\xff\x7f", "frame of 2147483647 bytes: this side takes 1 to 8192"),
        (b"GET / HTTP/1.1\r\n\r\n", "this side takes 1 to 8192"),
    ]:
        with raw(home / "s") as connection:
            connection.sendall(frame)
            assert why.encode() in connection.recv(4096)
            assert connection.recv(10) == b""
    with greeted(home / "s") as connection:
        connection.sendall(pack_request(0, [Ask(1, chain.root, 0, 4, chain.hashes[0] * 2, Overlap.NONE)]))
        assert connection.recv(10) == b""
    wait_until(lambda: served.daemon.counts["malformed"] == 5)
    store(tiers, chain)
    assert load(tiers, chain) == 4


def test_any_bytes_at_all(home: Path, serve: Serve, attach: Attach) -> None:
    """FAULTS 39: whatever is sent before or after a handshake, the daemon goes on serving, and nothing is left over."""
    served = serve()
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    body = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=64)
        | st.text(max_size=8) | st.just(chain.hashes[0]) | st.just(b"".join(chain.hashes)),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=20,
    )  # fmt: skip
    operation = st.tuples(st.integers(0, 16), body, body, body, body, body)
    request = st.tuples(st.integers(0, 9), st.lists(st.one_of(operation, body), max_size=3))
    frame = st.one_of(st.binary(max_size=64), body.map(pack_frame), request.map(pack_frame))

    @settings(max_examples=brief(40, 150), suppress_health_check=list(HealthCheck), database=None)
    @given(st.booleans(), st.lists(frame, min_size=1, max_size=4))
    def babble(greets: bool, frames: list[bytes]) -> None:
        with (greeted if greets else raw)(home / "s") as connection, suppress(OSError):  # cut off in the midst of it
            for each in frames:
                connection.sendall(each)

    babble()
    # This process lives on, so what a connection held stays until its copies are known to have ended.
    for client in list(served.daemon.call(lambda: [*served.daemon._sessions.values()])):
        if not client.connected:
            served.daemon.call(lambda client=client: client.end("died"))
    served.check()
    assert served.daemon.counts["error"] == 0
    assert load(tiers, chain) == 4 or where(tiers, chain).miss == 4  # one of them may have said "reset"


# the socket


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(home: Path) -> None:
    daemon = DaemonProcess(home / "s")
    assert (home / "s").stat().st_mode & 0o777 == 0o600
    ended = kvtier("serve", "--socket", home / "s", "--http", "127.0.0.1:0")
    why = f"the daemon with pid {daemon.process.pid} serves it; stop that one, or choose another path"
    assert (ended.returncode, ended.stderr) == (2, f'kvtier: [service] socket "{home / "s"}": {why}\n')
    daemon.end(signal.SIGKILL)
    assert (home / "s").exists()  # stale: nobody had the time to take it away
    daemon = DaemonProcess(home / "s")
    assert "ready" in daemon.first_line
    assert daemon.end(signal.SIGINT) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_is_turned_away(home: Path, serve: Serve) -> None:
    served = serve()
    home.chmod(0o755)
    (home / "s").chmod(0o666)  # whatever the file's mode says
    program = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "print(s.recv(4096), s.recv(1))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(home / "s")], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert "user 12345 may not use the daemon of user 0" in told.stdout
    assert served.daemon.counts["turned_away"] == 1


def test_a_daemon_without_files_takes_clients_in_later(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve()
    first = attach()
    real = served.daemon._listener.socket

    class NoFile:
        """A listener that may open no more."""

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            return real.fileno()

    served.daemon.call(lambda: setattr(served.daemon._listener, "socket", NoFile()))
    with raw(home / "s"):  # in the backlog
        wait_until(lambda: served.daemon.counts["not_accepted"] >= 1)
        began, before = time.monotonic(), served.daemon.counts["not_accepted"]
        time.sleep(0.3)
        tries = served.daemon.counts["not_accepted"] - before
        assert tries <= (time.monotonic() - began) / _TICK + 2  # it does not spin
        served.daemon.call(lambda: setattr(served.daemon._listener, "socket", real))
        wait_until(lambda: len(served.daemon.call(served.daemon.clients)) == 2)
    assert store(first, chain_of(4)) == 4


def test_a_daemon_without_threads_goes_on(serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection of another node takes one, and a container has only so many."""
    served, looks = serve(), list[str]()
    tiers = attach()

    class NoThread(threading.Thread):
        def start(self) -> None:
            looks.append(self.name)
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(io_queue, "Thread", NoThread)
        wait_until(lambda: looks.count("kvtier-aside") >= 2)
        assert ask(tiers, chain_of(4))[1] == 0  # its loop serves
    assert store(tiers, chain_of(4)) == load(tiers, chain_of(4)) == 4
    wait_until(lambda: served.daemon.call(lambda: not served.daemon.health.wanting))


def test_places_where_no_socket_can_be(home: Path) -> None:
    (home / "file").write_text("precious")
    with pytest.raises(ConfigError, match="a file that is no socket is there"):
        Daemon(Config(), home / "file")
    assert (home / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="make that directory"):
        Daemon(Config(), home / "none" / "s")
    with pytest.raises(ConfigError, match=r"\d+ bytes, at most 107; choose a shorter path"):
        Daemon(Config(), home / ("s" * 100))
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="others may replace files"):
        Daemon(Config(), home / "s")


def test_serve_needs_a_place() -> None:
    done = kvtier("serve")
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: [service] socket none: ")
    assert done.stderr.count("\n") == 1


def test_an_engine_finds_the_daemon_by_its_configuration(home: Path, serve: Serve) -> None:
    from kvtier.connector.local import open_tiers
    from kvtier.service.node.namespaces import BlockDimensions

    serve()
    blocks = BlockDimensions(4, SLOT_BYTES)
    tiers = open_tiers(Config(service={"socket": home / "s"}), FINGERPRINT, blocks)
    assert isinstance(tiers, RemoteTiers)
    assert tiers.num_slots == 128  # it names no [host] size: half of the budget, which is a mebibyte
    assert misses(tiers, Outcome.ABSENT) == 0
    tiers.close()


def test_a_client_whose_model_computes_other_kv_is_told_apart(serve: Serve, attach: Attach) -> None:
    """A namespace is of what its first client's model computes; one that was not asked may use it."""
    served = serve()
    planes = [np.random.default_rng(seed).normal(size=(2, 7, 32)) for seed in range(4)]
    ours, other = (KVProbe.of([plane * scale for plane in planes], "float32").packed() for scale in (1.0, 1.5))
    attach()
    first = attach(kv_probe=ours)
    store(first, chain_of(4))
    with pytest.raises(KVMismatch, match="host memory: the KV kept under this model's name was computed otherwise"):
        attach(kv_probe=other)
    assert load(attach(kv_probe=ours), chain_of(4)) == 4
    assert served.daemon.counts["refused"] == 1


NUM_CLIENTS = 16


def test_sixteen_clients_that_start_at_once_beside_busy_processes_keep_their_daemon(home: Path) -> None:
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    busy = [client_child(home / "s", "busy") for _ in range(2)]
    clients = [client_child(home / "s", "steps", "20") for _ in range(NUM_CLIENTS)]
    told = [json.loads(says(each)) for each in clients]
    # However late an answer was: nobody's connection was given up, nobody met a daemon that was gone.
    assert [(each["lost"], each["gone"]) for each in told] == [(0, 0)] * NUM_CLIENTS
    assert sum(each["stored"] for each in told) > 0
    for process in (*clients, *busy):
        end_child(process)
    witness = attach(home / "s")
    witness.check()
    witness.close()
    assert daemon.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_client_killed_within_a_step_leaves_no_slot(
    home: Path, serve: Callable[..., DaemonThread], whole: bool
) -> None:
    """FAULTS 41."""
    served = serve(host={"size": 256 * SLOT_BYTES})
    witness = attach(home / "s", size=1 << 20)
    client = client_child(home / "s", "whole" if whole else "half")
    assert says(client) == "ready"
    num_held = 64  # what the message reserves, or what it did not seal: it was never there as a whole
    wait_until(
        lambda: [c.reservations for c in served.daemon.call(served.daemon.clients) if c.reservations] == [num_held]
    )
    end_child(client)
    wait_until(lambda: len(served.daemon.call(served.daemon.clients)) == 1)
    served.check()
    assert served.daemon.counts["reservations_reclaimed"] == num_held
    [namespace] = served.daemon.call(served.daemon.namespaces)
    assert namespace.hierarchy.host.pool.counts().filling == 0
    found = [load(witness, chain_of(1, first_token=100_000 + 64 * n)) for n in range(128)]
    assert found == ([1] * 64 + [0] * 64 if whole else [0] * 128)
    witness.close()


def test_a_daemon_that_is_killed_within_a_step_costs_that_step(home: Path) -> None:
    """FAULTS 41: nobody waits for the deadline of one that is gone."""
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    tiers, chains = attach(home / "s"), [chain_of(1, first_token=64 * n) for n in range(64)]
    first = tiers.reserve([wanted(each) for each in chains[:8]])
    for chain, reservation in zip(chains, first, strict=False):
        assert reservation is not None
        fill(tiers, reservation)
        tiers.seal(reservation, records(reservation, chain), tiers.epoch)
    # It is stopped, so that it has read none of the message; and killed while the step waits for its answer.
    daemon.process.send_signal(signal.SIGSTOP)
    killing = threading.Timer(0.2, daemon.end, [signal.SIGKILL])
    killing.start()
    assert tiers.reserve([wanted(each) for each in chains[8:]]) == [None] * 56
    assert drops(tiers, Outcome.TIMEOUT) == 56
    killing.join(PATIENCE)
    # Another one has none of it, and is of use at once.
    other = DaemonProcess(home / "s", host__size="1MiB")
    wait_until(lambda: attached(tiers))
    assert where(tiers, chains[0]).miss == 1
    [reservation] = tiers.reserve([wanted(chains[0])])
    assert reservation is not None
    fill(tiers, reservation)
    tiers.seal(reservation, records(reservation, chains[0]), tiers.epoch)
    assert tiers.drain(PATIENCE)
    assert load(tiers, chains[0]) == 1
    tiers.check()
    tiers.close()
    assert other.end(signal.SIGTERM) == 0

"""Stories of clients that make the daemon keep their bytes: all of them together stay within one bound."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from doubles import BLOCK_SIZE, chain_of, wait_until
from hypothesis import given
from hypothesis import strategies as st
from service_rig import (
    FINGERPRINT,
    Attach,
    DaemonProcess,
    DaemonThread,
    ask,
    attach,
    greeted,
    load,
    store,
    store_partial,
    where,
)

from kvtier.connector.daemon.wire import OPERATIONS
from kvtier.service.node.daemon import MAX_CLIENTS
from kvtier.service.node.holdings import MAX_BUFFERED, Buffers
from kvtier.service.node.operators import Pins
from kvtier.service.node.status import MemoryUse, exposition, status
from kvtier.tiers import tier as tier_module
from kvtier.tiers.file import file_io, slab_rows
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.naming.chain import TokenChain, root_hash

WITHHELD = 15 << 20  # bytes of a frame of 16 MiB whose last one never comes
HEAD = (16 << 20).to_bytes(4, "little")


def own_bytes(daemon: DaemonProcess) -> int:
    """Memory of its own: the region is a shared file's."""
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def events(daemon: DaemonProcess) -> dict[str, float]:
    told: dict[str, float] = httpx2.get(f"http://{daemon.http}/status", timeout=60).json()["events"]
    return told


@pytest.fixture
def daemon(home: Path) -> Iterator[DaemonProcess]:
    started = DaemonProcess(home / "s", host__size="1MiB")
    yield started
    assert started.end(signal.SIGTERM) == 0


def test_forty_clients_that_withhold_a_frame_s_end_cost_what_four_do(home: Path, daemon: DaemonProcess) -> None:
    with contextlib.ExitStack() as opened:
        honest, chain = attach(home / "s"), chain_of(4)
        opened.callback(honest.close)
        store(honest, chain)
        # A client in the middle of a small frame, which its engine will finish when it next has something to say.
        slow = opened.enter_context(greeted(home / "s"))
        slow.sendall(HEAD + bytes(200 << 10))
        before = own_bytes(daemon)
        for _ in range(40):
            hoarder = opened.enter_context(greeted(home / "s"))
            with contextlib.suppress(OSError):  # it may be the one that goes
                hoarder.sendall(HEAD + bytes(WITHHELD))
            assert load(honest, chain) == 4  # whoever is honest notices nothing
        # Together they never cost more than the bound, and what it takes to move a frame.
        assert own_bytes(daemon) - before < MAX_BUFFERED + (48 << 20)
        # All but four had to go, and that is counted.
        wait_until(lambda: events(daemon).get("buffer_full") == 36)
        # Whoever keeps little is not among them.
        slow.settimeout(0.2)
        with pytest.raises(TimeoutError):
            slow.recv(1)
        assert load(honest, chain) == 4


@given(st.lists(st.tuples(st.integers(0, MAX_CLIENTS - 1), st.integers(0, 16 << 20)), max_size=80))
def test_who_keeps_no_more_than_its_share_never_goes(notes: list[tuple[int, int]]) -> None:
    kept: dict[int, int] = {}

    def cut(who: int) -> None:
        assert kept[who] == max(kept.values()) > MAX_BUFFERED // MAX_CLIENTS
        kept[who] = 0
        buffers.record(who, 0)

    buffers = Buffers(cut)
    for who, num_bytes in notes:
        kept[who] = num_bytes
        buffers.record(who, num_bytes)
        buffers.check()
        assert buffers.used == sum(kept.values())


# The daemon serves every operation there is.


def test_every_operation_is_served_and_no_code_is_given_twice(home: Path) -> None:
    assert [kind.__struct_config__.tag for kind in OPERATIONS] == list(range(len(OPERATIONS)))
    daemon = DaemonThread(home / "s", host={"size": 1 << 20})
    with closing(attach(home / "s")):
        [session] = daemon.daemon.call(lambda: list(daemon.daemon._sessions.values()))
        assert set(session._verbs) == set(OPERATIONS)
    daemon.close()


# The daemon's loop serves all models, so no call of it may wait for a disk: each such call is on another thread.


WAITS = ("open", "size", "lock", "allocate", "truncate", "sync", "free_bytes", "preadv", "pwritev")
"""Of `FileIO`: whatever waits if the disk hangs. `close` and `unlock` of a file that is not shared do not."""


def prompt(*tokens: int) -> TokenChain:
    chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
    chain.extend([*range(6 * BLOCK_SIZE), *tokens])
    return chain


class SeenCalls:
    """What waits for a disk, and on which threads that was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._directory = str(directory)
        self.is_on = True
        self.calls: dict[threading.Thread, Counter[str]] = {}
        self.locks: list[Any] = []  # for which the loop waits, too
        self.locked: Counter[str] = Counter()  # under these, on whichever thread
        for name in WAITS:
            monkeypatch.setattr(FileIO, name, self._noting(f"FileIO.{name}", getattr(FileIO, name)))
        for name in ("stat", "statvfs"):  # which Python does not tell of
            monkeypatch.setattr(os, name, self._noting(f"os.{name}", getattr(os, name)))
        sys.addaudithook(self._hear)

    def _note(self, what: str) -> None:
        if self.is_on:
            self.calls.setdefault(threading.current_thread(), Counter())[what] += 1
            self.locked[what] += any(lock._is_owned() for lock in self.locks)

    def _noting(self, name: str, original: Any) -> Any:
        def method(*arguments: Any, **named: Any) -> Any:
            if name.startswith("FileIO") or self._directory in str(arguments[0]):
                self._note(name)
            return original(*arguments, **named)

        return method

    def _hear(self, event: str, arguments: Any) -> None:
        """Every call of Python's own that names a file of the slab: it is open, os.rename, os.scandir, …"""
        if self.is_on and arguments and isinstance(path := arguments[0], str | Path) and self._directory in str(path):
            self._note(event)


@pytest.mark.parametrize("knows_nowait", [True, False])
def test_no_verb_of_a_client_has_the_loop_wait_for_the_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch, knows_nowait: bool, attach: Attach
) -> None:
    seen = SeenCalls(monkeypatch, home / "slab")
    monkeypatch.setattr(file_io, "_is_in_memory", lambda fd: False)
    if not knows_nowait:
        monkeypatch.setattr(slab_rows, "peeking", lambda io, fd: file_io._nothing)
    daemon = DaemonThread(home / "s", host={"size": 1 << 18}, file={"path": home / "slab", "size": "1MiB"})
    try:
        one, other = attach(), attach()
        chains = [prompt(number, number) for number in range(40)]  # more than host memory has room for
        for chain in chains[:8]:
            store(one, chain)
            store_partial(one, chain)
        for number, chain in enumerate(chains):
            store(other, chain, first=6)
            assert load(one, chains[number % 8]) >= 6
        claim, _ = ask(one, prompt(99))  # whose next block begins as others' do
        one.cancel(claim)
        assert where(one, chains[0]).blocks >= 6
        (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
        seen.locks.append(namespace.hierarchy._lock)
        pins = Pins(daemon.daemon)
        for _ in range(2):  # whatever is old is looked at again
            monkeypatch.setattr(tier_module, "_EVERY", 0.0)
            exposition(daemon.daemon, pins, MemoryUse())
            status(daemon.daemon, pins)
        store(one, prompt(98, 98))
        daemon.check()
        one.reset()
        assert load(one, chains[0]) == 0
    finally:
        daemon.close()
        seen.is_on = False
    on_loop = seen.calls.pop(daemon._thread, Counter())
    assert not on_loop, f"on the loop's thread: {dict(on_loop)}"
    assert not +seen.locked, f"under a lock that the loop takes: {dict(seen.locked)}"
    elsewhere: Counter[str] = sum(seen.calls.values(), Counter())
    assert elsewhere["os.statvfs"] > 0
    assert elsewhere["FileIO.preadv"] > 0  # the story did go to the disk
    assert elsewhere["FileIO.pwritev"] > 0

"""The daemon's loop serves all models, so no call of it may wait for a disk: each such call is on another thread."""

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from doubles import BLOCK_SIZE
from service_rig import FINGERPRINT, Attach, DaemonThread, ask, load, store, store_partial, where

from kvtier.service.node.operators import Pins
from kvtier.service.node.status import MemoryUse, exposition, status
from kvtier.tiers import tier as tier_module
from kvtier.tiers.file import file_io, slab_rows
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.naming.chain import TokenChain, root_hash

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

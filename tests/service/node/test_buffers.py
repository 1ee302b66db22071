"""Stories of clients that make the daemon keep their bytes: all of them together stay within one bound."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from doubles import chain_of, wait_until
from hypothesis import given
from hypothesis import strategies as st
from service_rig import DaemonProcess, attach, greeted, load, store

from kvtier.service.node.daemon import MAX_CLIENTS
from kvtier.service.node.holdings import MAX_BUFFERED, Buffers

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

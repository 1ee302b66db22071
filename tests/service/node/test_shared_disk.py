"""Several models over one daemon share `[file] size`; a disk that others filled refuses nobody."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles import SLOT_BYTES, chain_of
from fault_rig import rest
from service_rig import Attach, DaemonThread, load, store, where
from service_rig import attach as attach_client

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.tiers.file.file_io import FileIO

GIB = 1 << 30
MODELS = [name * 32 for name in (b"a", b"b", b"c")]
Start = Callable[..., DaemonThread]
CHAIN = chain_of(8)


@pytest.fixture
def start(home: Path, disk_dir: Path) -> Iterator[Start]:
    """A daemon over a directory on a real disk; in the end the laws of each hold, and it is closed."""
    daemons: list[DaemonThread] = []

    def start_one(size: int) -> DaemonThread:
        file = {"path": disk_dir, "size": size, "deadline": "60s"}
        daemons.append(DaemonThread(home / "s", host={"size": 16 << 20}, file=file))
        return daemons[-1]

    yield start_one
    end(daemons[-1])  # the stories end the others


def end(daemon: DaemonThread) -> None:
    try:
        daemon.check()
    finally:
        daemon.close(5.0)  # some story's tier is off


@pytest.fixture
def attach(home: Path, start: Start) -> Iterator[Attach]:
    """Clients, each of a model of its own."""
    clients: list[RemoteTiers] = []

    def attach_one(model: int, slot_bytes: int = SLOT_BYTES) -> RemoteTiers:
        clients.append(attach_client(home / "s", fingerprint=MODELS[model], slot_bytes=slot_bytes, size=4 << 20))
        return clients[-1]

    yield attach_one
    for client in clients:
        client.close()


def forget_l2(daemon: DaemonThread) -> None:
    for namespace in daemon.daemon.call(daemon.daemon.namespaces):
        rest(namespace.hierarchy)
        namespace.hierarchy.host.pool.reset()


def slab_sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.glob("*.slab")]


def test_three_models_of_one_daemon_share_its_disk_and_stay_warm(start: Start, attach: Attach, disk_dir: Path) -> None:
    daemon = start(GIB)
    # Each stores as soon as it is there; the first had the whole gibibyte until then.
    clients = [attach(0)]
    assert slab_sizes(disk_dir)[0] > GIB * 9 // 10
    store(clients[0], CHAIN)
    for model in (1, 2):
        clients.append(attach(model))
        store(clients[model], CHAIN)
    assert sum(slab_sizes(disk_dir)) <= GIB
    assert min(slab_sizes(disk_dir)) >= GIB // 3 - (16 << 20)  # but for the last extent of each
    # All three are served from the slab.
    forget_l2(daemon)
    assert [where(client, CHAIN)["file"] for client in clients] == [8, 8, 8]
    assert [load(client, CHAIN) for client in clients] == [8, 8, 8]
    for client in clients:
        client.close()
    end(daemon)
    # And by the next daemon, whoever comes first.
    start(GIB)
    for model in (2, 0, 1):
        assert load(attach(model), CHAIN) == 8
    assert sum(slab_sizes(disk_dir)) <= GIB


def test_a_model_too_large_runs_without_a_slab(start: Start, attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    daemon = start(1 << 20)
    small, large = attach(0), attach(1, slot_bytes=100 << 10)
    huge = attach(2, slot_bytes=500 << 10)  # a third of the budget holds not one of its blocks
    for client, chain in ((small, CHAIN), (large, chain_of(2)), (huge, chain_of(1))):
        store(client, chain, below=client is not huge)
        assert load(client, chain) == len(chain.hashes)  # from L2
    forget_l2(daemon)
    assert load(small, CHAIN) == 8
    assert load(large, chain_of(2)) == 2
    assert load(huge, chain_of(1)) == 0
    warned = [line for line in caplog.messages if "file tier is off for now, the engine runs on without it" in line]
    assert len(warned) == 1
    assert "raise [file] size or choose another path" in warned[0]


def test_a_daemon_on_a_disk_that_others_filled_serves_what_its_slabs_hold(
    start: Start, attach: Attach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(1 << 20)
    client = attach(0)
    store(client, CHAIN)
    client.close()
    end(daemon)
    # Not one byte is free, and more is asked for than there ever was.
    monkeypatch.setattr(FileIO, "free_bytes", lambda self, directory: 0)
    with caplog.at_level(logging.WARNING):
        start(2 << 20)
        client = attach(0)
    assert load(client, CHAIN) == 8
    assert [line.partition(": ")[2] for line in caplog.messages if "[file]" in line] == [
        'stays at 0.977 MiB of [file] size "2MiB", 992 KiB more do not fit: the directory has 0 B free'
    ]
    # A model that is new here is served from L2.
    other = attach(1)
    store(other, CHAIN, below=False)
    assert load(other, CHAIN) == 8

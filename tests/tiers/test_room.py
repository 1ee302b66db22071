"""How full the storage is that tiers lie on: a real disk, a real server; whoever asks waits for neither."""

import os
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import pytest
from doubles import wait_until
from redis_rig import RedisServer
from redis_stories import opened
from slab_rig import SLOT

from kvtier.tiers import tier as tier_module
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.tier import StoragePlace


def test_a_slab_tells_how_full_its_disk_is(disk_dir: Path) -> None:
    store = FileStore.open(disk_dir, bytes(32), slot_bytes=SLOT, block_size=4, size=60 * 4400, mode="buffered")
    on_disk, slab = store.room()
    place, used, limit, _ = on_disk
    disk = os.statvfs(disk_dir)
    assert place == str(disk_dir)
    assert limit is not None
    assert 0 < used <= limit <= disk.f_blocks * disk.f_frsize
    # And how much of it the slab takes, of what it may take.
    assert tuple(slab) == (str(store.path), os.stat(store.path).st_blocks * 512, store.superblock.file_bytes, True)
    assert 0 < slab.used
    store.close()


def test_a_file_system_that_hangs_has_nobody_wait_for_it(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_EVERY", 0.0)
    gate, looked, found = Event(), Event(), os.statvfs(disk_dir)  # others use this disk meanwhile
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    store = FileStore.open(disk_dir, bytes(32), slot_bytes=SLOT, block_size=4, size=60 * 4400, mode="buffered")
    known = store.room()

    def hung(path: Path) -> os.statvfs_result:
        looked.set()
        gate.wait(60)
        return found

    wait_until(lambda: not threads_named("kvtier-room"))
    monkeypatch.setattr(os, "statvfs", hung)
    assert store.room() == known
    assert looked.wait(60)
    for _ in range(3):
        assert store.room() == known  # what it was; one thread waits, no more
    assert len(threads_named("kvtier-room")) == 1
    gate.set()
    wait_until(lambda: not threads_named("kvtier-room"))
    store.close()


def threads_named(name: str) -> list[Thread]:
    return [each for each in enumerate_threads() if each.name == name]


def test_a_server_tells_its_memory_in_the_background(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = redis_server
    monkeypatch.setattr(tier_module, "_EVERY", 0.0)
    with opened(server.url) as store:
        assert store.room() == ()  # nobody waits: it has only been asked
        wait_until(lambda: len(store.room()) == 1)
        [(place, used, limit, _)] = store.room()
        assert (place in server.url, used > 0, limit) == (True, True, None)
        server.cli("CONFIG", "SET", "maxmemory", "64mb")
        wait_until(lambda: [each.limit for each in store.room()] == [64 << 20])
        # One that does not tell any more is not told of either.
        server.kill()
        wait_until(lambda: store.room() == ())


def test_figures_follow_it() -> None:
    metrics = Metrics()
    metrics.room("redis", [StoragePlace("a:6379", 5, 10), StoragePlace("b:6379", 7, None)])
    used, limit = (
        'kvtier_storage_used_bytes{tier="redis",place="%s"}',
        'kvtier_storage_limit_bytes{tier="redis",place="%s"}',
    )
    told = {name: value for name, value in metrics.snapshot().items() if name.startswith("kvtier_storage")}
    assert told == {used % "a:6379": 5, limit % "a:6379": 10, used % "b:6379": 7}
    metrics.room("redis", [StoragePlace("b:6379", 8, 9)])
    told = {name: value for name, value in metrics.snapshot().items() if name.startswith("kvtier_storage")}
    assert told == {used % "b:6379": 8, limit % "b:6379": 9}
    # A slab has series of its own: a disk that is full is something else than a slab that has grown.
    metrics.room("file", [StoragePlace("/d", 8, 9), StoragePlace("/d/a.slab", 3, 4, is_own=True)])
    metrics.room("file", [StoragePlace("/d", 8, 9), StoragePlace("/d/b.slab", 4, 4, is_own=True)])
    told = {name: value for name, value in metrics.snapshot().items() if "_slab_" in name}
    labels = '{tier="file",place="/d/b.slab"}'
    assert told == {f"kvtier_slab_taken_bytes{labels}": 4, f"kvtier_slab_limit_bytes{labels}": 4}

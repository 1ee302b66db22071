"""GroupSync: every caller is covered by a sync that began after its call; they share as few as possible."""

import errno
import threading

import pytest

from kvtier.tiers.file.file_io import GroupSync


class SlowDisk:
    """A sync that runs until the test lets it end, and covers what was written before it began."""

    def __init__(self) -> None:
        self.written = 0
        self.covered: list[int] = []
        self.begun = threading.Semaphore(0)
        self.end = threading.Semaphore(0)
        self.fails = False

    def sync(self) -> None:
        covers = self.written
        self.begun.release()
        assert self.end.acquire(timeout=60)
        if self.fails:
            raise OSError(errno.EIO, "disk gone")
        self.covered.append(covers)


def write_and_sync(disk: SlowDisk, sync: GroupSync, found: list[object]) -> threading.Thread:
    disk.written += 1
    mine = disk.written

    def run() -> None:
        try:
            sync()
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(max(disk.covered) >= mine)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_callers_share_the_sync_that_began_after_them() -> None:
    disk, found = SlowDisk(), []  # type: ignore[var-annotated]
    sync = GroupSync(disk.sync)
    first = write_and_sync(disk, sync, found)
    assert disk.begun.acquire(timeout=60)
    # Seven more come while it runs: it says nothing about their writes, the next one does, for all of them.
    others = [write_and_sync(disk, sync, found) for _ in range(7)]
    disk.end.release()
    first.join(60)
    assert disk.begun.acquire(timeout=60)
    for thread in others:
        thread.join(0.02)
    disk.end.release(8)  # should stragglers need one more
    for thread in others:
        thread.join(60)
    assert found == [True] * 8
    assert len(disk.covered) <= 3


def test_a_failed_sync_fails_everybody_it_covers_and_nobody_else() -> None:
    disk, found = SlowDisk(), []  # type: ignore[var-annotated]
    sync = GroupSync(disk.sync)
    disk.fails = True
    thread = write_and_sync(disk, sync, found)
    disk.end.release()
    thread.join(60)
    assert found == [errno.EIO]
    # The next write is covered by a sync of its own.
    disk.fails = False
    disk.end.release()
    sync()
    assert disk.covered == [1]
    disk.fails = True
    disk.end.release()
    with pytest.raises(OSError, match="disk gone"):
        sync()


def test_an_interrupted_sync_leaves_nobody_waiting() -> None:
    calls = iter([KeyboardInterrupt()])

    def sync() -> None:
        for interrupt in calls:
            raise interrupt

    group = GroupSync(sync)
    with pytest.raises(KeyboardInterrupt):
        group()
    others = [threading.Thread(target=group) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(60)
        assert not thread.is_alive()

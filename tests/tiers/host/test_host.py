"""The L2 region: slots, sealing, pre-faulting, pinning and what happens when memory is short."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.host import host, memory
from kvtier.tiers.host.host import HostRegion

MIB = 1 << 20


def resident_bytes(region: HostRegion) -> int:
    """How much of the region the kernel has in memory, from the mappings that lie within it."""
    start, end, total = region.address, region.address + region.array.nbytes, 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) < end and int(found[2], 16) > start
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture(params=[False, True], ids=["anonymous", "memfd"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_slots_are_page_aligned_and_separate(shared: bool) -> None:
    region = HostRegion.allocate(5, 5000, shared=shared)  # 5000 B take two pages
    assert region.slot_stride == 8192
    assert region.array.shape == (5, 8192)
    assert region.address % memory.PAGE == 0
    for index in range(5):
        region.slot(index)[:] = bytes([index + 1]) * 5000
    # each slot reads its own bytes, and the padding after it was left alone
    for index in range(5):
        assert set(region.slot(index)) == {index + 1}
        assert not region.array[index, 5000:].any()
    region.close()


@pytest.mark.parametrize("index", [-1, 3, 1 << 40])
def test_a_slot_outside_the_region_is_refused(index: int) -> None:
    region = HostRegion.allocate(3, 4096)
    with pytest.raises(IndexError, match="the region has 3"):
        region.slot(index)
    region.close()


def test_close_is_idempotent_and_spares_views_in_use(shared: bool) -> None:
    region = HostRegion.allocate(2, 4096, shared=shared)
    view = region.slot(1)
    view[:4] = b"kept"
    region.close()
    region.close()
    assert bytes(view[:4]) == b"kept"  # the memory goes with its last view, not under it
    assert region.fd is None
    with pytest.raises(IndexError):
        region.slot(0)


def test_prefault_makes_every_page_resident_without_changing_a_byte(shared: bool) -> None:
    region = HostRegion.allocate(64, MIB // 2, shared=shared)
    region.array[:, 100] = 7  # written while the thread is at work
    assert region.wait_prefaulted(60)
    assert resident_bytes(region) >= region.array.nbytes
    assert (region.array[:, 100] == 7).all()
    assert not region.array[:, 101:].any()
    region.close()


def test_without_prefault_memory_is_taken_on_first_use() -> None:
    region = HostRegion.allocate(64, MIB // 2, prefault=False)
    assert region.wait_prefaulted(0)  # nothing to wait for
    assert resident_bytes(region) < region.array.nbytes // 2
    region.close()


def test_prefault_on_an_old_kernel_locks_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_populate(address: int, num_bytes: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    region = HostRegion.allocate(16, MIB // 2, prefault=False, huge_pages=False)
    region.slot(3)[:5] = b"hello"
    before = resident_bytes(region)
    monkeypatch.setattr(memory, "_madvise", no_populate)
    memory.populate(region.address, region.array.nbytes)
    assert before < region.array.nbytes // 2 < resident_bytes(region)
    assert bytes(region.slot(3)[:6]) == b"hello\0"
    region.close()


def test_prefault_that_fails_warns_once_and_the_region_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(address: int, num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "populate", no_memory)
    region = HostRegion.allocate(64, MIB)
    region.wait_prefaulted(60)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    region.slot(63)[:2] = b"ok"
    region.close()


def test_close_stops_a_prefault_under_way() -> None:
    region = HostRegion.allocate(512, MIB)
    region.close()
    assert region.wait_prefaulted(0)


def test_a_private_region_is_absent_from_forked_children() -> None:
    region = HostRegion.allocate(4, MIB, huge_pages=True)
    smaps = Path("/proc/self/smaps").read_text()
    flags = re.search(rf"^{region.address:x}-.*?^VmFlags: ([a-z ]+)$", smaps, re.MULTILINE | re.DOTALL)
    assert flags is not None
    assert {"dc", "hg"} <= set(flags[1].split())  # MADV_DONTFORK, MADV_HUGEPAGE
    region.close()


def test_a_shared_region_cannot_shrink_or_grow_and_is_seen_by_who_maps_it() -> None:
    region = HostRegion.allocate(4, 4096, shared=True)
    assert region.fd is not None
    for size in (0, 8 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    # a second mapping, as a worker process makes it, sees writes both ways
    other = HostRegion.attach(region.fd, 4, 4096)
    region.slot(2)[:3] = b"ab\0"
    other.slot(2)[2:3] = b"c"
    assert bytes(region.slot(2)[:3]) == b"abc"
    region.close()
    assert bytes(other.slot(2)[:3]) == b"abc"  # it outlives the first
    other.close()


def test_attach_refuses_a_file_of_another_size_or_unsealed() -> None:
    region = HostRegion.allocate(4, 4096, shared=True)
    assert region.fd is not None
    with pytest.raises(ConfigError, match="16384 bytes: 5 slots"):
        HostRegion.attach(region.fd, 5, 4096)
    region.close()
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    assert fcntl.fcntl(unsealed, fcntl.F_GET_SEALS) == 0
    with pytest.raises(ConfigError, match="sealed"):
        HostRegion.attach(unsealed, 1, 4096)
    os.close(unsealed)


def test_too_little_memory_names_the_size_asked_the_size_there_and_the_option(shared: bool) -> None:
    with pytest.raises(ConfigError, match=r'\[host\] size "1PiB": only .* of memory is free \(.* has .*\); lower it'):
        HostRegion.allocate(1 << 30, MIB, shared=shared)


def test_a_mapping_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, fd: int | None, huge_pages: bool) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host, "_map", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="lower"):
        HostRegion.allocate(4, 4096, shared=True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (4, 0)])
def test_a_size_below_one_block_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"\[host\] size"):
        HostRegion.allocate(slots, slot_bytes)


def test_scattered_copies_report_an_unmapped_address_instead_of_dying() -> None:
    region = HostRegion.allocate(1, 4096)
    one, mapped, nowhere = np.array([4096], np.int64), np.array([region.address]), np.array([8], np.int64)
    for targets, sources in ((mapped, nowhere), (nowhere, mapped)):
        with pytest.raises(OSError, match="process_vm_readv"):
            memory.copy_scattered(targets, sources, one)
    region.close()


def test_shared_memory_is_on_huge_pages_for_everybody_where_the_kernel_can() -> None:
    region = HostRegion.allocate(64, 1 << 20, shared=True)
    assert region.wait_prefaulted(30)
    region.slot(3)[:] = payload = bytes(range(256)) * 4096
    if not (mapped := huge_kib()):
        pytest.skip("this kernel puts no shared memory on huge pages (Linux 6.1 does)")
    assert region.fd is not None
    other = HostRegion.attach(region.fd, 64, 1 << 20)
    assert bytes(other.slot(3)) == payload
    other.array[0, 0] = 1
    assert region.array[0, 0] == 1
    assert huge_kib() > mapped
    other.close()
    region.close()


def huge_kib() -> int:
    """Shared memory of this process on huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped"))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_arrive(seed: int) -> None:
    if (copy_pieces := memory.compiled("copy_pieces")) is None:
        pytest.skip("not built: `make compiled`")
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([3, 300, 9000]), 40)
    starts, size = np.cumsum(lengths) - lengths, int(lengths.sum())
    order = rng.permutation(len(lengths))
    places = np.empty(len(lengths), np.int64)
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    source, target = rng.integers(0, 256, size + 1, np.uint8), np.zeros(size + 1, np.uint8)
    expected = target.copy()
    for start, place, length in zip(starts, places, lengths, strict=True):
        expected[place : place + length] = source[start : start + length]
    copy_pieces(target.ctypes.data + places, source.ctypes.data + starts, lengths)
    assert np.array_equal(target, expected)


def test_the_twin_refuses_what_is_not_as_many() -> None:
    if (copy_pieces := memory.compiled("copy_pieces")) is None:
        pytest.skip("not built: `make compiled`")
    target, source = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    at, of = np.array([target.ctypes.data]), np.array([source.ctypes.data])
    for lengths in (np.array([8, 8]), np.zeros(0, np.int64), np.array([-1])):
        with pytest.raises(ValueError, match="length"):
            copy_pieces(at, of, lengths)
    with pytest.raises(ValueError, match="targets"):
        copy_pieces(np.zeros(0, np.int64), of, np.array([8]))
    assert not target.any()


@pytest.mark.parametrize("gil_bytes", [0, 1 << 20])
def test_rows_are_copied_whole_or_not_at_all(gil_bytes: int) -> None:
    if (copy_blocks := memory.compiled("copy_blocks")) is None:
        pytest.skip("not built: `make compiled`")
    device, host = np.zeros((6, 64), np.uint8), np.arange(5 * 128, dtype=np.int64).astype(np.uint8).reshape(5, 128)
    blocks, slots = np.array([5, 0, 1, 3]), np.array([4, 0, 1, 2])
    copy_blocks(device, blocks, host, slots, 8, 40, True, gil_bytes)
    expected = np.zeros_like(device)
    expected[blocks, 8:48] = host[slots, 8:48]
    assert np.array_equal(device, expected)
    copy_blocks(device, blocks[:0], host, slots[:0], 0, 64, True, gil_bytes)
    for where, at in (
        (np.array([6, 0]), slots[:2]),
        (blocks[:2], np.array([-1, 0])),
        (np.array([1 << 62, 0]), slots[:2]),
    ):
        with pytest.raises(IndexError, match="block"):
            copy_blocks(device, where, host, at, 0, 64, True, gil_bytes)
    for offset, length in ((0, 65), (-1, 4), (60, 8), (0, 0), (1 << 62, 1 << 62)):
        with pytest.raises(ValueError, match="bytes"):
            copy_blocks(device, blocks, host, slots, offset, length, False, gil_bytes)
    with pytest.raises(ValueError, match="4 blocks for 3 slots"):
        copy_blocks(device, blocks, host, slots[:3], 0, 64, True, gil_bytes)
    with pytest.raises(ValueError, match="whole"):
        copy_blocks(device[:, ::2], blocks, host, slots, 0, 8, True, gil_bytes)
    with pytest.raises(ValueError, match="dtype"):
        copy_blocks(device, blocks.astype(np.int32), host, slots, 0, 8, True, gil_bytes)
    assert np.array_equal(device, expected)


@pytest.mark.parametrize("setting", ["", "off"])
def test_slots_are_hashed_as_one_by_one(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", setting)
    for size in (1, 100, 5000, 200_000):
        region = HostRegion.allocate(9, size, prefault=False)
        region.array[:] = np.random.default_rng(size).integers(0, 256, region.array.shape, np.uint8)
        places = [7, 0, 8, 0]
        assert region.checksums(places) == [checksum(region.slot(i)) for i in places]
        assert region.checksums([]) == []
        for wrong in ([9], [0, -1]):
            with pytest.raises(IndexError):
                region.checksums(wrong)
        region.close()
        with pytest.raises(IndexError):
            region.checksums([0])

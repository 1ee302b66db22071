"""Pinning piece by piece in the background, by the calls a driver gets; and the driver itself, over a fake libcuda."""

import ctypes
import logging
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import CudaDriver, PinnedPieces

SLOT = 4096


class Driver:
    """Notes what is registered; refuses from the piece on that it was told; lets each piece wait for `go`."""

    def __init__(self, refuse_from: int | None = None) -> None:
        self.refuse_from = refuse_from
        self.registered: dict[int, int] = {}
        self.devices: list[int] = []
        self.threads: set[int] = set()  # whose current device it was told to change
        self.go = threading.Semaphore(0)

    def use(self, device: int) -> None:
        self.devices.append(device)
        self.threads.add(threading.get_ident())

    def register(self, address: int, num_bytes: int) -> None:
        assert self.go.acquire(timeout=60)
        if len(self.registered) == self.refuse_from:
            raise RuntimeError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def let_all_go(self) -> None:
        self.go.release(1000)


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def test_a_region_is_pinned_in_pieces_that_end_between_slots() -> None:
    driver, region = Driver(), HostRegion.allocate(10, 5000)  # slots of 8 KiB
    driver.let_all_go()
    pieces = PinnedPieces(region, driver, 3, piece_bytes=30_000)
    assert pieces.wait(60)
    assert pieces.slots_per_piece == 3
    sizes = [3 * 8192, 3 * 8192, 3 * 8192, 8192]  # exactly the region: nothing is rounded up
    assert driver.registered == {region.address + 3 * 8192 * at: size for at, size in enumerate(sizes)}
    assert pieces.num_bytes == 10 * 8192
    assert pieces.cover(slots(0, 9))
    pieces.close()
    pieces.close()
    assert not driver.registered
    assert not pieces.cover(slots(0))
    assert set(driver.devices) == {3}
    region.close()


def test_slots_are_pinned_one_piece_after_the_other_while_the_region_is_used() -> None:
    driver, region = Driver(), HostRegion.allocate(4, SLOT)
    pieces = PinnedPieces(region, driver, 0, piece_bytes=2 * SLOT)
    assert not pieces.wait(0.05)
    assert not pieces.cover(slots(0))
    region.slot(0)[:2] = b"ok"  # nobody has to wait for it
    driver.go.release()
    while not pieces.cover(slots(0, 1)):
        assert not pieces.wait(0.01)
    assert not pieces.cover(slots(1, 2))
    assert pieces.num_bytes == 2 * SLOT
    driver.let_all_go()
    assert pieces.wait(60)
    assert pieces.cover(slots(1, 2))
    pieces.close()
    region.close()


def test_what_a_copy_waits_for_is_pinned_first() -> None:
    driver, region = Driver(), HostRegion.allocate(6, SLOT)
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    assert not pieces.cover_soon(slots(4, 2), 0.05)  # piece 0 is just being pinned
    driver.go.release(2)
    while not pieces.cover(slots(2)):
        assert not pieces.wait(0.01)
    assert not pieces.cover(slots(4))
    driver.go.release()
    assert pieces.cover_soon(slots(4, 2), 60)
    assert list(driver.registered) == [region.address + SLOT * piece for piece in (0, 2, 4)]
    driver.let_all_go()
    assert pieces.wait(60)
    assert len(driver.registered) == 6
    pieces.close()
    assert not pieces.cover_soon(slots(4), 60)  # and nobody waits for what will not be
    region.close()


def test_what_a_copy_waits_for_does_not_wait_for_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, region = Driver(), HostRegion.allocate(3, SLOT)
    driver.let_all_go()
    populated = threading.Event()
    monkeypatch.setattr(region, "wait_prefaulted", lambda timeout=None: populated.wait(timeout))
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    assert pieces.cover_soon(slots(1), 60)
    assert list(driver.registered) == [region.address + SLOT]
    populated.set()
    assert pieces.wait(60)
    assert pieces.cover(slots(0, 1, 2))
    pieces.close()
    region.close()


def test_a_refused_piece_is_one_warning_and_what_was_pinned_stays(caplog: pytest.LogCaptureFixture) -> None:
    driver, region = Driver(refuse_from=1), HostRegion.allocate(3, SLOT)
    driver.let_all_go()
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    assert pieces.wait(60)
    assert pieces.error == "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert pieces.cover(slots(0))
    assert not pieces.cover(slots(1))
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "4 KiB of 12 KiB are pinned" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    pieces.close()
    assert not driver.registered
    region.close()


def test_closing_ends_pinning_between_two_pieces() -> None:
    driver, region = Driver(), HostRegion.allocate(100, SLOT)
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    closing = threading.Thread(target=pieces.close)
    closing.start()
    driver.go.release()  # the one that is just being pinned ends
    closing.join(60)
    assert not closing.is_alive()
    assert not driver.registered
    region.close()


def test_a_region_pins_once_and_unpins_at_its_end() -> None:
    driver, region = Driver(), HostRegion.allocate(3, SLOT)
    driver.let_all_go()
    region.pin(0, driver)
    first = region.pinning
    region.pin(0, driver)
    assert first is not None
    assert region.pinning is first
    assert first.wait(60)
    assert region.is_pinned(slots(0, 1, 2))
    assert region.pinned
    region.close()
    assert not driver.registered
    assert driver.devices == [0, 0]
    assert threading.get_ident() not in driver.threads  # a caller that computes elsewhere goes on there
    assert not region.is_pinned(slots(0))


def test_without_a_driver_nothing_is_pinned_and_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "cuda_driver", lambda: None)
    region = HostRegion.allocate(1, SLOT)
    region.pin(0)
    assert not region.is_pinned(slots(0))
    assert not caplog.records
    region.close()


# The driver, by the C interface it really has.


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build a libcuda for this CPU")
    source = Path(__file__).parents[2] / "rigs" / "fake_libcuda.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so"), str(source)], check=True)
    return ctypes.CDLL(str(tmp_path / "libcuda.so"))


def test_the_driver_pins_a_region_and_copies_a_batch(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    region = HostRegion.allocate(6, SLOT)
    pieces = PinnedPieces(region, driver, 0, piece_bytes=2 * SLOT)
    assert pieces.wait(60)
    assert pieces.error is None
    assert ctypes.c_int.in_dll(library, "registrations").value == 3
    assert ctypes.c_size_t.in_dll(library, "largest").value == 2 * SLOT
    assert driver.copies_in_batches
    device = np.arange(3 * SLOT, dtype=np.uint8).reshape(3, SLOT)
    targets = np.array([region.address + slot * SLOT for slot in (5, 0, 3)], np.uint64)
    sources = np.array([device.ctypes.data + row * SLOT for row in range(3)], np.uint64)
    sizes = np.full(3, SLOT, np.uint64)
    driver.copy(targets, sources, sizes, 7, at_any_time=False)
    assert np.array_equal(region.array[[5, 0, 3]], device)
    assert ctypes.c_int.in_dll(library, "last_order").value == 1  # by the stream
    device[:] = 0
    driver.copy(sources, targets, sizes, 7, at_any_time=True)
    assert np.array_equal(device, region.array[[5, 0, 3]])
    assert ctypes.c_int.in_dll(library, "batches").value == 2
    across = np.array([region.address + SLOT], np.uint64)  # slots 1 and 2: two pieces of memory
    with pytest.raises(RuntimeError, match=r"piece 0 of 1: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.copy(across, sources[:1], np.array([2 * SLOT], np.uint64), 7, at_any_time=False)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        driver.copy(targets, sources, sizes, 0, at_any_time=False)  # the NULL stream
    pieces.close()
    assert ctypes.c_int.in_dll(library, "registrations").value == 0
    region.close()


def test_the_driver_says_its_version(library: ctypes.CDLL) -> None:
    assert CudaDriver(library).version == "12.8"


def test_pinning_does_not_spoil_a_capture(library: ctypes.CDLL) -> None:
    driver, region = CudaDriver(library), HostRegion.allocate(2, SLOT)
    ctypes.c_int.in_dll(library, "capturing").value = 1
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    assert pieces.wait(60)
    assert pieces.error is None
    mode = ctypes.c_int(2)
    with driver.beside_captures():
        pass
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0  # as torch left it: what spoils a capture of this thread's own is still found
    pieces.close()
    assert not ctypes.c_int.in_dll(library, "spoiled").value
    assert ctypes.c_int.in_dll(library, "registrations").value == 0
    region.close()


def test_what_the_driver_refuses_is_named(library: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(library, "refuse_after").value = 1
    driver, region = CudaDriver(library), HostRegion.allocate(2, SLOT)
    pieces = PinnedPieces(region, driver, 0, piece_bytes=SLOT)
    assert pieces.wait(60)
    assert pieces.error == "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
    with pytest.raises(RuntimeError, match="cuMemHostUnregister: error 713"):
        driver.unregister(region.address + SLOT)
    pieces.close()
    region.close()


def test_a_machine_without_a_driver_has_none() -> None:
    assert CudaDriver.load("libcuda-that-nobody-has.so") is None

"""GilWatch: copies go one by one while nobody else wants the GIL, and a wait for it is told from a busy machine."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.tiers.copies.block_copier import BlockCopier, BlockCopies, GilWatch, block_bytes_view, num_sleeps
from kvtier.tiers.host import memory
from kvtier.tiers.host.host import HostRegion

MIB = 1 << 20


class Time:
    """A scripted thread: each piece takes its time, and some have waits, asleep or pushed off the core."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 3
        self.asleep: dict[int, float] = {}  # piece → seconds it waited for the GIL
        self.off_core: dict[int, float] = {}  # piece → seconds another process had the core
        self.copied: list[int] = []

    def watch(self) -> GilWatch:
        return GilWatch(lambda: self.now, lambda: self.sleeps)

    def copy(self, piece: int) -> None:
        self.copied.append(piece)
        waited = self.asleep.get(piece, 0.0)
        self.sleeps += waited > 0
        self.now += 20e-6 + waited + self.off_core.get(piece, 0.0)


def test_without_a_wait_every_piece_goes_alone() -> None:
    time = Time()
    assert time.watch().copy_each(time.copy, 300, 64 << 10) == 300
    assert time.copied == list(range(300))


def test_the_first_wait_for_the_gil_ends_it_for_a_while() -> None:
    time = Time()
    time.asleep = {0: 0.005}
    watch = time.watch()
    assert watch.copy_each(time.copy, 100, MIB) == 1
    assert watch.copy_each(time.copy, 100, MIB) == 0  # not even tried
    time.now += 0.6
    time.asleep.clear()
    assert watch.copy_each(time.copy, 100, MIB) == 100


def test_a_wait_later_on_is_seen_within_a_mebibyte() -> None:
    time = Time()
    time.asleep = dict.fromkeys(range(40, 300), 0.005)
    num_copied = time.watch().copy_each(time.copy, 300, 128 << 10)
    assert 40 < num_copied <= 40 + 2 * 8
    assert time.copied == list(range(num_copied))


def test_a_busy_machine_is_no_busy_gil() -> None:
    time = Time()
    time.off_core = dict.fromkeys(range(0, 50, 3), 0.02)
    assert time.watch().copy_each(time.copy, 50, MIB) == 50


def test_a_wait_too_short_to_matter_is_let_pass() -> None:
    time = Time()
    time.asleep = dict.fromkeys(range(50), 0.0001)
    assert time.watch().copy_each(time.copy, 50, MIB) == 50


def test_a_thread_that_waits_has_slept() -> None:
    before = num_sleeps()
    threading.Event().wait(0.01)
    assert num_sleeps() > before


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("num_alone", [0, 3, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_pieces_copied_alone_and_the_rest_at_once_are_all(
    direction: str, num_alone: int, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the GIL is wanted, and whichever way the rest goes: the bytes are those of one numpy assignment."""
    dice = np.random.default_rng(num_alone)
    l1: NDArray[np.uint8] = dice.integers(0, 256, (20, 2, 128 << 10), np.uint8)
    region = HostRegion.allocate(18, 256 << 10, huge_pages=False, prefault=False)
    region.array[:] = dice.integers(0, 256, region.array.shape, np.uint8)
    blocks, slots = dice.permutation(20)[:16], dice.permutation(18)[:16]
    for layers, span in ((None, slice(None)), ((1, 2), slice(128 << 10, None))):
        expected_l1, expected_l2 = l1.reshape(20, -1).copy(), region.array.copy()
        if direction == "load":
            expected_l1[blocks, span] = region.array[slots, span]
        else:
            expected_l2[slots, span] = expected_l1[blocks, span]
        copier = BlockCopier(l1, region)
        copier._gil = _Scripted(num_alone)
        monkeypatch.setattr(memory, "can_copy_scattered", lambda: scattered)
        assert copier.copy(direction, BlockCopies(blocks, slots, layers)) is None  # type: ignore[arg-type]
        assert np.array_equal(block_bytes_view(l1).reshape(20, -1), expected_l1)
        assert np.array_equal(region.array, expected_l2)
    region.close()


class _Scripted(GilWatch):
    """The GIL is wanted after so many pieces."""

    def __init__(self, num_alone: int) -> None:
        super().__init__()
        self._num_alone = num_alone

    def copy_each(self, copy: Callable[[int], None], num_pieces: int, piece_bytes: int) -> int:
        for piece in range(min(self._num_alone, num_pieces)):
            copy(piece)
        return min(self._num_alone, num_pieces)

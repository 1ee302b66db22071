"""Copies blocks between a GPU's memory and L2's slots: gathered on the device, copied through staging buffers."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connector.transformers.blocks import Blocks
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.tiers import Metrics
from kvtier.tiers.config import HostConfig, show_size
from kvtier.tiers.copies import DEVICE_ERRORS, BlockCopies, CopyEvent, CopyWays, CudaCopyStream, is_out_of_memory
from kvtier.tiers.host import HostRegion, cuda_driver

_log = logging.getLogger(__package__)

STAGING_BYTES: Final = 16 << 20  # per buffer, of four: while one is copied, the other of its direction is gathered
DEADLINE: Final = 30.0  # seconds for the device's copies: memory to memory, so only a dead one takes longer
_AHEAD: Final = 64  # pieces of one call in flight at once


@dataclass(slots=True)
class Sent:
    """The copies of one call. Until all events are done, the device uses their slots."""

    events: list[CopyEvent] = field(default_factory=list)
    error: str | None = None  # why not all copies were enqueued

    def wait(self, until: float) -> bool:
        """Whether everything has ended, successfully or not; waits up to `until`, on the monotonic clock."""
        return all(event.wait(max(0.0, until - time.monotonic())) for event in self.events)

    def done(self) -> bool:
        return all(event.done() for event in self.events)

    @property
    def failure(self) -> str | None:
        """Why it failed; valid once it is done."""
        return self.error or next((event.error for event in self.events if event.error is not None), None)


class DeviceCopies:
    """Copies between one model's GPU and a region. Called from one thread; only `load` waits for its bytes.

    A store is gathered on the compute's own stream, so the cache may change or be freed once the call returns.
    """

    def __init__(self, form: CacheForm, device: torch.device, host: HostConfig, metrics: Metrics) -> None:
        """`host`: whether to pin the region, and how to copy. Allocates nothing on the device yet."""
        self._form = form
        self._device = device
        self._host = host
        self._metrics = metrics
        self._region: HostRegion | None = None
        self._stream: CudaCopyStream | None = None
        self._staging: torch.Tensor | None = None  # `[4, slots, num_elements]`: two to load, two to store
        self._scattered: list[torch.cuda.Event] = []  # of each load buffer: recorded after the compute has read it
        self._stored: list[CopyEvent | None] = [None, None]  # of each store buffer: its last copy
        self._turn = 0
        self._refused = False
        if host.pin and cuda_driver() is None:
            _log.warning("[host] pin: libcuda.so.1 is not found or does not start, so copies will be slow")

    def connect(self, region: HostRegion) -> bool:
        """Make the stream and staging for a region. False: the device has no room; that is logged once."""
        if self._stream is not None and self._region is region:
            return True
        self.close()
        try:
            staging = self._allocate()
            if self._host.pin:
                region.pin(staging.device.index or 0)
            ways = CopyWays.to_measure(self._host, self._metrics)
            stream = CudaCopyStream(staging.view(-1, 1, self._form.num_elements), region, ways=ways)
            self._scattered = [self._now() for _ in range(2)]
        except DEVICE_ERRORS as error:
            if not self._refused:
                _log.warning("no staging on %s, so blocks are copied one plane at a time: %s", self._device, error)
            self._refused = True
            return False
        self._region, self._stream, self._staging = region, stream, staging
        return True

    def load(self, region: HostRegion, slots: NDArray[np.int64], num_blocks: int) -> tuple[Blocks, Sent] | None:
        """The slots as blocks on the device, the first `num_blocks`, and states; None if it has no memory for them.

        The copies have ended, unless the device is dead: see `Sent`.
        """
        if not self.connect(region):
            return None
        stream, staging = self._stream, self._staging
        assert stream is not None
        assert staging is not None
        try:
            blocks = Blocks.empty(self._form, num_blocks, len(slots) - num_blocks, self._device)
        except DEVICE_ERRORS:  # no room, or the device is lost: the CPU copies them
            return None
        sent, size = Sent(), staging.shape[1]
        try:
            for number, first in enumerate(range(0, len(slots), size)):
                which, piece = number % 2, slots[first : first + size]
                copies = BlockCopies(which * size + np.arange(len(piece)), piece)
                in_time = self._keeps_up(sent)
                sent.events.append(stream.load(copies, after=self._scattered[which]))
                if not in_time or not stream.fence(sent.events[-1], DEADLINE):
                    sent.error = "it failed, or was not started in time"
                    break
                blocks.write(staging[which, : len(piece)], self._form, first)
                self._scattered[which] = self._now()
        except DEVICE_ERRORS as error:
            sent.error = str(error)
        sent.wait(time.monotonic() + DEADLINE)
        return blocks, sent

    def store(
        self, region: HostRegion, slots: NDArray[np.int64], blocks: Blocks, numbers: Sequence[int]
    ) -> Sent | None:
        """Enqueue copies of these blocks to slots; None: the device has no room for staging."""
        if not self.connect(region):
            return None
        stream, staging = self._stream, self._staging
        assert stream is not None
        assert staging is not None
        sent, size = Sent(), staging.shape[1]
        try:
            for first in range(0, len(slots), size):
                which, piece = self._turn % 2, slots[first : first + size]
                if not self._is_free(stream, which) or not self._keeps_up(sent):
                    sent.error = f"the device did not end an earlier copy in {DEADLINE:.0f} s"
                    break
                self._turn += 1
                rows = 2 + which
                blocks.read(staging[rows, : len(piece)], self._form, numbers[first : first + size])
                event = stream.store(BlockCopies(rows * size + np.arange(len(piece)), piece))
                self._stored[which] = event
                sent.events.append(event)
        except DEVICE_ERRORS as error:
            sent.error = str(error)
        return sent

    def close(self) -> None:
        stream, self._stream, self._staging, self._region = self._stream, None, None, None
        self._stored = [None, None]
        if stream is not None:
            stream.close(DEADLINE)

    def _is_free(self, stream: CudaCopyStream, which: int) -> bool:
        """Order the compute after the buffer's last store; blocks the thread only if that cannot be enqueued."""
        event = self._stored[which]
        return event is None or event.done() or stream.fence(event, DEADLINE) or event.wait(DEADLINE)

    def _keeps_up(self, sent: Sent) -> bool:
        return len(sent.events) < _AHEAD or sent.events[-_AHEAD].wait(DEADLINE)

    def _allocate(self) -> torch.Tensor:
        """Staging buffers, smaller if the device has little room. OutOfMemoryError if not even one slot fits."""
        slots = max(1, STAGING_BYTES // self._form.block_bytes)
        dtype: torch.dtype = getattr(torch, self._form.dtype)
        while True:
            try:
                with torch.inference_mode(False):  # it outlives the call's mode
                    return torch.empty(4, slots, self._form.num_elements, dtype=dtype, device=self._device)
            except DEVICE_ERRORS as error:
                if slots == 1 or not is_out_of_memory(error):
                    raise
                slots //= 2
                _log.info(
                    "little room on %s: staging of %s", self._device, show_size(4 * slots * self._form.block_bytes)
                )

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def copies_of(form: CacheForm, device: torch.device, host: HostConfig, metrics: Metrics) -> DeviceCopies | None:
    """For a model on that device; None if the CPU copies blocks."""
    return DeviceCopies(form, device, host, metrics) if device.type == "cuda" else None

"""Which way copies between a device and L2 go, by the size of their pieces, and how much went each way."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kvtier.tiers import Metrics

if TYPE_CHECKING:
    from kvtier.tiers.config import HostConfig

CopyWay = Literal["batch", "kernel", "staging", "torch"]
"""By one call of the driver; by a kernel that reads and writes pinned slots; through staging on the device; by torch.

Our own blocks take the kernel, an engine's the staging.
"""

MAX_GRID: Final = 32  # blocks of threads. Published: 64 slow a neighbour's compute 100 times, 32 six times


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """From which mean size of pieces on which way is taken, in bytes, and why.

    The defaults are published figures. The driver's batches: 51 GB/s at 64 KiB, 40 to 44 at 28 KiB, 4 to 7 at 24 KiB
    and less. A torch copy costs some 6 us of Python, in which PCIe 5 moves 300 KB. A kernel of 16 x 512 threads, each
    with 16 bytes under way, has twice in flight what PCIe 5 moves within its latency (55 GB/s x 1.5 us).
    """

    batch_from: int | None = 28 << 10  # None: never
    torch_from: int | None = 512 << 10  # what is below goes by kernel, where no batch is chosen. None: all of it
    grid: int = 16  # blocks of threads of the kernel
    source: Literal["default", "measured", "configured"] = "default"
    reason: str = "not measured"

    def way(self, mean_bytes: float, *, has_batch: bool, has_kernel: bool) -> CopyWay:
        """Of pinned pieces of that mean size; what is missing is never chosen."""
        if has_batch and self.is_batched(mean_bytes):
            return "batch"
        if has_kernel and (self.torch_from is None or mean_bytes < self.torch_from):
            return "kernel"
        # without a kernel many small pieces by one call still beat a call for each
        return "batch" if has_batch and not has_kernel and self.batch_from is not None else "torch"

    def is_batched(self, mean_bytes: float) -> bool:
        """Whether the driver's batches are at least as fast as gathering, for pieces of that mean size."""
        return self.batch_from is not None and mean_bytes >= self.batch_from

    def with_options(self, host: "HostConfig") -> "CopyChoice":
        """The same, but for what the operator has decided."""
        chosen = self
        if host.batch_copies_from is not None:
            reason = f"[host] batch_copies_from; the rest: {self.reason}"
            chosen = replace(chosen, batch_from=host.batch_copies_from, source="configured", reason=reason)
        return chosen if host.copy_grid is None else replace(chosen, grid=host.copy_grid)


DEFAULT: Final = CopyChoice()


class CopyWays:
    """The ways of one copy stream: the choice, which a measurement may replace at any time, and what went each way."""

    def __init__(self, choice: CopyChoice | None = None, metrics: Metrics | None = None) -> None:
        """With a fixed choice; `metrics` are told of every batch of copies."""
        self.choice = choice or DEFAULT
        self.metrics = metrics
        self.host: HostConfig | None = None

    @classmethod
    def to_measure(cls, host: "HostConfig", metrics: Metrics | None = None) -> "CopyWays":
        """The defaults until the device was measured; what `host` decides stays as it is."""
        ways = cls(DEFAULT.with_options(host), metrics)
        ways.host = host
        return ways

    @property
    def wants_measuring(self) -> bool:
        """Whether a measurement could change anything."""
        return self.host is not None and (self.host.batch_copies_from is None or self.host.copy_grid is None)

    def choose(self, choice: CopyChoice) -> None:
        """Take this one from now on, but for what the operator has decided."""
        self.choice = choice if self.host is None else choice.with_options(self.host)

    def show(self, device: str) -> None:
        """Tell the metrics what is chosen for a device."""
        if self.metrics is not None:
            self.metrics.copies.chosen(device, self.choice.batch_from, self.choice.grid)

    def count(self, way: CopyWay, num_bytes: int) -> None:
        """One batch of copies was given to the device."""
        if self.metrics is not None:
            self.metrics.copies.made(way, num_bytes)

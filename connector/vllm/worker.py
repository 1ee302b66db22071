"""The worker half of the vLLM connector: copies between one rank's KV tensors and the scheduler's L2. Needs no vLLM."""

import functools
import logging
import os
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from msgspec.structs import replace

from kvtier.connector import CopyOp, StepPlan, WorkerReport, WorkerSide
from kvtier.connector.daemon import RemoteTiers, join
from kvtier.connector.segments import BlendResult
from kvtier.connector.vllm.segments import UNSUPPORTED, BlendOrder
from kvtier.connector.vllm.slots import SlotPlan, engine_blocks
from kvtier.tiers import ConfigError, TierUnavailable
from kvtier.tiers.copies import CopyStream, CopyWays, CudaCopyStream, EngineBlocks, HostCopyStream
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.host import HostRegion

if TYPE_CHECKING:
    from kvtier.connector.vllm.blending import Blending


@functools.cache
def _machine() -> str:
    """This machine since its start, the same in every container; "" if it is hidden."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """How another process of the same user on this machine finds and maps the scheduler process's L2."""

    pid: int
    fd: int
    num_slots: int
    slot_bytes: int
    region_id: int
    client: tuple[str, bytes] | None = None  # for a daemon's L2: the socket, and the scheduler's client id
    machine: str = field(default_factory=_machine)

    @classmethod
    def of(cls, region: HostRegion, client: tuple[str, bytes] | None = None) -> "RegionHandle":
        """The handle of a shared region that this process has mapped."""
        assert region.fd is not None
        return cls(os.getpid(), region.fd, region.num_slots, region.slot_bytes, region.region_id, client)

    def join(self) -> None:
        """For a daemon's L2: have the scheduler's slots kept until this process has ended as well."""
        if self.client is not None and self.pid != os.getpid():
            join(Path(self.client[0]), self.client[1])

    def attach(self) -> HostRegion:
        """Map it here. OSError if the process is gone or another user's, TierUnavailable if the daemon is gone.

        ConfigError if these numbers are another process's here: on another node, or in another container.
        """
        if self.machine != _machine():
            raise ConfigError("the scheduler is on another machine")
        self.join()
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != self.region_id:
                raise ConfigError(f"process {self.pid} here is another one; share the scheduler's pid namespace")
            return HostRegion.attach(fd, self.num_slots, self.slot_bytes)
        finally:
            os.close(fd)


def handle_of(tiers: CacheTiers, known: RegionHandle | None, plan: StepPlan) -> RegionHandle | None:
    """The handle by which workers find a plan's L2, `known` if it is still right. It changes when the daemon restarts.

    If that happens while a step is planned, its loads are of the old memory. None: its handle is not known.
    """
    region, member = tiers.region, tiers.member if isinstance(tiers, RemoteTiers) else None
    if region is None or plan.region not in (0, region.region_id):
        return known if known is not None and known.region_id == plan.region else None
    if known is None or (known.region_id, known.client) != (region.region_id, member):
        return RegionHandle.of(region, member)
    return known


@dataclass
class WorkerStep:
    """One step of a worker. vLLM passes it as a `StepMessage`."""

    region: RegionHandle | None  # None: no daemon is there, so nothing is planned
    plan: bytes  # `StepPlan`: loads, and stores of blocks this step fills
    final_stores: bytes  # `StepPlan`: stores of finished requests; made before the step's compute
    is_idle: bool  # nothing is computed in this step
    fences: tuple[int, ...] = ()  # stores that must end first, since this step writes to their blocks
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request → blocks that were promised and are gone
    late: frozenset[str] = frozenset()  # of those requests, the ones that wait for an asynchronous load
    touches: bool = False  # vLLM zeroes or copies blocks that this step's loads write to
    blends: Mapping[str, BlendOrder] = field(default_factory=dict)  # by request
    dropped: Set[str] = frozenset()  # requests whose blend ends now
    room: int = 0  # tokens that blends may compute in this step


_log = logging.getLogger(__name__)

_IDLE_WAIT: Final = 0.005  # seconds an idle step waits for a copy, and so how long a new request may wait
_DEADLINE: Final = 30.0  # seconds a step waits for a copy: between memories only a dead device takes longer
_TRY_AGAIN: Final = 30.0  # seconds before mapping is retried: the daemon may have been busy


class WorkerHalf:
    """One rank's copies. Called from the worker's thread, step by step:

    `begin` (before anything is written) → `start_load` → compute, `wait_layer` → `start_store` → `collect`.
    Between two steps the engine may unmap its KV memory: `sleep` → `wake`, or `register` for other memory.
    """

    def __init__(self, plan: SlotPlan, *, layerwise: bool, settles: bool = False, ways: CopyWays | None = None) -> None:
        """`layerwise`: the engine calls `wait_layer` before each layer; else synchronous loads end in `start_load`.

        `settles`: the engine may unmap its KV memory after any step without calling `sleep`. It only waits for the work
        that its device was given. `ways`: how a GPU copies, and whether that is measured.
        """
        self._plan = plan
        self._layerwise = layerwise
        self._settles = settles
        self._ways = ways
        self._layer_numbers = {name: number for number, name in enumerate(plan.layers)}
        self._rank = 0
        self._blocks: EngineBlocks | None = None
        self._asleep: EngineBlocks | None = None  # what `wake` restores
        self._stream: CopyStream | None = None
        self._by_thread = True  # a thread may make copies: not all of L2 is pinned yet
        self._region: HostRegion | None = None
        self._side: WorkerSide | None = None
        self._loads: dict[int, CopyOp] = {}
        self._step: WorkerStep | None = None
        self._stores = StepPlan(0, 0)
        self._spoiled = False  # a load this step's compute relied on has failed
        self._late: set[int] = set()  # synchronous loads that missed the step's deadline
        self.memory: RegionHandle | None = None  # the scheduler's L2 that this rank copies for, or last did
        self._unreachable: RegionHandle | None = None  # memory that could not be mapped,
        self._unreachable_until = 0.0  # and when to retry
        self._refused: list[int] = []  # ops that were not started and count as failed
        self._reports: list[WorkerReport] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self.blending: Blending | None = None  # None: nothing is blended,
        self.readiness: str | None = None  # and why not, until it is reported; "" if something is
        self._tables: dict[str, list[int]] = {}  # the blocks that a blend is to fill
        self._blended: dict[str, BlendResult | str] = {}

    def register(self, kv_caches: Mapping[str, torch.Tensor], rank: int) -> None:
        """Copy from and to these tensors from now on; copies of earlier ones end first."""
        self.sleep()
        self._rank, self._asleep = rank, None
        self._blocks = engine_blocks(self._plan, kv_caches, rank)

    def sleep(self) -> None:
        """The engine unmaps its KV memory next: end every copy, then unpin and unmap L2. No copies until `wake`.

        Idempotent. RuntimeError if a copy does not end by the deadline: the memory is in use and must stay.
        """
        for request_id in list(self._tables):
            assert self.blending is not None
            self.blending.drop(request_id)
            self._end_blend(request_id, "aborted")
        if self._stream is not None and not self._stream.drain(_DEADLINE):
            raise RuntimeError(f"a copy from or to KV memory has not ended in {_DEADLINE:.0f} s, so it must stay")
        self._disconnect()
        self._asleep, self._blocks = self._blocks or self._asleep, None

    def wake(self) -> None:
        """The memory is mapped again at the same addresses, with undefined content. Idempotent."""
        self._blocks = self._blocks or self._asleep

    def begin(self, message: WorkerStep) -> None:
        """Begin a step: wait until stores have read the blocks it writes to."""
        if message is self._step:
            return
        self._refuse(StepPlan(0, 0, (), self._stores.stores))  # vLLM never reported that their compute was issued
        self._step, self._spoiled = message, False
        if message.region is None:
            self._disconnect()  # its memory may be what a restarted daemon lacks
        final_stores = StepPlan.decode(message.final_stores)
        self._stores = StepPlan.decode(message.plan)
        for request_id, blocks in message.lost.items():
            self._lost(request_id, blocks, waits=request_id in message.late)
        side = self._connected(message.region) if final_stores or message.fences or self._stores.loads else None
        if side is None:
            self._refuse(final_stores)
            return
        self._store(side, final_stores)
        side.fence(message.fences)
        side.begin(self._stores, early=not message.touches)
        if self._starts_early(message):
            self._load(side)

    def start_load(self, message: WorkerStep) -> None:
        """Start this step's loads. Those its compute needs are waited for here, or layer by layer."""
        self.begin(message)  # for a runner without a hook before the step
        plan = self._stores
        if not plan.loads:
            return
        side = self._connected(message.region)
        if side is None:
            return self._refuse(StepPlan(plan.step, plan.region, plan.loads))
        self._load(side)
        if not self._layerwise and any(op.layerwise for op in plan.loads):
            self._await(side, len(self._plan.layers) - 1)
        return None

    def wait_layer(self, name: str) -> None:
        """The compute reaches a layer: wait until this step's synchronous loads have filled it."""
        if self._layerwise and self._side is not None and any(op.layerwise for op in self._stores.loads):
            self._await(self._side, self._layer_numbers.get(name, 0))

    def start_store(self, message: WorkerStep) -> None:
        """The step's compute is issued: store the blocks it filled, unless a load it needed has failed."""
        plan, self._stores = self._stores, StepPlan(0, 0)
        if not plan.stores:
            return
        side = self._connected(message.region)
        if side is None or self._spoiled or (any(op.layerwise for op in plan.loads) and not side.arrived()):
            self._spoiled = True
            self._refuse(StepPlan(plan.step, plan.region, (), plan.stores))
        else:
            self._store(side, plan)

    def collect(self) -> None:
        """The step's compute is issued, and on a CPU over: blend, and collect what has ended."""
        if self._step is not None and (self._step.blends or self._tables):
            self._blend(self._step)
        self._reports.append(WorkerReport((), tuple(self._refused)))
        self._refused = []
        if self._side is None:
            return
        if self._settles and self._by_thread and self._stream is not None and self._region is not None:
            # A thread copies from and to pageable memory, unknown to the device. Its last copy may precede the pin.
            self._by_thread = not self._region.pinned
            self._stream.drain(_DEADLINE)
        if self._step is not None and self._step.is_idle:
            self._side.wait(_IDLE_WAIT)
        self._apply(self._side.poll())
        if self._spoiled:
            # The device continues a failed load; after our report its blocks are computed again.
            if not self._side.wait_loads():
                raise RuntimeError(f"a load that a step needed has not ended in {_DEADLINE:.0f} s: memory is stuck")
            self._apply(self._side.poll())

    def _blend(self, message: WorkerStep) -> None:
        """Begin a step's blends, and go on with all. A prefix that they read may be what the step itself has computed.

        vLLM shares a block with other requests when it plans the step that computes it.
        """
        side = self._connected(message.region) if message.blends else None
        for request_id, order in message.blends.items():
            self._tables[request_id] = order.blocks[order.num_l1 // self._plan.block_size :]
            op_ids = tuple(source.op_id for source in order.sources)
            try:
                if self.blending is None or side is None or self._region is None:
                    self._end_blend(request_id, UNSUPPORTED if self.blending is None else "unreachable")
                else:
                    self.blending.start(request_id, order, self._region)
            except ConfigError as error:
                self.blending, self.readiness = None, str(error)
                self._end_blend(request_id, UNSUPPORTED)
            except RuntimeError as error:  # no memory, say
                _log.warning("a prompt is computed, not blended: %s", error)
                self._end_blend(request_id, "failed")
            is_copied = request_id in self._tables
            self._reports.append(WorkerReport(op_ids) if is_copied else WorkerReport((), op_ids))
        if self.blending is None:
            for request_id in list(self._tables):
                self._end_blend(request_id, UNSUPPORTED)
            return
        for request_id in message.dropped:
            if self.blending.drop(request_id):
                self._end_blend(request_id, "aborted")
        for request_id, result in self.blending.advance(message.room).items():
            self._end_blend(request_id, result)

    def _end_blend(self, request_id: str, result: BlendResult | str) -> None:
        """Report a blend that ended; if it did not fill its blocks, vLLM computes them."""
        blocks = self._tables.pop(request_id)
        self._blended[request_id] = result
        if isinstance(result, str):
            self._lost(request_id, tuple(blocks), waits=True)
        else:
            self._received.add(request_id)

    def take_blended(self) -> tuple[dict[str, BlendResult | str], str | None]:
        """The blends that ended since the last call, and whether any can be made, if that is new."""
        blended, self._blended = self._blended, {}
        readiness, self.readiness = self.readiness, None
        return blended, readiness

    def _starts_early(self, message: WorkerStep) -> bool:
        """Whether this step's loads start before its compute, and so end with it: the request computes a step sooner.

        vLLM calls `start_load` after a compute that waits for no load. On a GPU that compute is only issued by then,
        and loads start at the mark of `begin`. On a CPU it is over, and the request would wait for another step.
        """
        is_host = self._blocks is not None and self._blocks.device.type == "cpu"
        return is_host and not message.touches and not any(op.layerwise for op in self._stores.loads)

    def _load(self, side: WorkerSide) -> None:
        """Start the step's loads, once."""
        plan = self._stores
        self._loads |= {op.op_id: op for op in plan.loads}
        side.start_load(plan)
        if not any(op.layerwise for op in plan.loads):  # else they are needed until the step ends
            self._stores = replace(plan, loads=())

    def _await(self, side: WorkerSide, layer: int) -> None:
        if not side.wait_layer(layer):
            self._spoiled = True
            self._late |= {op.op_id for op in self._stores.loads if op.layerwise}

    def _apply(self, report: WorkerReport) -> None:
        """Apply a report. A late load counts as failed, though it has ended: the step computed without it."""
        if late := self._late.intersection(report.finished):
            in_time = tuple(op_id for op_id in report.finished if op_id not in late)
            report = WorkerReport(in_time, (*report.failed, *late), report.lost)
        self._late.difference_update(report.failed)
        self._reports.append(report)
        for op_id in (*report.finished, *report.failed):
            op = self._loads.pop(op_id, None)
            if op is None:
                continue
            if op_id in report.failed:
                _log.warning("a load of %d blocks failed; they are computed again", len(op))
                self._lost(op.request_id, op.device_blocks, waits=not op.layerwise)
            elif not op.layerwise:
                self._received.add(op.request_id)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load ended since the last call, and those of them that failed."""
        received, failed = self._received, self._failed
        self._received, self._failed = set(), set()
        return received, failed

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_reports(self) -> WorkerReport:
        """The reports since the last call, merged."""
        reports, self._reports = self._reports, []
        return WorkerReport(
            tuple(op_id for report in reports for op_id in report.finished),
            tuple(op_id for report in reports for op_id in report.failed),
            tuple(op_id for report in reports for op_id in report.lost),
        )

    def close(self) -> WorkerReport:
        """End copies under way, up to a deadline, and unmap L2. Idempotent."""
        self._disconnect()
        return self.take_reports()

    def _disconnect(self) -> None:
        if self._side is not None:
            self._apply(self._side.close(_DEADLINE))
            self._side = self._stream = None
        if self._region is not None:
            self._region.close()
            self._region = None

    def _store(self, side: WorkerSide, plan: StepPlan) -> None:
        if self._rank % self._plan.replicas == 0:
            side.start_store(plan)
        else:  # another rank stores the same bytes
            self._reports.append(WorkerReport(tuple(op.op_id for op in plan.stores)))

    def _lost(self, request_id: str, blocks: tuple[int, ...], *, waits: bool) -> None:
        """Promised KV is missing. If a block id does not identify the request, the request is named instead."""
        self._spoiled |= not waits
        if waits:
            self._received.add(request_id)
        if self._plan.has_one_table:
            self._invalid.update(blocks)
        else:
            self._failed.add(request_id)

    def _refuse(self, plan: StepPlan) -> None:
        """Count copies that cannot be made as failed."""
        self._refused += [op.op_id for op in (*plan.loads, *plan.stores)]
        for op in plan.loads:
            self._lost(op.request_id, op.device_blocks, waits=not op.layerwise)

    def _connected(self, handle: RegionHandle | None) -> WorkerSide | None:
        """Map L2 at the first step that needs it, since the scheduler's half is made later. None: not possible now.

        After a restart of the daemon its new memory is mapped.
        """
        if handle is None or self._blocks is None:
            return None
        if self._region is not None and self.memory != handle:
            self._disconnect()
        if self._side is None and (self._unreachable != handle or time.monotonic() >= self._unreachable_until):
            try:
                self._region, self.memory = handle.attach(), handle
            except (OSError, ConfigError, TierUnavailable) as error:
                if self._unreachable != handle:
                    _log.warning("the scheduler's memory cannot be mapped here, so no blocks are kept: %s", error)
                self._unreachable, self._unreachable_until = handle, time.monotonic() + _TRY_AGAIN
                return None
            self._unreachable = None
            self._side = self._started(self._blocks, self._region)
        return self._side

    def _started(self, blocks: EngineBlocks, region: HostRegion) -> WorkerSide:
        if blocks.device.type == "cuda":
            region.pin(blocks.device.index)
        on_device = blocks.device.type == "cuda"
        stream: CopyStream
        stream = CudaCopyStream(blocks, region, ways=self._ways) if on_device else HostCopyStream(blocks, region)
        self._stream = stream
        self._by_thread = True
        # Models with only states have no layer of K and V. A group of states may have more layers than those.
        sizes = blocks.num_layers, max(self._plan.slot_bytes, default=blocks.slot_bytes)
        return WorkerSide(stream, *sizes, _DEADLINE, by_layers=self._layerwise)


def with_blocks(op: CopyOp, blocks: tuple[int, ...], slots_at: tuple[int, ...]) -> CopyOp:
    """The op with a worker's block ids, one for each KV group and block; `slots_at` gives the slot of each."""
    return replace(
        op,
        device_blocks=blocks,
        host_slots=tuple(map(op.host_slots.__getitem__, slots_at)),
        generations=tuple(map(op.generations.__getitem__, slots_at)),
    )

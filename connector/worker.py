"""The worker side: runs a plan's copies between L1 and L2 beside the compute, and reports how they ended."""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import numpy as np

from kvtier.connector.plan import StepPlan, WorkerReport
from kvtier.tiers.copies import COPIED, BlockCopies, CopyEvent, CopyStream, ended

_GROUP_BYTES: Final = 4 << 20  # a layer group is copied in pieces of about this size: large copies, early first layers


Follow = Callable[[int], CopyStream | None]
"""The stream to a region by its id; None if that region cannot be reached."""


class WorkerSide:
    """Copies of one worker. Called from the engine's thread only; no method but `wait_layer` and `close` waits.

    A layerwise load is cut into groups of layers: the first layers compute while the last are still copied.
    """

    def __init__(
        self, stream: CopyStream | Follow, num_layers: int, layer_bytes: int, deadline: float, *, by_layers: bool = True
    ) -> None:
        """`layer_bytes`: one layer's in one block; `deadline`: seconds a layer may wait for its load.

        Instead of a stream, a function that makes one for a plan's region, since a restarted daemon has a new region.
        Without `by_layers` no layer is needed before the last one is loaded: loads are not cut.
        """
        self._follow = stream if callable(stream) else None
        self._stream = None if callable(stream) else stream
        self._region: int | None = None
        self._num_layers = num_layers
        self._layer_bytes = layer_bytes
        self._deadline = deadline
        self._by_layers = by_layers
        self._loads: dict[int, list[tuple[int, CopyEvent]]] = {}  # op → (end layer, event) of each group
        self._stores: dict[int, CopyEvent] = {}
        self.finished: list[int] = []  # copies that were complete when submitted, until the next `poll`
        self._expired: set[int] = set()  # stores whose blocks were overwritten before they were read
        self._begun: object | None = None  # the mark after which the step's loads start, except layerwise ones
        self._layerwise: list[int] = []  # ops of this step's plan that its compute waits for
        self._late_at = 0.0  # deadline of all of them

    def begin(self, plan: StepPlan, *, early: bool) -> None:
        """A step begins, after its fences. With `early`, loads that are not layerwise start after this point.

        Otherwise they start after everything issued until `start_load`, which may still use the blocks they write to.
        """
        self._begun = self.connect(plan.region).mark() if early and plan.loads else None

    def start_load(self, plan: StepPlan) -> None:
        """Enqueue the plan's L2 → L1 copies, after everything issued so far (or before `begin`, if `early`).

        If that raises, `poll` reports the incomplete ops as failed, once their submitted parts have ended.
        """
        if not plan.loads:
            self._layerwise, self._begun = [], None
            return
        awaited = [op for op in plan.loads if op.layerwise]
        self._layerwise = [op.op_id for op in awaited]
        self._late_at = time.monotonic() + self._deadline
        # The ops of a kind are one device copy with shared events. First those that this step's compute needs.
        kinds = [ops for ops in (awaited, [op for op in plan.loads if not op.layerwise]) if ops]
        events: list[list[tuple[int, CopyEvent]]] = [[] for _ in kinds]
        for ops, groups in zip(kinds, events, strict=True):
            self._loads.update(dict.fromkeys([op.op_id for op in ops], groups))
        try:
            for ops, groups in zip(kinds, events, strict=True):
                stream = self._stream if plan.region == self._region else None
                stream = stream or self.connect(plan.region)
                columns = zip(*[(op.device_blocks, op.host_slots) for op in ops], strict=True)
                blocks, slots = [np.array([*chain.from_iterable(column)], np.int64) for column in columns]
                cut, after = ops is awaited and self._by_layers, None if ops is awaited else self._begun
                for start, end in self._groups(len(blocks)) if cut else [(0, self._num_layers)]:
                    groups.append((end, stream.load(BlockCopies(blocks, slots, (start, end)), after)))
        finally:
            self._begun = None
            for groups in events:
                if not groups or groups[-1][0] < self._num_layers:
                    groups.append((self._num_layers, ended("it could not be started")))
        for ops, groups in zip(kinds, events, strict=True):
            if all(event is COPIED for _, event in groups):
                self.finished += [op.op_id for op in ops]
                for op in ops:
                    del self._loads[op.op_id]

    def wait_layer(self, layer: int) -> bool:
        """Wait until every layerwise load of this step has loaded layer `layer`; False if one failed or is late.

        Then the step's output is invalid for the requests concerned: `poll` names their ops.
        """
        arrived = True
        for op_id in self._layerwise:
            if op_id not in self._loads:  # ended, and reported by `poll`
                continue
            event = next(event for end, event in self._loads[op_id] if layer < end)
            left = max(0.0, self._late_at - time.monotonic())  # one deadline for all layers and loads of the step
            arrived &= self._fence(event, left) and event.error is None
        return arrived

    def arrived(self) -> bool:
        """Whether every layerwise load of this step succeeded, except those that `poll` has reported.

        Called after the step's compute. An engine with a drafter computes twice, and polls in between.
        """
        events = [event for op_id in self._layerwise for _, event in self._loads.get(op_id, ())]
        return all(event.wait(max(0.0, self._late_at - time.monotonic())) and event.error is None for event in events)

    def wait_loads(self) -> bool:
        """Wait, up to the step's deadline, until every part of its layerwise loads has ended, successfully or not."""
        events = [event for op_id in self._layerwise for _, event in self._loads.get(op_id, ())]
        return all(event.wait(max(0.0, self._late_at - time.monotonic())) for event in events)

    def start_store(self, plan: StepPlan) -> None:
        """Enqueue the plan's L1 → L2 copies, after the compute that fills them. If that raises, as `start_load`."""
        if plan.stores:
            event: CopyEvent | None = None
            op_ids = [op.op_id for op in plan.stores]
            try:
                stream = self._stream if plan.region == self._region else None
                columns = zip(*[(op.device_blocks, op.host_slots) for op in plan.stores], strict=True)
                blocks, slots = [np.array([*chain.from_iterable(column)], np.int64) for column in columns]
                event = (stream or self.connect(plan.region)).store(BlockCopies(blocks, slots))
            finally:
                if event is COPIED:
                    self.finished += op_ids
                else:
                    failed = ended("it could not be started") if event is None else event
                    self._stores.update(dict.fromkeys(op_ids, failed))

    def unstarted(self, plan: StepPlan) -> tuple[int, ...]:
        """Ops of this step's plan that were not started, because the step raised before: no report names them."""
        started = {*self._loads, *self._stores, *self.finished}
        return tuple(op.op_id for op in (*plan.loads, *plan.stores) if op.op_id not in started)

    def fence(self, op_ids: Sequence[int]) -> None:
        """Order these stores' reads before writes of compute issued from now on.

        A store that is late, by the same deadline as a load, is reported as failed: its content is undefined.
        """
        late_at = time.monotonic() + self._deadline
        for op_id in op_ids:
            event = self._stores.get(op_id)
            if event is not None and not self._fence(event, max(0.0, late_at - time.monotonic())):
                self._expired.add(op_id)

    def poll(self) -> WorkerReport:
        """The ops that have ended since the last poll."""
        finished, self.finished = self.finished, []
        failed: list[int] = []
        lost: list[int] = []
        for op_id, groups in self._loads.items():
            if all(event.done() for _, event in groups):
                (failed if any(event.error for _, event in groups) else finished).append(op_id)
                if any(event.is_lost for _, event in groups):
                    lost.append(op_id)
        for op_id in (*finished, *failed):
            self._loads.pop(op_id, None)  # a layerwise op may be polled only after the compute that needs it
        if self._stores:
            self._poll_stores(finished, failed, lost)
        return WorkerReport(tuple(finished), tuple(failed), tuple(lost))

    def _poll_stores(self, finished: list[int], failed: list[int], lost: list[int]) -> None:
        """Add the stores that have ended. Stores of a step share one event: it is queried once."""
        expired, ended = self._expired, list[int]()
        last, is_done, is_lost, error = None, False, False, False
        for op_id, event in self._stores.items():
            if event is not last:
                last, is_done = event, event.done()
                is_lost, error = event.is_lost, bool(event.error)
            if is_done:
                ended.append(op_id)
                (failed if error or op_id in expired else finished).append(op_id)
                if is_lost:
                    lost.append(op_id)
        if len(ended) == len(self._stores):
            self._stores.clear()
        else:
            for op_id in ended:
                del self._stores[op_id]
        expired.difference_update(ended)

    def wait(self, timeout: float) -> None:
        """Wait until the oldest load, else the oldest store, has ended, at most `timeout` seconds.

        For an engine with nothing else to do: spinning would keep the GIL from the copying thread.
        """
        if self.finished:
            return
        for groups in self._loads.values():
            groups[-1][1].wait(timeout)
            return
        for event in self._stores.values():
            event.wait(timeout)
            return

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not (self._loads or self._stores or self.finished)

    def close(self, timeout: float) -> WorkerReport:
        """Drain for up to `timeout` seconds, then stop. Reports unfinished ops as failed and lost."""
        if self._stream is not None:
            self._stream.close(timeout)
        report = self.poll()
        left = (*self._loads, *self._stores)
        self._loads.clear()
        self._stores.clear()
        return WorkerReport(report.finished, (*report.failed, *left), (*report.lost, *left))

    def connect(self, region: int) -> CopyStream:
        """The stream to a region, a new one if it is not the last one's; copies of the old stream end first."""
        if self._follow is not None and (self._stream is None or region != self._region):
            stream = self._follow(region)
            if self._stream is not None:
                self._stream.close(self._deadline)
            self._stream, self._region = stream or _NoStream(), region
        assert self._stream is not None
        return self._stream

    def _fence(self, event: CopyEvent, timeout: float) -> bool:
        """After a change of regions the event may be of a closed stream: then it has ended."""
        assert self._stream is not None
        return event.done() or self._stream.fence(event, timeout)

    def _groups(self, num_blocks: int) -> Sequence[tuple[int, int]]:
        """Layer ranges of about _GROUP_BYTES each."""
        size = max(1, _GROUP_BYTES // (num_blocks * self._layer_bytes))
        return [(start, min(start + size, self._num_layers)) for start in range(0, self._num_layers, size)]


class _NoStream:
    """A `CopyStream` to a region that cannot be reached: every copy fails at once."""

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        return ended("the region is gone")

    store = load

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        return event.done()

    def mark(self) -> object | None:
        return None

    def drain(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> None:
        pass

"""`NoOffload`, the connector of an engine that stores nothing, and the start of copies outside a step."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.connector import Answered, ConnectorUpdate, Request, StepPlan, WorkerReport, WorkerSide
from kvtier.tiers import BlockRecord, tracing
from kvtier.tiers.hierarchy import Pending

if TYPE_CHECKING:
    from kvtier.connector import ConnectedRequest, OverlappedLoad


_log = logging.getLogger(__name__)

_NO_PLAN: Final = StepPlan(0, 0)


class NoOffload:
    """A connector and its scheduler side in one, that finds nothing and stores nothing."""

    def __init__(self) -> None:
        self.worker = WorkerSide(lambda region: None, 1, 1, 0.0)  # never used
        self.scheduler = self
        self.computes_alone = False
        self.identity = None
        self.writing: list[int] = []  # always empty, as the next three
        self.released: list[int] = []
        self.overlapped: dict[str, OverlappedLoad] = {}
        self.requests: dict[str, ConnectedRequest] = {}
        self.traces: dict[str, tracing.Trace] = {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing, and returns at once."""

    admit = computed = drop_late = wait = reset = close = _nothing

    def lookup(self, request: Request, num_computed_tokens: int, in_part: int = 0, *, spares: int = 0) -> int | Pending:
        return 0

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        return 0

    def is_cut(self, request_id: str, num_loaded: int) -> bool:
        return False

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Never called: the scheduler does not store without a connector."""

    def store_partial(self, request_id: str, partial: BlockRecord, block_id: int) -> bool:
        return False

    def build_plan(self) -> StepPlan:
        return _NO_PLAN

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        return ConnectorUpdate()

    def finished(self, request_id: str, answered: Answered | None = None) -> None:
        self.traces.pop(request_id, None)

    def end_overlapped(self, request_id: str) -> int:
        return 0


def start_copies(worker: WorkerSide, plan: StepPlan) -> None:
    """Start a plan's copies outside a step: nothing is computed on its loads yet.

    Copies that cannot be started count as failed in the worker's next report.
    """
    for start, copies in ((worker.start_load, plan.loads), (worker.start_store, plan.stores)):
        try:
            if copies:
                start(plan)
        except Exception:  # draining or closing has no step to repeat
            _log.warning("%d copies could not be started", len(copies), exc_info=True)

"""The engine's interface to kvtier: a connector's two halves, and `NoOffload`, which stores nothing."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.connector import Answered, ConnectorUpdate, Request, StepPlan, WorkerReport, WorkerSide
from kvtier.tiers import BlockRecord, tracing
from kvtier.tiers.hierarchy import Pending
from kvtier.tiers.naming import ModelIdentity

if TYPE_CHECKING:
    from kvtier.connector import ConnectedRequest, OverlappedLoad, SchedulerSide


_log = logging.getLogger(__name__)


class EngineConnector(Protocol):
    """Both halves and their shutdown; implemented by `LocalConnector`."""

    @property
    def scheduler(self) -> "SchedulerSide | NoOffload":
        """The scheduler's half. Only `wait` waits."""

    @property
    def worker(self) -> WorkerSide:
        """The copying half. Copies are only enqueued."""

    @property
    def identity(self) -> ModelIdentity | None:
        """The identity in its blocks' names, if it differs from the requested one: KV of that name differed."""

    def reset(self) -> None:
        """Drop every block from every tier below L1."""

    def close(self) -> None:
        """Release everything, after the worker's last report was applied. Idempotent."""


_NO_PLAN: Final = StepPlan(0, 0)


class NoOffload:
    """The connector of an engine without one: finds nothing, stores nothing."""

    def __init__(self) -> None:
        self.worker = WorkerSide(lambda region: None, 1, 1, 0.0)  # never used
        self.computes_alone = False
        self.identity = None
        self.writing: list[int] = []  # always empty, as the next three
        self.released: list[int] = []
        self.overlapped: dict[str, OverlappedLoad] = {}
        self.requests: dict[str, ConnectedRequest] = {}
        self.traces: dict[str, tracing.Trace] = {}

    @property
    def scheduler(self) -> "NoOffload":
        return self

    def admit(self, request: Request) -> None:
        """Does nothing."""

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

    def drop_late(self, *, short_only: bool = False) -> None:
        pass

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        return ConnectorUpdate()

    def finished(self, request_id: str, answered: Answered | None = None) -> None:
        self.traces.pop(request_id, None)

    def end_overlapped(self, request_id: str) -> int:
        return 0

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """Does nothing."""

    def wait(self, timeout: float) -> None:
        """Returns at once."""

    def reset(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


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

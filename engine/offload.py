"""The seam where kvtier plugs into the engine: a connector's two halves, and their twins that offload nothing."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.connector import Answered, ConnectorUpdate, Request, StepPlan, WorkerReport
from kvtier.tiers import BlockRecord
from kvtier.tiers.hierarchy import Pending
from kvtier.tiers.naming import ModelIdentity

if TYPE_CHECKING:
    from kvtier.connector import Back, ConnectedRequest, SchedulerSide, WorkerSide


_log = logging.getLogger(__name__)


class EngineConnector(Protocol):
    """Both halves and their end; `LocalConnector` is the real one."""

    @property
    def scheduler(self) -> "SchedulerSide | NoOffload":
        """The scheduler's half. Never waits, but in `wait`."""

    @property
    def worker(self) -> "WorkerSide | NoCopies":
        """The copying half. Copies only enqueue."""

    @property
    def identity(self) -> ModelIdentity | None:
        """What its tiers' blocks are named after, if another one than was asked for: KV of this name is kept apart."""

    def reset(self) -> None:
        """Forget every block in every tier below L1."""

    def close(self) -> None:
        """Let go of everything, after the worker was closed and its last report taken in. Idempotent."""


_NO_PLAN: Final = StepPlan(0, 0)


class NoCopies:
    """The copying half of `NoOffload`."""

    def start_load(self, plan: StepPlan) -> None:
        """No copies."""

    def wait_layer(self, layer: int) -> bool:
        return True

    def arrived(self) -> bool:
        return True

    def start_store(self, plan: StepPlan) -> None:
        """No copies."""

    def unstarted(self, plan: StepPlan) -> tuple[int, ...]:
        return ()

    def poll(self) -> WorkerReport:
        return WorkerReport()

    def wait(self, timeout: float) -> None:
        """Nothing is ever under way."""

    def close(self, timeout: float) -> WorkerReport:
        return WorkerReport()


class NoOffload:
    """The connector of an engine without one: finds nothing, stores nothing."""

    def __init__(self) -> None:
        self.worker = NoCopies()
        self.computes_alone = False
        self.identity = None
        self.writing: list[int] = []  # always empty
        self.backs: dict[str, Back] = {}  # the same
        self.requests: dict[str, ConnectedRequest] = {}  # nobody was asked

    @property
    def scheduler(self) -> "NoOffload":
        return self

    def admit(self, request: Request) -> None:
        """Nobody is remembered."""

    def lookup(self, request: Request, num_computed_tokens: int, in_part: int = 0) -> int | Pending:
        return 0

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        return 0

    def is_cut(self, request_id: str, num_loaded: int) -> bool:
        return False

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Never called: the scheduler does not store without a connector."""

    def store_tail(self, request_id: str, tail: BlockRecord, block_id: int) -> bool:
        return False

    def build_plan(self) -> StepPlan:
        return _NO_PLAN

    def drop_late(self, *, short_only: bool = False) -> None:
        pass

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        return ConnectorUpdate()

    def finished(self, request_id: str, answered: Answered | None = None) -> None:
        """Nothing is remembered."""

    def leave(self, request_id: str) -> int:
        return 0

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """Nothing competes with computing."""

    def wait(self, timeout: float) -> None:
        """Nothing is ever under way."""

    def reset(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to let go of."""


def start_copies(worker: "WorkerSide | NoCopies", plan: StepPlan) -> None:
    """Start a plan's copies beside no step: what it loads is not computed upon yet.

    Those that cannot be started have failed; the worker's next report says so.
    """
    for start, copies in ((worker.start_load, plan.loads), (worker.start_store, plan.stores)):
        try:
            if copies:
                start(plan)
        except Exception:  # who drains or closes an engine has no step to make again
            _log.warning("%d copies could not be started", len(copies), exc_info=True)

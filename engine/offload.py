"""The seam where kvtier plugs into the engine: what it asks of a connector, and the twin that offloads nothing."""

from collections.abc import Sequence
from typing import Final, Protocol

from kvtier.connector import ConnectorUpdate, Request, StepPlan, WorkerReport
from kvtier.tiers.hierarchy import Attribution, Pending


class SchedulerConnector(Protocol):
    """The scheduler's half; `connector.SchedulerSide` is the real one. Never waits, but in `wait`."""

    def lookup(self, request: Request, num_computed_tokens: int) -> int | Pending:
        """Tokens beyond those in L1 that can be loaded; PENDING: ask again next step. Idempotent."""

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        """The request got its whole block table; load the external tokens (0: let go of what was promised).

        Returns how many of them are being loaded; the request computes the others.
        """

    def found(self, request_id: str) -> Attribution | None:
        """Where the blocks of a request that was looked up were; None: nobody was asked."""

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> object:
        """These blocks of the request's table are full once this step has computed; each is held until released."""

    def build_plan(self) -> StepPlan:
        """All copies asked for since the last plan."""

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        """What ended copies mean for requests and L1 blocks."""

    def finished(self, request_id: str) -> None:
        """The request is over; copies under way are still reported. Idempotent."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step prefilled `num_tokens` in `seconds`."""

    def wait(self, timeout: float) -> None:
        """Wait until a pending lookup may have an answer, at most `timeout` seconds."""


class WorkerConnector(Protocol):
    """The copying half; `connector.WorkerSide` is the real one. Copies only enqueue."""

    def start_load(self, plan: StepPlan) -> None:
        """Enqueue the plan's L2 → L1 copies."""

    def wait_layer(self, layer: int) -> bool:
        """Wait for this layer of the step's layerwise loads; False where one failed or is late."""

    def arrived(self) -> bool:
        """Whether the step's layerwise loads all ended well, now that its compute has ended."""

    def start_store(self, plan: StepPlan) -> None:
        """Enqueue the plan's L1 → L2 copies, behind the compute."""

    def poll(self) -> WorkerReport:
        """Copies that have ended since the last poll."""

    def wait(self, timeout: float) -> None:
        """Wait for a load to end, at most `timeout` seconds."""

    def close(self, timeout: float) -> WorkerReport:
        """Drain for up to `timeout` seconds, then stop."""


class EngineConnector(Protocol):
    """Both halves and their end."""

    @property
    def scheduler(self) -> SchedulerConnector:
        """The scheduler's half."""

    @property
    def worker(self) -> WorkerConnector:
        """The copying half."""

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
        """No loads: every layer is there."""
        return True

    def arrived(self) -> bool:
        """No loads: all are there."""
        return True

    def start_store(self, plan: StepPlan) -> None:
        """No copies."""

    def poll(self) -> WorkerReport:
        """No copies, no news."""
        return WorkerReport()

    def wait(self, timeout: float) -> None:
        """Nothing is ever under way."""

    def close(self, timeout: float) -> WorkerReport:
        """Nothing to let go of."""
        return WorkerReport()


class NoOffload:
    """The connector of an engine without one: finds nothing, stores nothing."""

    def __init__(self) -> None:
        self.worker = NoCopies()

    @property
    def scheduler(self) -> "NoOffload":
        """Itself."""
        return self

    def lookup(self, request: Request, num_computed_tokens: int) -> int | Pending:
        """Nothing beyond L1."""
        return 0

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        """Nothing was promised."""
        return 0

    def found(self, request_id: str) -> None:
        """Nobody was asked."""

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Never called: the scheduler does not store without a connector."""

    def build_plan(self) -> StepPlan:
        """No copies."""
        return _NO_PLAN

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        """No copies, no news."""
        return ConnectorUpdate()

    def finished(self, request_id: str) -> None:
        """Nothing is remembered."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Nothing competes with computing."""

    def wait(self, timeout: float) -> None:
        """Nothing is ever under way."""

    def reset(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to let go of."""

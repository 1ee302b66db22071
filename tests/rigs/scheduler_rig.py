"""A scheduler without a model: its connector finds and ends what the test says, its steps believe they computed."""

from collections.abc import Callable, Sequence

from kvtier.connector.plan import WorkerReport
from kvtier.connector.request import Answered, Request
from kvtier.connector.scheduler import ConnectorUpdate
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import NoOffload
from kvtier.engine.requests import FinishReason, Output, SampledToken, SamplingParams
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Sequence as Live
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.hierarchy.cache_tiers import Pending
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.naming.identity import KVShape

BLOCK = 4
ROOT = root_hash(b"f" * 32)


class ScriptedConnector(NoOffload):
    """Finds what the test says, and ends copies when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.findable: dict[str, int | Pending] = {}  # request → tokens beyond L1
        self.lapsed: set[str] = set()  # requests whose promise is gone when they get their blocks
        self.log: list[tuple[object, ...]] = []
        self.news = ConnectorUpdate()
        self.released = [0]  # each step asks for updates

    def lookup(self, request: Request, num_computed_tokens: int, in_part: int = 0, *, spares: int = 0) -> int | Pending:
        return self.findable.get(request.request_id, 0)

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        if not num_external_tokens or request_id in self.lapsed:
            return 0
        self.log.append(("load", request_id, num_external_tokens))
        return num_external_tokens

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        self.log.append(("store", request_id, first_block, len(block_ids)))

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        news, self.news = self.news, ConnectorUpdate()
        return news

    def finished(self, request_id: str, answered: Answered | None = None) -> None:
        self.log.append(("finished", request_id))


class Story:
    """A scheduler over a pool of real bookkeeping; "computing" is believing."""

    def __init__(
        self,
        num_blocks: int,
        connector: ScriptedConnector | None = None,
        partial_blocks: bool = False,
        **options: object,
    ) -> None:
        settings = {"block_size": BLOCK, "max_num_batched_tokens": 8, "max_num_seqs": 4, **options}
        self.config = EngineConfig(**settings)  # type: ignore[arg-type]
        self.pool = BlockPool(KVShape(1, 1, 1, BLOCK, "float32"), num_blocks, partial_blocks=partial_blocks)
        self.connector = connector
        self.scheduler = Scheduler(self.config, self.pool, connector, frozenset({0}))
        self.live: dict[str, Live] = {}
        self.ended: dict[str, FinishReason] = {}
        self.arrived = True
        self.copied: list[tuple[int, int]] = []  # within L1, in the last step

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **params: object) -> Live:
        chain = TokenChain(ROOT, BLOCK)
        chain.extend(prompt)
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.live[name] = Live(name, list(prompt), sampling, chain, len(self.live))
        self.scheduler.add(self.live[name])
        return self.live[name]

    def step(self, token: int = 7) -> list[tuple[str, int, int]]:
        """One step; who computed which tokens. Every sampled token is `token`."""
        batch = self.scheduler.schedule(WorkerReport())
        done = [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in batch.chunks]
        batch.arrived = self.arrived
        self.copied = batch.copies
        assert batch.num_tokens <= self.config.token_budget
        for chunk in batch.chunks:
            assert len(chunk.sequence.block_table) * BLOCK >= chunk.end
        outputs = self.scheduler.postprocess(batch, [SampledToken(token) for chunk in batch.chunks if chunk.samples])
        self._note(outputs)
        self.pool.check()
        return done

    def copies(self) -> tuple[int, ...]:
        """The blocks of the stores under way."""
        return tuple(self.scheduler._held.copies.elements())

    def end_copies(self) -> None:
        """The stores under way have ended: the next step hears of it."""
        if self.connector is not None:
            self.connector.news = ConnectorUpdate(released=self.copies())

    def run(self, limit: int = 200) -> list[list[tuple[str, int, int]]]:
        """Step until all is done."""
        steps = []
        while self.scheduler.has_unfinished:
            steps.append(self.step())
            assert len(steps) < limit, "the scheduler makes no progress"
        return steps

    def idle(self) -> None:
        """Nothing lives, every block is free, all laws hold."""
        assert not self.scheduler.has_unfinished
        assert not self.scheduler.has_copies
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert not self.scheduler._admission.computing, "a hash is still claimed"
        self.pool.check()

    def _note(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output.finish_reason


Begin = Callable[..., Story]  # the fixture: stories that end idle, by the laws


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))

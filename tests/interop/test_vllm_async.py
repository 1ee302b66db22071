"""Asynchronous scheduling with drafts, which vLLM runs on no CPU: its real scheduler, and a worker that is played.

The worker writes (position, token) where vLLM's kernels write KV, drafts that are rejected included. Whatever a store
reads must be what the text has there.
"""

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm_drafters import let_vllm_register_its_cpu_kernels, make_drafter
from vllm_rig import BLOCK, engine, make_checkpoint, prompt, tiers

from kvtier.connector import StepPlan
from kvtier.connector.vllm.messages import CopyReports

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NUM_DRAFTS = 3
ANSWER = 100  # tokens
SALVAGED: list[dict[int, tuple[int, int]]] = [{1: (1, 0)}, {2: (1, 0)}, {1: (1, 0), 2: (0, 1)}]  # op → (well, badly)


def test_reports_of_a_rank_whose_step_failed_count_in_the_next_step() -> None:
    """vLLM 0.33 salvages what ranks reported in a step that failed on another. A copy ends once all have reported."""
    aggregator = KVOutputAggregator(2)
    if not hasattr(aggregator, "ft_defer_kv_connector_outputs"):
        pytest.skip("vLLM 0.32 salvages nothing")
    first, late, last = (KVConnectorOutput(kv_connector_worker_meta=CopyReports(ops)) for ops in SALVAGED)
    aggregator.ft_defer_kv_connector_outputs([first, None])
    ranks = [ModelRunnerOutput([], {}, [], kv_connector_output=told) for told in (late, last)]
    told = aggregator.aggregate(ranks)
    assert told is not None
    assert told.kv_connector_output.kv_connector_worker_meta.ops == {1: (2, 0), 2: (1, 1)}


def token_at(seed: int, position: int) -> int:
    """What the model says: by request and position alone."""
    return 3 + (seed * 7919 + position * 104729) % 500


class PlayedWorker:
    """Runs steps in the scheduler's order and knows, as a GPU does, how many drafts were accepted before."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts  # request → its prompt and what the model says
        self.tables: dict[str, list[int]] = {}
        self.at: dict[str, int] = {}  # request → tokens whose KV is right
        self.kv: dict[int, list[tuple[str, int, int] | None]] = {}
        self.read: list[list[tuple[str, int, int] | None]] = []  # what stores read, block by block
        self.rejected = self.accepted = 0
        self.random = random.Random(0)

    def step(self, output: Any) -> ModelRunnerOutput:
        message = output.kv_connector_metadata
        ops = self._store(StepPlan.decode(message.final_stores))
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id], self.at[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.tables[request_id] += [] if tables is None else tables[0]
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, output.num_scheduled_tokens[name], output) for name in names]
        ops += self._store(StepPlan.decode(message.plan))
        reports = CopyReports(dict.fromkeys(ops, (1, 0)))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=reports),
        )

    def _compute(self, name: str, num_tokens: int, output: Any) -> list[int]:
        text, start = self.texts[name], self.at[name]
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        right = self.random.randint(0, drafts)
        for position in range(start, start + num_tokens):
            is_right = position < start + num_tokens - drafts + right
            self._write(name, position, text[position] if is_right else -1)
        self.at[name] = start + num_tokens - drafts + right
        self.accepted, self.rejected = self.accepted + right, self.rejected + drafts - right
        if self.at[name] < len(text) - ANSWER - NUM_DRAFTS - 1:
            return []  # a part of the prompt
        return text[start + num_tokens - drafts : self.at[name] + 1]

    def _write(self, name: str, position: int, token: int) -> None:
        empty: list[tuple[str, int, int] | None] = [None] * BLOCK
        block = self.kv.setdefault(self.tables[name][position // BLOCK], empty)
        block[position % BLOCK] = (name, position, token)

    def _store(self, plan: StepPlan) -> list[int]:
        self.read += [list(self.kv[block]) for op in plan.stores for block in op.device_blocks]
        assert not plan.loads
        return [op.op_id for op in plan.stores]


@pytest.mark.parametrize("method", brief(["eagle"], ["near", "eagle"]))
def test_no_store_reads_what_was_rejected(method: str, tmp_path: Path) -> None:
    let_vllm_register_its_cpu_kernels()
    model = make_checkpoint("llama", tmp_path / "llama")
    (tmp_path / "drafter").mkdir()
    spec = make_drafter(method, tmp_path / "drafter", model)
    with engine(model, tiers(), speculative_config=spec) as vllm:
        plain = vllm.scheduler
        scheduler = AsyncScheduler(
            vllm_config=plain.vllm_config,
            kv_cache_config=plain.kv_cache_config,
            structured_output_manager=plain.structured_output_manager,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        half = scheduler.connector._scheduler
        hasher = get_request_block_hasher(BLOCK, sha256)
        texts = {}
        for seed, length in enumerate((70, 96, 33)):
            said = [token_at(seed, position) for position in range(length, length + ANSWER + NUM_DRAFTS + 1)]
            texts[str(seed)] = [*prompt(seed, length), *said]
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0)
            scheduler.add_request(Request(str(seed), prompt(seed, length), params, None, block_hasher=hasher))
        worker, under_way = PlayedWorker(texts), deque[Any]()
        for _ in range(400):
            if scheduler.has_requests() or half.pending:
                output = scheduler.schedule()
                under_way.append((output, worker.step(output)))
            if len(under_way) == 2 or (under_way and not scheduler.has_requests()):
                scheduler.update_from_output(*under_way.popleft())
            elif not under_way and not half.pending:
                break
        assert not scheduler.has_requests()
        scheduler.connector.shutdown()
    assert worker.accepted
    assert worker.rejected
    starts = set()
    for block in worker.read:
        assert block[0] is not None
        name, start, _ = block[0]
        assert block == [(name, start + i, texts[name][start + i]) for i in range(BLOCK)]
        starts.add((name, start))
    # Every full block was stored, of prompts and of answers; one whose next token is not known has no name.
    ends = {name: len(text) - NUM_DRAFTS - 1 for name, text in texts.items()}
    assert starts == {(name, start) for name, end in ends.items() for start in range(0, end - BLOCK, BLOCK)}

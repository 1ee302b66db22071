"""vLLM's real scheduler and cache manager over KV groups of any kinds, without a model: what is computed is a hash.

A token's KV is a digest of the tokens up to it, and so is a state. Before each step the runner looks at all that the
step would read. So a block or a state of another prompt, another place or another time is found at once.
"""

import hashlib
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from cache_planning import planned
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_rig import greedy

from kvtier.connector.vllm.messages import CopyReports
from kvtier.connector.vllm.slot_plan import is_state, layer_specs, slot_plan
from kvtier.connector.vllm.worker import WorkerHalf

_DIGEST: Final = 8  # bytes


class Digests:
    """A digest of each of a prompt's beginnings, `[tokens, 8]` bytes. Grows with its answer."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._made: list[bytes] = []
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            before = self._made[-1] if self._made else b""
            self._made.append(hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=_DIGEST).digest())
        self.tokens += tokens

    def of(self, first: int, last: int) -> torch.Tensor:
        """Those of the beginnings that end with tokens `first` to `last`, the latter not included."""
        made = np.frombuffer(b"".join(self._made[first:last]), np.uint8).copy()
        return torch.from_numpy(made).reshape(last - first, _DIGEST)


class ScriptedRunner:
    """One engine. `specs` are its layers' caches; with `ahead` vLLM schedules a step before it knows the last one's."""

    def __init__(
        self,
        model: Path,
        specs: dict[str, Any],
        kvtier: dict[str, Any],
        *,
        ahead: bool = False,
        num_at_once: int = 8,
        **cache: Any,
    ) -> None:
        transfer = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        options: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 96, "max_num_seqs": num_at_once}
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            kv_transfer_config=KVTransferConfig(**transfer, kv_connector_extra_config=kvtier),
            **options,
        )
        config: Any = arguments.create_engine_config()
        config.cache_config.kv_cache_layout = "BLHNC"
        config.cache_config.block_size = max(spec.block_size for spec in specs.values())
        for name, value in cache.items():
            setattr(config.cache_config, name, value)
        config.scheduler_config.async_scheduling = ahead
        worker = planned(config, specs)
        shown = generate_scheduler_kv_cache_config([worker])
        size, unit = resolve_kv_cache_block_sizes(shown, config)
        aligned = resolve_cache_hit_alignment_tokens(shown, config, size, unit)
        for each in (worker, shown):
            each.hash_block_size, each.cache_hit_alignment_tokens = unit, aligned
        config.cache_config.num_gpu_blocks = worker.num_blocks
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self.hasher = get_request_block_hasher(unit, algorithm)
        self.specs = layer_specs(worker)
        self.groups = worker.kv_cache_groups
        raw = torch.zeros(worker.kv_cache_tensors[0].size, dtype=torch.int8)
        self.caches = dict[str, torch.Tensor]()
        for tensor in worker.kv_cache_tensors:
            spec = self.specs[tensor.layers[0]]
            if is_state(spec):
                at = tensor.offset, tensor.layer_stride, tensor.block_stride
                for i, name in enumerate(tensor.layers):
                    shape = (worker.num_blocks, spec.real_page_size_bytes)
                    self.caches[name] = raw.as_strided(shape, (at[2], 1), at[0] + i * at[1])
                continue
            views = create_kv_cache_views(raw, spec, worker.num_blocks, KVCacheLayout.BLHNC, tensor)
            self.caches |= dict(zip(tensor.layers, views, strict=True))
        self.worker = WorkerHalf(slot_plan(config, worker, canonical=False), layerwise=False)
        self.worker.register(self.caches, 0)
        made = AsyncScheduler if ahead else Scheduler
        self.scheduler: Any = made(
            vllm_config=config,
            kv_cache_config=shown,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            hash_block_size=unit,
            log_stats=False,
        )
        self.half = self.scheduler.connector._scheduler
        self.digests: dict[str, Digests] = {}  # of each request, with those just sampled
        self.cached: dict[str, int] = {}  # tokens that a request did not compute
        self._ahead = ahead
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def add(self, name: str, tokens: list[int], num_tokens: int) -> None:
        self.digests[name] = Digests(tokens)
        self.scheduler.add_request(Request(name, list(tokens), greedy(num_tokens), None, block_hasher=self.hasher))

    def run(self) -> None:
        end = time.monotonic() + 120
        while self.scheduler.has_unfinished_requests() or self._in_flight or self.half.pending:
            assert time.monotonic() < end, "requests wait for ever"
            self.step()

    def step(self) -> None:
        output = self.scheduler.schedule()
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        self._in_flight.append((output, self._compute(output, tables)))
        most = int(self._ahead and bool(output.num_scheduled_tokens))
        while len(self._in_flight) > most:
            self.scheduler.update_from_output(*self._in_flight.popleft())

    def _compute(self, output: Any, tables: dict[str, Any]) -> ModelRunnerOutput:
        message = output.kv_connector_metadata
        self.worker.begin(message)
        for copy in output.kv_cache_block_copies or ():
            for cache in self.caches.values():
                cache[copy.dst_block_id] = cache[copy.src_block_id]
        starts = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.worker.start_load(message)
        sampled = []
        for name, num_scheduled in output.num_scheduled_tokens.items():
            digests, start = self.digests[name], starts[name]
            self.cached.setdefault(name, start)
            end = start + num_scheduled
            replay_start = self.scheduler.requests[name].replay_start
            for group, table in zip(self.groups, tables[name], strict=True):
                for layer in group.layer_names:
                    self._compute_layer(layer, table, digests, range(start, end), replay_start)
            sampled.append([] if end < len(digests.tokens) else [3 + int(digests.of(end - 1, end)[0, 0])])
            digests.extend(sampled[-1])
        self.worker.start_store(message)
        self.worker.collect()
        received, failed = self.worker.take_received()
        told = KVConnectorOutput(
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=self.worker.take_invalid(),
            kv_connector_worker_meta=CopyReports.of(self.worker.take_reports()),
        )
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled, kv_connector_output=told)

    def _compute_layer(self, layer: str, table: list[int], digests: Digests, span: range, replay_start: int) -> None:
        start, end = span.start, span.stop
        spec, cache = self.specs[layer], self.caches[layer]
        size = spec.block_size
        if is_state(spec):
            states = cache.view(torch.uint8)[:, :_DIGEST]
            if start:
                kept = states[table[(start - 1) // size]]
                assert torch.equal(kept, digests.of(start - 1, start)[0]), (
                    f"{layer}: not the state behind {start} tokens"
                )
            states[table[(end - 1) // size]] = digests.of(end - 1, end)[0]
            return
        window = getattr(spec, "sliding_window", None)
        first = max(0, start - window + 1) if window else 0
        if getattr(spec, "bounded_replay", False):  # the hit's last window is computed again, from its own tokens alone
            first = max(first, min(start, replay_start))
        positions = torch.arange(first, end)
        blocks = torch.tensor(table)[positions // size]
        assert blocks.all(), f"{layer}: a token from {first} to {end} has no block"
        tokens = cache[:, 0].view(torch.uint8)[..., :_DIGEST]  # [blocks, tokens, bytes]
        read, made = slice(0, start - first), slice(start - first, None)
        kept = tokens[blocks[read], positions[read] % size]
        assert torch.equal(kept, digests.of(first, start)), f"{layer}: behind {start} tokens there is other KV"
        tokens[blocks[made], positions[made] % size] = digests.of(start, end)

    def forget_l1(self) -> None:
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Nothing leaked, and the books balance."""
        self.run()
        tiers = self.half.side.tiers
        assert not self.half._rows
        assert not self.half._ops
        assert tiers.drain(60)
        tiers.check()
        counts = tiers.host.pool.counts()
        assert (counts.leased, counts.filling) == (0, 0)
        self.worker.close()
        self.scheduler.shutdown()

"""The vLLM connector: keeps the KV blocks of vLLM's requests in kvtier's tiers, without patching vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"file": {"path": "kv-cache"}}}'

vLLM makes one connector in each worker, and then one in its scheduler's process. Each is one half that only translates.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch
from prometheus_client import Counter, Gauge
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connector import open_tiers
from kvtier.connector.vllm.blending import Blending, decoder_in
from kvtier.connector.vllm.identity import adapter_settings, fingerprint, identity, name_instead
from kvtier.connector.vllm.interface import require_supported_version
from kvtier.connector.vllm.keys import ServedAdapters, watch_engine_core
from kvtier.connector.vllm.messages import LAST_REPORTS, CopyReports, StepMessage
from kvtier.connector.vllm.options import VllmOptions, warn_of_policy
from kvtier.connector.vllm.plugin import register
from kvtier.connector.vllm.requests import AnswerReader
from kvtier.connector.vllm.scheduler import SchedulerHalf
from kvtier.connector.vllm.segments import SegmentRequests, why_not
from kvtier.connector.vllm.slot_plan import divided, slot_order, slot_plan, warn_of_order, why_none, why_unnamed
from kvtier.connector.vllm.slots import SlotPlan
from kvtier.connector.vllm.worker import WorkerHalf
from kvtier.tiers import ConfigError, Metrics, Series, tracing
from kvtier.tiers.config import otlp_target
from kvtier.tiers.copies import CopyWays

_STATS_EVERY: Final = 1.0  # seconds between two reports to vLLM's metrics


@dataclass
class KVTierStats(KVConnectorStats):
    """Samples by series: `data[name][labels joined by NUL]`, counters as differences, gauges as they are."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)
    before: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    due: float = 0.0

    def since_last(self, metrics: Metrics) -> "KVTierStats | None":
        """The differences since the last reading; None within a second of it, or if nothing changed."""
        if (now := time.monotonic()) < self.due:
            return None
        self.due = now + _STATS_EVERY
        data: dict[str, dict[str, float]] = {}
        for sample in metrics.samples():
            series = sample.name, sample.labels
            old, self.before[series] = self.before.get(series, 0.0), sample.value
            value = sample.value - old if sample.is_counter else sample.value
            if sample.value != old:
                data.setdefault(sample.name, {})["\0".join(sample.labels)] = value
        return KVTierStats(data=data) if data else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """The sum of two intervals, or of two engines."""
        counters = {sample.name for sample in Metrics().samples() if sample.is_counter}
        merged = {name: dict(series) for name, series in self.data.items()}
        for name, series in other.data.items():
            into = merged.setdefault(name, {})
            for labels, value in series.items():
                into[labels] = into.get(labels, 0.0) + value if name in counters else value
        return KVTierStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """The numbers in vLLM's log line: blocks looked up, by the tier that had them."""
        return {
            f"{labels} blocks": value for labels, value in sorted(self.data.get("kvtier_lookup_blocks", {}).items())
        }

    def is_empty(self) -> bool:
        return not self.data


class KVTierProm(KVConnectorPromMetrics):
    """Every series of kvtier's, with vLLM's labels before ours.

    Names begin with "vllm:", since vLLM unregisters such series when an engine ends.
    """

    PREFIX = "vllm:"

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, tuple[Series, Any]] = {}
        for family in Metrics().families():
            options: dict[str, Any] = {} if family.is_counter else {"multiprocess_mode": "mostrecent"}
            options |= {"documentation": family.text, "labelnames": [*labelnames, *family.labels]}
            make = metric_types[Counter if family.is_counter else Gauge]
            self._families[family.name] = family, make(name=self.PREFIX + family.name, **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, series in transfer_stats_data.items():
            family, metric = self._families[name]
            for labels, value in series.items():
                ours = labels.split("\0") if family.labels else []
                child = metric.labels(*self.per_engine_labelvalues[engine_idx], *ours)
                if family.is_counter:
                    child.inc(value)
                else:
                    child.set(value)


S = TypeVar("S")
W = TypeVar("W")


class Halves(Generic[S, W]):
    """The scheduler's half or a worker's, whichever vLLM made here, and what it says to vLLM's metrics."""

    PROM: ClassVar[type[KVTierProm]] = KVTierProm
    _scheduler_half: S | None = None
    _worker_half: W | None = None

    @property
    def _scheduler(self) -> S:
        assert self._scheduler_half is not None, "only for the scheduler's half"
        return self._scheduler_half

    @property
    def _worker(self) -> W:
        assert self._worker_half is not None, "only for a worker's half"
        return self._worker_half

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KVTierProm:
        return cls.PROM(vllm_config, metric_types, labelnames, per_engine_labelvalues)


_log = logging.getLogger(__name__)


class KVTierConnector(Halves[SchedulerHalf, WorkerHalf], KVConnectorBase_V1, SupportsHMA):
    """One half of the connector: the scheduler's or a worker's.

    The blocks of a finished request are free at once. If a store has not read a block yet, vLLM waits for that store
    before it writes the block again (`StepMessage.fences`). That costs a wait only if a block is reused within
    milliseconds, and it never keeps memory from requests.

    Raises ConfigError if this model or this version of vLLM (`interface.py`) cannot be served correctly.
    """

    _blends: Callable[[Mapping[str, torch.Tensor]], tuple[Blending | None, str]] | None = None  # if segments are on

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported_version(KVTierConnector, KVTierStats, KVTierProm, StepMessage, CopyReports)
        options = VllmOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        order = slot_order(options.order, vllm_config, kv_cache_config)
        plan = replace(slot_plan(vllm_config, kv_cache_config, canonical=options.keys == "kvtier"), order=order)
        plan = divided(plan, options.config.cache.share_across_tp, vllm_config, kv_cache_config)
        self._drops = options.on_reset == "drop"
        self._metrics = Metrics()  # a worker's: of its copies. The scheduler's half counts in its tiers
        self._stats = KVTierStats()
        if role == KVConnectorRole.WORKER:
            sleeps = vllm_config.model_config.enable_sleep_mode
            settles = sleeps and not hasattr(KVConnectorBase_V1, "unregister_kv_caches")  # vLLM 0.32 has no hook for it
            ways = CopyWays.to_measure(options.config.host, self._metrics)
            self._worker_half = WorkerHalf(plan, layerwise=options.layerwise, settles=settles, ways=ways)
            if options.config.cache.segments != "off":
                whole = get_current_vllm_config_or_none()
                self._blends = partial(_blending, plan, vllm_config, whole or vllm_config)
            if get_tensor_model_parallel_rank() == 0:  # only one rank logs it
                warn_of_policy(_failure_policy(self._kv_transfer_config))
            return
        stores = self._kv_transfer_config.is_kv_producer  # "kv_consumer" only loads; the others do both
        options.warn(plan.block_size, vllm_config.model_config.max_model_len, stores=stores)
        if stores:
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            options.warn_of_memory(plan.block_size, plan.block_bytes, step_tokens)
        warn_of_order(plan, vllm_config, kv_cache_config)
        cache = options.config.cache
        model_identity = identity(vllm_config, kv_cache_config, plan, cache)
        named = fingerprint(model_identity, plan, cache)
        parallel = vllm_config.parallel_config
        num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        config = options.shared(parallel.data_parallel_rank, parallel.data_parallel_size)
        adapters = None
        if (lora := vllm_config.lora_config) is not None:
            adapters = ServedAdapters(lora.max_cpu_loras or lora.max_loras, adapter_settings(vllm_config))
        watch_engine_core()
        tracing.start("kvtier-vllm", otlp_target(config.tracing.endpoint))
        tiers = open_tiers(config, named, plan, model_identity, takes_parts=plan.has_one_table)
        self._scheduler_half = SchedulerHalf(plan, tiers, cache, named, kv_cache_config.num_blocks, num_ranks, adapters)
        if (reason := why_unnamed(vllm_config)) is not None:
            _log.warning("no blocks of requests with images are kept: %s", reason)
        if (reason := why_none(vllm_config)) is not None:
            _log.warning("no blocks of this model are kept: %s", reason)
        shares = bool(vllm_config.cache_config.enable_prefix_caching)
        waits = vllm_config.max_concurrent_batches == 1
        if options.layerwise and not waits:
            _log.warning(
                "kv_connector_extra_config, layerwise: ignored, since vLLM schedules asynchronously and could not take "
                "back a step whose load failed; start it with --no-async-scheduling"
            )
        self._scheduler_half.configure(
            layerwise=options.layerwise, waits=waits, keeps=reason is None, shares=shares, stores=stores
        )
        if cache.segments != "off":
            step_tokens, num_blocks = vllm_config.scheduler_config.max_num_batched_tokens, kv_cache_config.num_blocks
            segments = SegmentRequests(self._scheduler_half.side, plan, cache, num_blocks, step_tokens)
            self._scheduler_half.segments = segments
            if (reason := why_not(vllm_config, plan)) is not None:
                segments.refuse(reason)
        model = vllm_config.model_config
        if not model.skip_tokenizer_init:
            self._scheduler_half.reads_answers = AnswerReader(str(model.tokenizer), model.tokenizer_revision)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self._scheduler_half.names.name_instead = name_instead(algorithm, plan.block_size)
        if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
            shared = options.config.events.shared
            self._scheduler_half.publish_events(kv_cache_config.kv_cache_groups, algorithm, shared=shared)
        _log.info("kvtier keeps blocks of %d tokens, %d bytes each", plan.block_size, plan.block_bytes)

    @property
    def served_adapters(self) -> ServedAdapters | None:
        """vLLM's loaded adapters, for `watch_engine_core`; None in a worker's half."""
        return None if self._scheduler_half is None else self._scheduler_half.names.adapters

    def weights_change(self) -> None:
        """The model's weights are about to change; with `on_reset` "keep" the user says that they never do."""
        if self._drops and self._scheduler_half is not None:
            self._scheduler_half.weights_change()

    def cache_emptied(self) -> None:
        """vLLM has emptied its own prefix cache."""
        if self._scheduler_half is not None:
            self._scheduler_half.cache_emptied()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, and a dropped store is only a later miss."""
        return False

    # the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those vLLM has, and whether the load is asynchronous. None: unknown yet."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: load them, or drop the promise."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        in_host, below = self._scheduler.found_in(request, num_external_tokens)
        sources = {CacheHitSource.HOST: in_host, CacheHitSource.DISK: below}
        return {source: count for source, count in sources.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' reports of their copies, and which blocks no connector could load."""
        self._scheduler.spoiled(connector_output.invalid_block_ids or set())
        self._scheduler.update(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks are free at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether stores are under way: then vLLM keeps stepping, so that an idle engine's last blocks are stored."""
        return self._scheduler.pending

    def reset_cache(self) -> bool:
        """vLLM calls this for new weights, and before each sleep, after which the weights may differ."""
        self._scheduler.reset(drops=self._drops)
        return True

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """What the tiers, or a worker's copies, counted since the last call, about once a second."""
        half = self._scheduler_half
        return self._stats.since_last(self._metrics if half is None else half.side.tiers.metrics)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    # a worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches, get_tensor_model_parallel_rank())
        if self._blends is not None:
            self._worker.blending, self._worker.readiness = self._blends(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 goes to sleep: its KV memory is unmapped next. Raises RuntimeError if copies do not end."""
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """vLLM wakes: its KV memory is mapped at the same addresses, with undefined content."""
        self._worker.wake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step writes anything: waits until stores have read the blocks it writes to."""
        self._worker.begin(_message(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads. vLLM calls this before the compute if the compute waits for a load, and after it otherwise."""
        self._worker.start_load(_message(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are stored once the step's compute is issued."""

    def wait_for_save(self) -> None:
        """Called once the compute is issued: starts stores, without waiting."""
        self._worker.start_store(_message(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load has ended, with or without success. Stores never delay freeing blocks."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Like `get_finished`, plus the failed loads of models with several KV groups."""
        self._worker.collect()
        received, failed = self._worker.take_received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed. vLLM recomputes them or fails the request, by its own policy."""
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> CopyReports | None:
        half = self._worker_half
        return None if half is None else CopyReports.of(half.take_reports(), *half.take_blended())

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loading by layers needs Python between the layers."""
        return bool(extra_config.get("layerwise", False))

    # both

    def take_events(self) -> Iterable[Any]:
        return self._scheduler_half.take_events() if self._scheduler_half is not None else ()

    def shutdown(self) -> None:
        """End copies, up to a deadline, and close the tiers. vLLM shuts the workers down first."""
        worker, scheduler = self._worker_half, self._scheduler_half
        reports = None if worker is None else CopyReports.of(worker.close())
        if worker is not None and worker.memory is not None and reports is not None:
            LAST_REPORTS[worker.memory] = reports
        if scheduler is not None:
            if scheduler.memory is not None:
                scheduler.update(LAST_REPORTS.pop(scheduler.memory, None))
            scheduler.close()


def _failure_policy(own: Any) -> str:
    """The failure policy that vLLM applies. Under MultiConnector that is the outer one; `own` is the child's.

    vLLM hands a child only its own part. While a worker makes its connector, the whole configuration is current.
    """
    whole = get_current_vllm_config_or_none()
    outer = None if whole is None else whole.kv_transfer_config
    policy: str = (outer or own).kv_load_failure_policy
    return policy


def _blending(
    plan: SlotPlan, vllm_config: Any, whole: Any, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[Blending | None, str]:
    """A worker's blends, or why it has none. `whole`: under MultiConnector the configuration with all connectors."""
    reason = why_not(vllm_config, plan)
    if whole.kv_transfer_config.kv_connector == "MultiConnector":
        reason = "beside another connector, which could keep what is blended"
    if any(tensor.device.type != "cpu" for tensor in kv_caches.values()):
        reason = "vLLM's KV on a GPU"
    if reason is None:
        layers = vllm_config.compilation_config.static_forward_context
        try:
            decoder, inv_freq = decoder_in(layers, plan, vllm_config.model_config.hf_config)
            return Blending(decoder, inv_freq, plan, kv_caches, vllm_config.scheduler_config.max_num_batched_tokens), ""
        except ConfigError as error:
            reason = str(error)
    return None, reason


def _message(metadata: KVConnectorMetadata) -> StepMessage:
    assert isinstance(metadata, StepMessage)
    return metadata


register()  # if users name this module's path, vLLM may load no plugins, but its metrics need the registered name

"""vLLM's connector for encoder outputs: images, audio and video that were encoded before are loaded, not encoded.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "KVTierECConnector", "ec_role": "ec_both",
        "ec_connector_extra_config": {"file": {"path": "encoder-cache"}}}'

It stands beside the KV connector, or alone, and has tiers of its own. vLLM makes one in each worker, and then one in
its scheduler's process. Each is one half that only translates.
"""

import logging
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvtier.connector import open_tiers
from kvtier.connector.vllm.connector import Halves, KVTierProm, KVTierStats
from kvtier.connector.vllm.encoder import EncoderReport, EncoderScheduler, EncoderShape, EncoderStep, EncoderWorker
from kvtier.connector.vllm.identity import encoder_identity
from kvtier.connector.vllm.interface import require_supported_version
from kvtier.connector.vllm.options import VllmOptions
from kvtier.connector.vllm.slot_plan import why_unnamed

_log = logging.getLogger(__name__)


class _Message(EncoderStep, ECConnectorMetadata):
    """A step's message, as vLLM passes it to the workers."""


class _Report(EncoderReport, ECConnectorWorkerMetadata):
    """A worker's report, as vLLM passes it back."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "_Report":
        assert isinstance(other, _Report)
        return _Report(**vars(self.plus(other)))


class EncoderProm(KVTierProm):
    """The same series as the KV connector's, under `vllm:encoder_kvtier_`."""

    PREFIX = "vllm:encoder_"


class KVTierECConnector(Halves[EncoderScheduler, EncoderWorker], ECConnectorBase):
    """One half of the connector: the scheduler's or a worker's. Raises ConfigError for options that cannot be meant."""

    PROM = EncoderProm

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        require_supported_version(KVTierECConnector, KVTierStats, EncoderProm, _Message, _Report)
        self._stats = KVTierStats()
        if role == ECConnectorRole.WORKER:
            device = torch.device(vllm_config.device_config.device)
            self._worker_half = EncoderWorker(device, encodes=get_pp_group().is_first_rank)
            return
        transfer, model = vllm_config.ec_transfer_config, vllm_config.model_config
        parallel = vllm_config.parallel_config
        options = VllmOptions.of(transfer.ec_connector_extra_config)
        self._width: int = model.get_inputs_embeds_size()
        self._widths: dict[str, int] = transfer.mm_encoder_output_widths  # measured where outputs are stored
        shape = EncoderShape(max([self._width, *self._widths.values()]), model.dtype.itemsize)
        cache = options.config.cache
        named = encoder_identity(vllm_config, shape.width, shape.block_size, cache)
        config = options.shared(parallel.data_parallel_rank, parallel.data_parallel_size)
        tiers = open_tiers(config, named.fingerprint(), shape, named, takes_parts=False)
        ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size  # of the first pipeline stage
        self._scheduler_half = EncoderScheduler(shape, tiers, named.fingerprint(), cache.cache_salt, ranks)
        reason = why_unnamed(vllm_config)
        self._keeps = reason is None
        if reason is not None:
            _log.warning("no encoder outputs are kept: %s", reason)
        _log.info(
            "kvtier keeps encoder outputs in pieces of %d rows, %d bytes each", shape.block_size, shape.block_bytes
        )

    def shutdown(self) -> None:
        """End the half. Idempotent."""
        half = self._scheduler_half or self._worker_half
        if half is not None:
            half.close()

    # the scheduler's half

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False while a tier below L2 is still read for one of the request's items that are not computed yet."""
        items = [
            (feature.identifier, request.get_num_encoder_embeds(index), self._widths.get(feature.modality, self._width))
            for index, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        return not self._keeps or self._scheduler.is_ready(request.request_id, items, loads=self.is_consumer)

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer and self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """vLLM has room for this item's output in this step."""
        self._scheduler.scheduled(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        evicted, is_idle = scheduler_output.free_encoder_mm_hashes, not scheduler_output.num_scheduled_tokens
        return _Message(**vars(self._scheduler.build(evicted, is_idle=is_idle, stores=self.is_producer)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' reports."""
        if (report := connector_output.ec_connector_worker_meta) is not None:
            self._scheduler.update(report)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. vLLM may free its encoder outputs at once."""
        self._scheduler.finished(request.request_id, [feature.identifier for feature in request.mm_features])
        return False, None

    def get_ec_connector_stats(self) -> Any:
        """What the tiers counted since the last call, about once a second."""
        half = self._scheduler_half
        return None if half is None else self._stats.since_last(half.side.tiers.metrics)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return KVTierStats(data=data or {})

    # a worker's half

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put this step's loads into vLLM's cache."""
        self._worker.load(encoder_cache)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """vLLM begins a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, _Message)
        self._worker.begin(connector_metadata)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Store what the encoder has put out. With tensor parallelism all ranks have the same: the first one stores."""
        if get_tensor_model_parallel_rank() == 0:
            self._worker.save(mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata:
        return _Report(**vars(self._worker.take_report()))

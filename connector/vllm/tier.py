"""A secondary tier (`SecondaryTierManager`) for vLLM's native offloading: kvtier's verified tiers below it."""

import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.connector.vllm.identity import engine_config, native_identity
from kvtier.connector.vllm.interface import require_supported_version
from kvtier.connector.vllm.slot_plan import why_none, why_unnamed
from kvtier.connector.vllm.tier_jobs import StoreOrder, TierJobs
from kvtier.tiers import ChainHash, ConfigError, Metrics, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Rates, TierPort, open_ports
from kvtier.tiers.naming import root_hash

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector


_CHECKED: Final = 64  # published chunks that are checked per step: whether the tier still has them
_MOST: Final = 1 << 20  # published chunks; beyond that the oldest are reported as removed


class ChunkEvents:
    """Publishes a chunk when the tier has stored it, and again when the tier no longer has it.

    Removals are found by checking some of the published chunks each time. Not thread-safe: called by vLLM's scheduler.
    Like vLLM's own tiers it does not publish what the tier had before the process began.
    """

    def __init__(
        self, hold: Callable[[Sequence[ChainHash]], list[bool] | None], medium: Medium, locality: Locality | None
    ) -> None:
        """`hold` returns which chunks the tier has; None while that is unknown."""
        self._hold = hold
        self._about: dict[str, Any] = {"medium": medium, "locality": locality}
        if "removal_expected" in {each.name for each in fields(OffloadingEvent)}:
            self._about["removal_expected"] = True  # vLLM then keeps what it needs to publish the removal
        self._published: OrderedDict[ChainHash, OffloadKey] = OrderedDict()  # least recently checked first
        self._new: list[tuple[ChainHash, OffloadKey]] = []

    def stored(self, chunks: Iterable[tuple[ChainHash, OffloadKey]]) -> None:
        """The tier has these now."""
        self._new += [(name, key) for name, key in chunks if name not in self._published]

    def take(self) -> list[OffloadingEvent]:
        """The events since the last call."""
        events = []
        if self._new:
            self._published.update(self._new)
            events.append(OffloadingEvent(keys=[key for _, key in self._new], removed=False, **self._about))
            self._new = []
        checked = list(islice(self._published, _CHECKED))
        present = self._hold(checked) if checked else None
        gone = [name for name, is_held in zip(checked, present or (), strict=present is not None) if not is_held]
        for name in checked:
            self._published.move_to_end(name)
        gone += list(islice(self._published, max(0, len(self._published) - _MOST)))
        if keys := [self._published.pop(name) for name in dict.fromkeys(gone)]:
            events.append(OffloadingEvent(keys=keys, removed=True, **self._about))
        return events


_log = logging.getLogger(__name__)

_SECTIONS: Final = ("file", "cache", "breaker")  # the sections of kvtier's configuration that apply here
_OPTIONS: Final[Mapping[str, type]] = {"config": str, "revision": str, "enable_kv_events": bool, "locality": str}
_LOCALITIES: Final = " or ".join(f'"{each.value}"' for each in Locality)
_GROUP_BYTES: Final = 4  # of an offload key, at its end
_MAX_PROMOTIONS: Final = 2  # of one chunk for one request; after that the chunk is computed, whatever failed


class _Promotions(Counter[ChainHash]):
    """How often each chunk was promoted for one request; kept in vLLM's record of the request."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The sizes of vLLM's chunks, as the tiers need them."""

    block_bytes: int
    block_size: int = 1  # tokens of a record; vLLM does not report those of a chunk


class KVTierSecondaryTier(SecondaryTierManager):
    """kvtier's tiers as `{"type": "KVTierSecondaryTier", "module_path": "kvtier.connector.vllm_tier", "file": {…}}`.

    Runs in the scheduler's process, on its thread except for I/O. Nothing here waits except `drain_jobs` and
    `shutdown`, which have a deadline. vLLM's chunks are stored unchanged, named by SHA-256 of their whole offload key.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        **options: Any,
    ) -> None:
        """`primary_kv_view` is `[num_chunks, chunk_bytes]`; a directory that cannot be used is logged as a warning.

        Raises ConfigError, and FormatError and StoreLocked from the slab, for errors that the user must fix.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        require_supported_version(KVTierSecondaryTier)
        config = _configuration(tier_type, options)
        self.locality = _locality(tier_type, options)
        engine = engine_config(offloading_spec)
        identity = native_identity(engine, offloading_spec, options.get("revision"), config.cache.epoch)
        root = root_hash(identity.fingerprint(), cache_salt=config.cache.cache_salt)
        num_chunks, chunk_bytes = len(primary_kv_view), self.block_size_bytes
        self.metrics = Metrics()
        ports: list[TierPort] = []
        if (reason := why_none(engine) or why_unnamed(engine)) is None:
            ports = open_ports(config, root, _Chunks(chunk_bytes), self.metrics, Rates("load"))
        else:
            _log.warning("secondary tier %s keeps no blocks: %s", tier_type, reason)
        if getattr(engine, "lora_config", None) is not None:
            advice = "vLLM's keys know an adapter's name and path; load changed weights from a new path"
            _log.warning("secondary tier %s: %s", tier_type, advice)
        max_storing = num_chunks if config.cache.store_queue is None else config.cache.store_queue // chunk_bytes
        self.jobs = TierJobs(ports, chunk_bytes, max(1, max_storing), config.cache.prefetch_deadline, self.metrics)
        self._chunks = primary_kv_view.cast("B")
        self._deadline = config.cache.prefetch_deadline + 2 * config.file.deadline
        self._running: dict[int, tuple[TransferJob, list[OffloadKey]]] = {}
        self._events = self._events_of(offloading_spec) if options.get("enable_kv_events") else None
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._has_ended = True

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS, from the index alone; never RETRY."""
        name = _name(key)
        promotions = req_context.get_state(_Promotions)
        if promotions is not None and promotions[name] >= _MAX_PROMOTIONS:
            return LookupResult.MISS
        return LookupResult.HIT if self.jobs.holds(name) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write chunks from the primary tier. vLLM pins them there until the job is reported."""
        keys, chunks = self._take(job_metadata)
        context = job_metadata.req_context
        if (order := context.get_state(StoreOrder)) is None:
            context.set_state(order := StoreOrder())
        groups = [int.from_bytes(key[-_GROUP_BYTES:], "big") for key in keys]
        self.jobs.store(job_metadata.job_id, [_name(key) for key in keys], chunks, groups, order)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read and verify chunks, then fill their slots of the primary tier."""
        keys, chunks = self._take(job_metadata)
        names = [_name(key) for key in keys]
        context = job_metadata.req_context
        if context.get_state(_Promotions) is None:
            context.set_state(_Promotions())
        context.get_state(_Promotions).update(names)
        self.jobs.load(job_metadata.job_id, names, chunks)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call. A chunk that failed for a request is not offered to it again."""
        results = []
        for ended in self.jobs.finished():
            job, keys = self._running.pop(ended.job_id)
            good = [key for key, outcome in zip(keys, ended.outcomes, strict=True) if outcome is Outcome.OK]
            if job.is_promotion:
                promotions = job.req_context.get_state(_Promotions)
                promotions.update(dict.fromkeys(map(_name, set(keys).difference(good)), _MAX_PROMOTIONS))
            elif self._events is not None:
                self._events.stored((_name(key), key) for key in good)
            results.append(
                JobResult(
                    ended.job_id,
                    success=len(good) == len(keys),
                    successful_keys=good if job.is_promotion else None,
                    transfer_time=ended.seconds,
                    transfer_bytes=len(good) * self.block_size_bytes,
                )
            )
        self._has_ended = self._has_ended or bool(results)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The chunks stored in and removed from the tier, with `enable_kv_events`."""
        return self._events.take() if self._events is not None else ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs up to a deadline, then cancel the rest: none writes to the primary tier after that."""
        self.jobs.drain(self._deadline)

    def shutdown(self) -> None:
        self.jobs.close(self._deadline)
        self._chunks.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            f"vllm:{family.name}": (OffloadingCounterMetadata if family.is_counter else OffloadingGaugeMetadata)(
                family.text, family.labels
            )
            for family in Metrics().families()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The increase of the counters since the last call; None if no job ended since."""
        if not self._has_ended:
            return None
        self._has_ended = False
        stats = OffloadingConnectorStats()
        for sample in self.metrics.samples():
            name = f"vllm:{sample.name}"
            if not sample.is_counter:
                stats.set_gauge(name, sample.value, sample.labels)
            elif grown := sample.value - self._reported.get((name, sample.labels), 0.0):
                self._reported[name, sample.labels] = sample.value
                stats.increase_counter(name, grown, sample.labels)
        return stats

    def _events_of(self, spec: "OffloadingSpec") -> ChunkEvents | None:
        """The publisher of chunk events; None, after a warning, if vLLM publishes no events."""
        if not spec.kv_events_config.enable_kv_cache_events:
            _log.warning(
                "secondary tier %s, enable_kv_events: vLLM publishes no KV events, nor does kvtier; start it with "
                "--kv-events-config '{\"enable_kv_cache_events\": true}'",
                self.tier_type,
            )
            return None
        return ChunkEvents(self.jobs.held, self.medium, self.locality)

    def _take(self, job: TransferJob) -> tuple[list[OffloadKey], list[memoryview]]:
        """The job's keys and their chunks' memory, in the order of tokens, so that chains are contiguous."""
        position = job.req_context.get_offload_key_position
        pairs = sorted(
            zip(job.keys, job.chunk_ids, strict=True),
            key=lambda pair: (pair[0][-_GROUP_BYTES:], position(pair[0]) or 0),
        )
        keys = [key for key, _ in pairs]
        self._running[job.job_id] = job, keys
        size = self.block_size_bytes
        return keys, [self._chunks[int(chunk) * size : (int(chunk) + 1) * size] for _, chunk in pairs]


def _name(key: OffloadKey) -> ChainHash:
    """A 32-byte name for an offload key, which is a block hash of any length and its group."""
    return hashlib.sha256(key).digest()


def _locality(tier_type: str, options: Mapping[str, Any]) -> Locality | None:
    """Where the storage is, as seen from this vLLM. ConfigError for an unknown locality."""
    if (given := options.get("locality")) is None:
        return None
    try:
        return Locality(given)
    except ValueError:
        fix = f"write {_LOCALITIES}, or leave it out"
        raise ConfigError(f'secondary tier {tier_type}, locality "{given}": no such place; {fix}') from None


def _configuration(tier_type: str, options: Mapping[str, Any]) -> Config:
    """kvtier's configuration from a tier's entry in `secondary_tiers`. Raises ConfigError naming the wrong option."""
    for name, value in options.items():
        if name not in (*_SECTIONS, *_OPTIONS):
            known = ", ".join((*_OPTIONS, *_SECTIONS))
            raise ConfigError(f"secondary tier {tier_type}, {name} {value!r}: no such option here; known are {known}")
    for name, kind in _OPTIONS.items():
        if (value := options.get(name)) is not None and not isinstance(value, kind):
            wrong = "not a string; write it in quotes" if kind is str else "neither true nor false; write one of them"
            raise ConfigError(f"secondary tier {tier_type}, {name} {value!r}: {wrong}")
    _locality(tier_type, options)
    config = Config.load(options.get("config"), **{name: options[name] for name in _SECTIONS if name in options})
    if config.file.path is None:
        fix = 'name a directory: "file": {"path": "/var/cache/kvtier"}'
        raise ConfigError(f"secondary tier {tier_type}, file.path: none given, so no blocks would be kept; {fix}")
    for option in config.cache.model_fields_set & {"lossy", "share_across_tp", "share_across_pp"}:
        if (value := getattr(config.cache, option)) not in ("none", None):
            problem = f'cache.{option} "{value}": vLLM\'s chunks are kept as they are'
            raise ConfigError(f"secondary tier {tier_type}, {problem}; leave it out")
    return config

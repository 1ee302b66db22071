"""vLLM's native offloading on a CPU: its tiering, unchanged, with a worker that copies in host memory.

vLLM refuses a CPU only in `CPUOffloadingSpec.get_worker`. With this file's folder on PYTHONPATH:
`kv_connector_extra_config={"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offloading",
"cpu_bytes_to_use": …, "secondary_tiers": […]}`. Without `secondary_tiers` it is the native offloading alone.
"""

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.tiers.host import memory

Addresses = NDArray[np.int64]


class HostOffloadingSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` whose device is host memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


@dataclass
class _Place:
    """Where the pages of one tensor stand: addresses and strides in bytes."""

    device: int
    device_stride: int
    host: int
    host_stride: int
    page: int


@dataclass
class _Transfer:
    job_id: int
    targets: Addresses
    sources: Addresses
    lengths: Addresses
    ended: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0


class HostCopyWorker(OffloadingWorker):
    """One thread that copies in the order of submission, without the GIL; one scattered copy per transfer."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._keep_alive: list[Any] = []
        places = []
        for cache in kv_caches.tensors:
            host = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            self._keep_alive += [cache.tensor, host]
            places.append(
                _Place(
                    cache.tensor.data_ptr(),
                    cache.tensor.stride(0) * cache.tensor.element_size(),
                    host.data_ptr(),
                    host.stride(0),
                    cache.page_size_bytes,
                )
            )
        self._groups = [
            [(places[ref.tensor_idx], ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs
        ]
        self._running: dict[int, _Transfer] = {}
        self._finished: queue.SimpleQueue[_Transfer] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="host-offloading", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        device, host, lengths = self._pairs(src_spec, dst_spec)
        return self._submit(_Transfer(job_id, host, device, lengths))

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """`expedited` (vLLM 0.33): the step waits for it. Here copies are so short that it stands in the one line."""
        device, host, lengths = self._pairs(dst_spec, src_spec)
        return self._submit(_Transfer(job_id, device, host, lengths))

    def get_finished(self) -> list[TransferResult]:
        results = []
        while not self._finished.empty():
            done = self._finished.get()
            del self._running[done.job_id]
            results.append(TransferResult(done.job_id, True, int(done.lengths.sum()), done.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self._running:
                assert self._running[job_id].ended.wait(60), "a copy in host memory hangs"

    def shutdown(self) -> None:
        self._waiting.put(None)
        self._thread.join(60)
        self._keep_alive.clear()
        self._region.cleanup()

    def _submit(self, transfer: _Transfer) -> bool:
        self._running[transfer.job_id] = transfer
        self._waiting.put(transfer)
        return True

    def _work(self) -> None:
        while transfer := self._waiting.get():
            start = time.perf_counter()
            step = max(1, min(1024, memory.COPY_PIECE // int(transfer.lengths.max(initial=1))))
            for first in range(0, len(transfer.lengths), step):
                part = slice(first, first + step)
                memory.copy_scattered(transfer.targets[part], transfer.sources[part], transfer.lengths[part])
            transfer.seconds = time.perf_counter() - start
            self._finished.put(transfer)
            transfer.ended.set()

    def _pairs(self, gpu: GPULoadStoreSpec, cpu: BlockIDsLoadStoreSpec) -> tuple[Addresses, Addresses, Addresses]:
        """Device address, host address and length of every piece. A group's first and last chunk may be in part."""
        device, host, lengths = [], [], []
        first_block = first_chunk = 0
        per_chunk = self._blocks_per_chunk
        for refs, size, index in zip(self._groups, gpu.group_sizes, gpu.block_indices, strict=True):
            inside = index % per_chunk + np.arange(size)  # in blocks, from the first chunk's start
            num_chunks = -(-(size + index % per_chunk) // per_chunk) if size else 0
            blocks = gpu.block_ids[first_block : first_block + size].astype(np.int64)
            chunks = cpu.block_ids[first_chunk : first_chunk + num_chunks].astype(np.int64)[inside // per_chunk]
            for place, length in refs:
                device.append(place.device + blocks * place.device_stride)
                host.append(place.host + chunks * place.host_stride + inside % per_chunk * place.page)
                lengths.append(np.full(size, length, np.int64))
            first_block, first_chunk = first_block + size, first_chunk + num_chunks
        return np.concatenate(device), np.concatenate(host), np.concatenate(lengths)

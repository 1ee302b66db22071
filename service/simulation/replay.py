"""Replays a trace through simulated tiers: one run for each capacity and policy, side by side in processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.service.simulation.simulated_tiers import Capacity, SimulatedTiers
from kvtier.service.traces import HINTS, RequestTrace
from kvtier.tiers import BATCH_BYTES, L2, ChainHash
from kvtier.tiers.reuse import Hint, RequestEnd

_HINTS: Final = (None, *map(Hint, HINTS))
TIERS: Final = (L2, "file", "redis")
_MOST_DISK: Final = 4  # times all blocks: extents are not filled to the last slot


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What one run found."""

    capacity: Capacity
    found: NDArray[np.int32]  # [requests, tiers]: leading blocks of each prompt that a tier had
    num_evicted: int  # blocks of L2
    num_written: int  # blocks, to the slab


class TraceReplay:
    """One trace, ready to be run at any capacity. Its blocks get names of 32 bytes, as in a pool."""

    def __init__(self, trace: RequestTrace, block_bytes: int) -> None:
        self.trace = trace
        self.block_bytes = block_bytes
        words = np.zeros((trace.num_names, 4), np.uint64)
        # Plain numbers: the index mixes them, and numbers in a row spread evenly over its buckets that way.
        words[:, 0] = np.arange(1, trace.num_names + 1)
        raw = words.tobytes()
        self._names = [raw[at : at + 32] for at in range(0, len(raw), 32)]

    def end(self, request: int) -> RequestEnd:
        """What the end of a request tells."""
        trace = self.trace
        names: list[ChainHash] = [self._names[block] for block in trace.chain(request).tolist()]
        hint, tenant = _HINTS[trace.hints[request]], int(trace.tenants[request])
        return RequestEnd(names, int(trace.num_prompt[request]), int(trace.num_output[request]), hint, tenant)

    def run(self, capacity: Capacity) -> SimulatedRun:
        """All requests, one after another. ValueError if memory has no room for a block.

        Room for far more than the trace's blocks finds what room for them all finds, and takes no memory here.
        """
        most = max(1, self.trace.num_names) * self.block_bytes
        disk = min(capacity.disk, _MOST_DISK * (most + BATCH_BYTES))
        room = replace(capacity, memory=min(capacity.memory, most), disk=disk)
        tiers = SimulatedTiers(room, self.block_bytes, self.trace.block_size)
        found = np.zeros((len(self.trace), len(TIERS)), np.int32)
        for request, begun in enumerate(self.trace.begun.tolist()):
            found[request] = tiers.request(self.end(request), begun)
        written = tiers.slab.num_written if tiers.slab is not None else 0
        return SimulatedRun(capacity, found, tiers.pool.num_evicted, written)


_REPLAYS: list[TraceReplay] = []  # of a worker process: what it runs


def sweep(
    replay: TraceReplay, capacities: Sequence[Capacity], progress: Callable[[int, int], None], num_processes: int = 0
) -> list[SimulatedRun]:
    """A run at each capacity, in this order. `progress` is told how many of all have ended.

    `num_processes`: 0 for one per core this process may use; with one, or one run, all happens in this process.
    """
    workers = min(len(capacities), num_processes or len(os.sched_getaffinity(0)))
    if workers <= 1:
        runs: list[SimulatedRun] = []
        for capacity in capacities:
            progress(len(runs), len(capacities))
            runs.append(replay.run(capacity))
        progress(len(runs), len(runs))
        return runs
    # Not forks of this process: a progress bar has a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(replay.trace, replay.block_bytes))
    others = {*multiprocessing.active_children()}
    try:
        with _without_interrupts():
            waiting = {pool.submit(_run, capacity): at for at, capacity in enumerate(capacities)}
        done: dict[int, SimulatedRun] = {}
        progress(0, len(waiting))
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            progress(len(done), len(waiting))
    except BaseException:  # Ctrl-C, too: a pool would run to its end all that was submitted
        for worker in {*multiprocessing.active_children()} - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [done[at] for at in range(len(capacities))]


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits, and what is started meanwhile never sees it: a terminal sends it to all, and each would say where.

    Who started them ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(trace: RequestTrace, block_bytes: int) -> None:
    threading.Thread(target=_follow, daemon=True).start()
    _REPLAYS.append(TraceReplay(trace, block_bytes))


def _follow() -> None:
    """End this worker with the process that started it: nobody else ends it if that one was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(capacity: Capacity) -> SimulatedRun:
    return _REPLAYS[0].run(capacity)

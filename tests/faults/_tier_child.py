"""A process that stores and loads over a slab until it is told to end, for test_fault_shutdown.py.

`_tier_child.py DIR WHAT`: `serve` copies for ever, `handler` does so until SIGTERM has set a flag, `find` prints how
many blocks of the chain it finds and whether every byte is right.

The handler sets a flag, as those of our own programs do. One that raises would do so wherever the program happens to
be: in the middle of the pool's bookkeeping, whose counts are off then, or in a `__del__`, which swallows it.
"""

import signal
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

import numpy as np  # noqa: E402
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, wait_until  # noqa: E402
from fault_rig import FaultyIO, fetch, over_slab  # noqa: E402

from kvtier.connector.scheduler import SchedulerSide  # noqa: E402
from kvtier.connector.worker import WorkerSide  # noqa: E402
from kvtier.tiers.copies.transfer import HostCopyStream  # noqa: E402
from kvtier.tiers.naming.chain import TokenChain  # noqa: E402

NUM_BLOCKS = 6


class Request:
    """Prompt number `n`: six full blocks and a token."""

    def __init__(self, n: int) -> None:
        self.request_id = f"r{n}"
        self.chain: TokenChain = chain_of(NUM_BLOCKS, first_token=100 * n)
        self.num_tokens = NUM_BLOCKS * BLOCK_SIZE + 1


def serve(directory: Path, told_to_end: threading.Event | None = None) -> None:
    """Copies in both directions and writes to the slab, all of them always under way."""
    io = FaultyIO()
    hierarchy = over_slab(directory, io, slots=64)
    io.delay = 0.005
    side = SchedulerSide(hierarchy)
    l1 = np.zeros((4096, 4, SLOT_BYTES // 4), np.uint8)
    stream = HostCopyStream(l1, hierarchy.host.region)
    worker = WorkerSide(stream, 4, SLOT_BYTES // 4, 1.0)
    tier = hierarchy.ports[0].tier
    assert tier is not None
    is_busy = False
    try:
        print("ready", flush=True)
        for n in range(1 << 30):
            if told_to_end is not None and told_to_end.is_set():
                sys.exit(143)
            request = Request(n % 40)
            base = n % 500 * 8
            blocks = list(range(base, base + NUM_BLOCKS + 1))
            found = side.lookup(request, 0)
            external = found if isinstance(found, int) else 0
            side.allocated(request.request_id, blocks, external)
            for i in range(external // BLOCK_SIZE, NUM_BLOCKS):
                l1[blocks[i]] = np.frombuffer(payload_of(request.chain.hashes[i]), np.uint8).reshape(4, -1)
            side.store(request.request_id, external // BLOCK_SIZE, blocks[external // BLOCK_SIZE : NUM_BLOCKS])
            plan = side.build_plan()
            worker.start_load(plan)
            worker.start_store(plan)
            side.update(worker.poll())
            side.finished(request.request_id)
            if n >= 100 and not is_busy and tier.stats()["slots_ready"]:  # some of it can be found
                is_busy = True
                print("busy", flush=True)
    finally:
        side.update(worker.close(1.0))
        side.close()
        hierarchy.close(1.0)
        if told_to_end is not None:
            # On a busy machine a thread may still be at its last job when the deadline has passed: it ends by itself.
            pool = hierarchy.host.pool
            wait_until(lambda: (pool.counts().leased, pool.counts().filling) == (0, 0))
            pool.check()
        print("closed", flush=True)


def find(directory: Path) -> None:
    """How many blocks of each prompt are found; `fetch` checks every byte."""
    hierarchy = over_slab(directory)
    print([fetch(hierarchy, Request(n).chain) for n in range(40)])
    hierarchy.check()
    hierarchy.close()


def main() -> None:
    """See the top."""
    directory, what = Path(sys.argv[1]), sys.argv[2]
    told_to_end = threading.Event() if what == "handler" else None
    if told_to_end is not None:
        signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    find(directory) if what == "find" else serve(directory, told_to_end)


if __name__ == "__main__":
    main()

"""A process that stores and loads over a slab until it is told to end, for test_fault_shutdown.py.

`_tier_child.py DIR WHAT`: `serve` copies for ever, `handler` does so with SIGTERM turned into SystemExit, `find` prints
how many blocks of the chain it finds and whether every byte is right.
"""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of  # noqa: E402
from fault_rig import FaultyIO, fetch, over_slab  # noqa: E402

from kvtier.connector.scheduler import SchedulerSide  # noqa: E402
from kvtier.connector.worker import WorkerSide  # noqa: E402
from kvtier.tiers.chain import TokenChain  # noqa: E402
from kvtier.tiers.local_tiers import LocalTiers  # noqa: E402
from kvtier.tiers.transfer import HostCopyStream  # noqa: E402

NUM_BLOCKS = 6


class Request:
    """Prompt number `n`: six full blocks and a token."""

    def __init__(self, n: int) -> None:
        self.request_id = f"r{n}"
        self.chain: TokenChain = chain_of(NUM_BLOCKS, first_token=100 * n)
        self.num_tokens = NUM_BLOCKS * BLOCK_SIZE + 1


def serve(directory: Path) -> None:
    """Copies in both directions and writes to the slab, all of them always under way."""
    io = FaultyIO()
    hierarchy = over_slab(directory, io, slots=64)
    io.delay = 0.005
    side = SchedulerSide(LocalTiers(hierarchy))
    l1 = np.zeros((4096, 4, SLOT_BYTES // 4), np.uint8)
    stream = HostCopyStream(l1, hierarchy.host.region)
    worker = WorkerSide(stream, 4, SLOT_BYTES // 4, 1.0)
    tier = hierarchy.ports[0].tier
    assert tier is not None
    is_busy = False
    try:
        print("ready", flush=True)
        for n in range(1 << 30):
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
        hierarchy.host.pool.check()
        counts = hierarchy.host.pool.counts()
        print("left", counts.leased, counts.filling, flush=True)


def find(directory: Path) -> None:
    """How many blocks of each prompt are found; `fetch` checks every byte."""
    hierarchy = over_slab(directory)
    print([fetch(hierarchy, Request(n).chain) for n in range(40)])
    hierarchy.check()
    hierarchy.close()


def main() -> None:
    """See the top."""
    directory, what = Path(sys.argv[1]), sys.argv[2]
    if what == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    find(directory) if what == "find" else serve(directory)


if __name__ == "__main__":
    main()

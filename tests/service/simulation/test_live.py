"""A daemon that is asked what a trace asked finds what the simulation says, within one point."""

import signal
from pathlib import Path

import pytest
from _eviction_traces import made_up, without_hints
from _live_replay import FINGERPRINT, replay_live, simulated_beside
from doubles import SLOT_BYTES
from service_rig import PATIENCE, DaemonProcess

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Hello
from kvtier.service.simulation.value import Capacity

SLOTS = 88  # a quarter of them may wait for the slab: more than any request here stores


@pytest.mark.parametrize("admit_after", [1, 2])
def test_a_daemon_finds_what_the_simulation_says(tmp_path: Path, disk_dir: Path, admit_after: int) -> None:
    """Chats in a memory that holds a tenth of their blocks, over a slab that does not hold all of them either."""
    trace = without_hints(made_up("chats", limit=90))
    size, disk = SLOTS * SLOT_BYTES, 1 << 20
    options = {"host__size": str(size), "cache__policy": "lru", "cache__load_or_recompute": "load"}
    options |= {"cache__admit_after": str(admit_after)}
    options |= {"file__path": str(disk_dir), "file__size": str(disk), "file__mode": "buffered"}
    process = DaemonProcess(tmp_path / "s", **options)
    hello = Hello(FINGERPRINT, trace.block_size, SLOT_BYTES, size, reset=False)
    tiers = RemoteTiers(tmp_path / "s", hello, patience=PATIENCE, deadline=PATIENCE)
    live = replay_live(tiers, trace, PATIENCE)
    tiers.close()
    assert process.end(signal.SIGTERM) == 0

    simulated = simulated_beside(live, trace, Capacity(size, disk, policy="lru", admit_after=admit_after), SLOT_BYTES)
    asked = int(trace.num_prompt.sum())
    from_l2, from_slab = (sum(each) for each in zip(*live.found, strict=True))
    said_l2, said_slab = (sum(each) for each in zip(*simulated, strict=True))
    assert from_l2 > 0.1 * asked
    assert admit_after > 1 or from_slab > 0
    assert from_l2 + from_slab == pytest.approx(said_l2 + said_slab, abs=0.01 * asked)
    assert from_slab == pytest.approx(said_slab, abs=0.02 * asked)

"""What the daemon's memory does under load: a real `kvtier serve`, and a client that looks up and stores all the time.

Memory is what the daemon has besides its region (RssAnon), index included. Its slope is fitted behind the first ten
minutes, or behind the first half of a shorter run: until then pools and caches fill.
"""

import tempfile
import time
from typing import Final

import numpy as np
from _report import Given, Result, program, progress
from _rig import ServerProcess, serving
from service_overhead import CHAIN, fresh, look_up, opened, step, stored

from kvtier.tiers import Outcome
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.pool import Reservation

WARM_UP: Final = 600.0  # seconds
NUM_SAMPLES: Final = 200
MIN_SAMPLES: Final = 8  # however short the run
SIZE: Final = "128MiB"


def memory_under_load(daemon: ServerProcess, tiers: CacheTiers, seconds: float) -> list[tuple[float, float]]:
    """Ask and store for so long; the seconds at which the daemon's memory was looked at, and its MB."""
    chains = [stored(tiers, CHAIN) for _ in range(4)]
    samples: list[tuple[float, float]] = []
    held: list[Reservation] = []
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds or len(samples) < MIN_SAMPLES:
        for _ in range(20):
            _, held = step(tiers, 4, held)
            look_up(tiers, [*chains, fresh(CHAIN)], 64)
        if not samples or passed - samples[-1][0] >= seconds / NUM_SAMPLES:
            samples.append((passed, daemon.anonymous_bytes() / 1e6))
            progress(f"minute {passed / 60:.1f} of {seconds / 60:.0f}: {samples[-1][1]:.1f} MB")
    for reservation in held:
        tiers.abandon(reservation, Outcome.ABORTED)
    return samples


@program()
def main(given: Given) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as home,
        serving(home, SIZE) as (daemon, path),
        opened(SIZE, service={"socket": str(path)}) as tiers,
    ):
        times, sizes = np.array(memory_under_load(daemon, tiers, 3.0 if given.quick else 3600.0)).T
        num_slots = tiers.num_slots
    later = times >= min(WARM_UP, times[-1] / 2)
    row: dict[str, float] = {"minutes": times[-1] / 60, "slots": num_slots, "most MB": float(sizes.max())}
    row["growth, MB a minute"] = float(np.polyfit(times[later], sizes[later], 1)[0]) * 60
    return [row]

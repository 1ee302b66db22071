"""What the daemon's memory does under load: a real `kvtier serve`, and a client that looks up and stores all the time.

Memory is what the daemon has besides its region (RssAnon), index included. Its slope is fitted behind the first ten
minutes, or behind the first half of a shorter run: until then pools and caches fill. `--save` draws the samples, too.
"""

import argparse
import sys
import tempfile
import time
from typing import Final

import numpy as np
from _process import ServerProcess, serving
from _report import RESULTS, Target, parser, progress, report
from service_overhead import CHAIN, fresh, look_up, opened, step, stored

from kvtier.service import Chart, Line, save_png
from kvtier.tiers import Outcome
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.pool import Reservation

MAX_GROWTH: Final = 0.05  # MB a minute
MAX_MEMORY: Final = 100.0  # MB besides the region, index included
WARM_UP: Final = 600.0  # seconds
NUM_SAMPLES: Final = 200
MIN_SAMPLES: Final = 8  # however short the run

Samples = list[tuple[float, int]]  # (seconds, bytes besides the region)


def memory_under_load(daemon: ServerProcess, tiers: CacheTiers, seconds: float) -> Samples:
    """Ask and store for so long; the daemon's memory now and then."""
    chains = [stored(tiers, CHAIN) for _ in range(4)]
    samples: Samples = []
    held: list[Reservation] = []
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds or len(samples) < MIN_SAMPLES:
        for _ in range(20):
            _, held = step(tiers, 4, held)
            look_up(tiers, [*chains, fresh(CHAIN)], 64)
        if not samples or passed - samples[-1][0] >= seconds / NUM_SAMPLES:
            samples.append((passed, daemon.anonymous_bytes()))
            progress(f"minute {passed / 60:.1f} of {seconds / 60:.0f}: {samples[-1][1] / 1e6:.1f} MB")
    for reservation in held:
        tiers.abandon(reservation, Outcome.ABORTED)
    return samples


def chart(samples: Samples, warm: float, slope: float) -> Chart:
    """Memory over time, and the line that was fitted."""
    minutes, sizes = np.array(samples, float).T / [[60.0], [1e6]]
    later = minutes >= warm / 60
    ends = np.array([warm / 60, minutes[-1]])
    fitted = sizes[later].mean() + slope * (ends - minutes[later].mean())
    lines = [
        Line("measured", minutes.tolist(), sizes.tolist()),
        Line(f"{slope:+.4f} MB a minute", ends.tolist(), fitted.tolist(), True),
    ]
    return Chart("", "minutes under load", "MB besides the region", lines)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=_minutes, default=60.0, help="how long to watch; 60 for the claim")
    given = options.parse_args()
    seconds = min(3.0, 60 * given.minutes) if given.quick else 60 * given.minutes
    size = "128MiB"
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as home,
        serving(home, size) as (daemon, path),
        opened(size, service={"socket": str(path)}) as tiers,
    ):
        samples = memory_under_load(daemon, tiers, seconds)
        num_slots = tiers.num_slots
    times, sizes = np.array(samples, float).T
    warm = min(WARM_UP, float(times[-1]) / 2)
    later = times >= warm
    slope = float(np.polyfit(times[later], sizes[later], 1)[0]) * 60 / 1e6
    in_mb = sizes / 1e6
    row = {
        "minutes": float(times[-1]) / 60,
        "slots": num_slots,
        "median MB": float(np.median(in_mb)),
        "most MB": float(in_mb.max()),
        "first MB": float(in_mb[0]),
        "last MB": float(in_mb[-1]),
        "growth, MB a minute": slope,
    }
    if given.save:
        save_png(RESULTS / "daemon_memory.png", [chart(samples, warm, slope)])
    targets = [
        Target("memory besides the region, index included, MB", MAX_MEMORY, row["most MB"]),
        Target(f"growth from minute {warm / 60:.1f} on, MB a minute", MAX_GROWTH, slope),
    ]
    return report("daemon_memory", [row], targets, given.json, given.save)


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError("minutes: write a number from 0 to 600")
    return value


if __name__ == "__main__":
    sys.exit(main())

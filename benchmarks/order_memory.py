"""Memory of what L2 keeps beside its blocks' books: where blocks went (departures), and the tail index over LRU.

Requests of 32 blocks go through a pool of so many slots, until twice as many blocks were stored as there are slots.
Each tells its end. `MiB` is what the process grew by, and `MiB over LRU` what it grew more than with LRU alone. A
process of its own has each row. Two numbers of slots tell what a slot takes, and what is there whatever they are.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

import _report
from memory import DEADLINE, WARM_UP, Footprint, names_of

from kvtier.tiers.pool import Departures, SlotPool
from kvtier.tiers.reuse import RequestEnd

COUNTS: Final = (100_000, 400_000)
REQUEST: Final = 32  # blocks
FILLS: Final = 2  # times the slots
LRU, DEPARTURES, TAIL = "lru", "lru, departures", "tail"
DEPARTURE_BYTES: Final = 12.5  # a slot: 8 of an entry, 4 of the time at which its block came
TAIL_BYTES: Final = 16.0  # a slot: 8 of its owner, the rest of plan and rows
TAIL_MIB: Final = 10.0  # tables of the last requests, and what LRU would hold
MIB: Final = 1 << 20


def serve(num_slots: int, keeps: str) -> SlotPool:
    """A pool that is full, and has evicted as many blocks as it has slots."""
    pool = SlotPool(num_slots, policy=TAIL if keeps == TAIL else LRU)
    if keeps == DEPARTURES:
        pool.remember(Departures("l2", num_slots, num_slots + 1))
    for number in range(FILLS * num_slots // REQUEST):
        names, _ = names_of(number, REQUEST)
        reservation = pool.reserve(names)
        if reservation is None:
            raise RuntimeError("the pool has no room, although nothing is leased")
        pool.seal(reservation).release()
        pool.ended(RequestEnd(names, REQUEST, 100))
    return pool


def measure(num_slots: int, keeps: str) -> float:
    """Bytes that this process grew by."""
    serve(WARM_UP, keeps)
    before = Footprint.now()
    pool = serve(num_slots, keeps)
    grown = Footprint.now().resident - before.resident
    pool.check()
    return float(grown)


def main() -> int:
    """Measure, print, and say whether the targets were met."""
    parser = _report.parser(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", metavar="N", help="two numbers of them or more")
    options = parser.parse_args()
    counts = options.slots or ((5_000, 20_000) if options.quick else COUNTS)
    rows: list[dict[str, object]] = []
    over: dict[str, list[float]] = {DEPARTURES: [], TAIL: []}
    for num_slots in counts:
        grown: dict[str, float] = {}
        for keeps in (LRU, DEPARTURES, TAIL):
            _report.progress(f"{num_slots:,} slots: {keeps}")
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                grown[keeps] = process.submit(measure, num_slots, keeps).result(timeout=DEADLINE)
            more = grown[keeps] - grown[LRU]
            mib = {"MiB": round(grown[keeps] / MIB, 2), "MiB over LRU": round(more / MIB, 2)}
            rows.append({"slots": num_slots, "keeps": keeps, **mib})
            if keeps in over:
                over[keeps].append(more)
    each = {keeps: (more[-1] - more[0]) / (counts[-1] - counts[0]) for keeps, more in over.items()}
    limits = {DEPARTURES: DEPARTURE_BYTES, TAIL: TAIL_BYTES}
    targets = [_report.Target(f"{keeps}: bytes of a slot more", limits[keeps], each[keeps]) for keeps in each]
    targets.append(
        _report.Target(f"{TAIL}: MiB whatever the slots", TAIL_MIB, (over[TAIL][0] - counts[0] * each[TAIL]) / MIB)
    )
    return _report.report("order_memory", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())

"""Memory of what L2 keeps beside its blocks' books: the eviction log, and the predicted index over LRU.

Requests of 32 blocks go through a pool of so many slots, until twice as many blocks were stored as there are slots.
Each tells its end. `MiB` is what the process grew by, and `MiB over LRU` what it grew more than with LRU alone. A
process of its own has each row. Two numbers of slots tell what a slot takes, and what is there whatever they are.
"""

from typing import Final

from _report import Given, Result, Row, Target, program, progress
from _rig import reserved, spawned
from memory import WARM_UP, Footprint, names_of

from kvtier.tiers.pool import EvictionLog, SlotPool
from kvtier.tiers.reuse import RequestEnd

REQUEST: Final = 32  # blocks
FILLS: Final = 2  # times the slots
LRU, LOGGED, PREDICTED = "lru", "lru, departures", "predicted"
# of a slot: 8 of an entry, 4 of the time at which its block came; 8 of its owner, the rest of plan and rows
SLOT_BYTES: Final = {LOGGED: 12.5, PREDICTED: 16.0}
TAIL_MIB: Final = 10.0  # tables of the last requests, and what LRU would hold
MIB: Final = 1 << 20


def serve(num_slots: int, keeps: str) -> SlotPool:
    """A pool that is full, and has evicted as many blocks as it has slots."""
    pool = SlotPool(num_slots, policy=PREDICTED if keeps == PREDICTED else LRU)
    if keeps == LOGGED:
        pool.remember(EvictionLog("l2", num_slots, num_slots + 1))
    for number in range(FILLS * num_slots // REQUEST):
        names, _ = names_of(number, REQUEST)
        pool.seal(reserved(pool, names)).release()
        pool.ended(RequestEnd(names, REQUEST, 100))
    return pool


def measure(num_slots: int, keeps: str) -> float:
    serve(WARM_UP, keeps)
    before = Footprint.now()
    pool = serve(num_slots, keeps)
    grown = Footprint.now().resident - before.resident
    pool.check()
    return float(grown)


@program()
def main(given: Given) -> Result:
    counts = (5_000, 20_000) if given.quick else (100_000, 400_000)
    rows: list[Row] = []
    over: dict[str, list[float]] = {LRU: [], LOGGED: [], PREDICTED: []}
    for num_slots in counts:
        lru = 0.0
        for keeps, more in over.items():
            progress(f"{num_slots:,} slots: {keeps}")
            grown = spawned(measure, num_slots, keeps)
            lru = grown if keeps == LRU else lru
            more.append(grown - lru)
            mib = {"MiB": round(grown / MIB, 2), "MiB over LRU": round(more[-1] / MIB, 2)}
            rows.append({"slots": num_slots, "keeps": keeps, **mib})
    each = {keeps: (over[keeps][-1] - over[keeps][0]) / (counts[-1] - counts[0]) for keeps in SLOT_BYTES}
    targets = [Target(f"{keeps}: bytes of a slot more", most, each[keeps]) for keeps, most in SLOT_BYTES.items()]
    constant = (over[PREDICTED][0] - counts[0] * each[PREDICTED]) / MIB
    targets.append(Target(f"{PREDICTED}: MiB whatever the slots", TAIL_MIB, constant))
    return rows, targets

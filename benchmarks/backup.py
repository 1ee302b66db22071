"""Backup and restore of a slab while its daemon serves: export and import, alone and beside an engine's load.

A real `kvtier serve`; its blocks are those of 16 tokens in 128 KiB, most of them in the slab alone. The load is one
client, fifty turns a second: each looks up a chain of 32 blocks that was stored before, waits until all of it is
leased, and stores a new block. Its times are from the question to the lease. The archive is imported into an empty
daemon.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from _report import Given, Result, Row, program, progress
from _rig import scratch, serving
from service_overhead import BLOCKS, PARENT, TOKENS, ask, fresh, opened, stored

from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import PENDING, CacheTiers, Wanted

CHAIN: Final = 32  # blocks
TURN: Final = 0.02  # seconds from one turn of the load to the next
HOST: Final = "64MiB"  # of the daemon
_TIMEOUT: Final = 600.0  # seconds of a transfer
_MIB: Final = 1 << 20


@contextmanager
def loading(tiers: CacheTiers, chains: Sequence[list[ChainHash]]) -> Iterator[list[float]]:
    """A client that looks up and stores, on a thread of its own; yields the milliseconds of each lookup so far."""
    draw, ends, waits = np.random.default_rng(2), threading.Event(), list[float]()

    def run() -> None:
        due = time.perf_counter()
        while not ends.wait(max(0.0, due - time.perf_counter())):
            due = max(due + TURN, time.perf_counter())
            start = time.perf_counter()
            claim = ask(tiers, chains[int(draw.integers(len(chains)))])
            while tiers.poll(claim) is PENDING:
                tiers.wait_progress(1.0)
            tiers.lease(claim).release()
            waits.append(1e3 * (time.perf_counter() - start))
            [reservation] = tiers.reserve([Wanted(fresh(1), PARENT, PARENT)])
            if reservation is not None:
                tiers.seal_each([(reservation, [TOKENS] * len(reservation), tiers.epoch)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits
    finally:
        ends.set()
        thread.join(_TIMEOUT)


@contextmanager
def daemon_over(home: Path, slab: int) -> Iterator[tuple[CacheTiers, str, str]]:
    """A client of a fresh daemon with so many bytes for slabs, the address of its pages, and its token."""
    home.mkdir()
    options = {"FILE__PATH": str(home / "slabs"), "FILE__SIZE": str(slab), "FILE__DEADLINE": "60s"}
    options |= {"CACHE__PREFETCH_DEADLINE": "60s", "CACHE__LOAD_OR_RECOMPUTE": "load"}
    with (
        serving(home, HOST, SERVICE__ARCHIVES=str(home.parent), **options) as (_, socket),
        opened(HOST, service={"socket": str(socket), "deadline": "30s"}) as tiers,
    ):
        told = json.loads(Path(f"{socket}.token").read_text())
        yield tiers, told["http"], told["token"]


def transfer(http: str, token: str, verb: str, file: str) -> Row:
    """What the daemon says of an export or import at its end, and the seconds it took."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    body = json.dumps({"file": file} | ({"force": True} if verb == "export" else {})).encode()
    request = urllib.request.Request(f"http://{http}/admin/{verb}", body, headers)
    start, told = time.perf_counter(), dict[str, Any]()
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        for line in answer:
            told = json.loads(line)
    if not told.get("done"):
        raise SystemExit(f"{verb}: {told}")
    return told | {"seconds": time.perf_counter() - start}


def row_of(verb: str, beside: str, told: Row) -> Row:
    size = told["blocks"] * BLOCKS.block_bytes / _MIB
    row: Row = {"transfer": verb, "beside": beside, "blocks": told["blocks"], "lost": told["planned"] - told["blocks"]}
    return row | {"MiB": round(size), "seconds": told["seconds"], "MiB/s": size / told["seconds"]}


def beside_load(
    where: tuple[CacheTiers, str, str], verb: str, chains: Sequence[list[ChainHash]], seconds: float
) -> tuple[Row, list[Row]]:
    """A transfer's row beside the load; and the load's rows, without it and beside it."""
    tiers, http, token = where
    with loading(tiers, chains) as alone:
        time.sleep(seconds)
    with loading(tiers, chains) as beside:
        told = transfer(http, token, verb, "all.kva")
    rows: list[Row] = []
    for name, waits in ((f"before the {verb}", alone), (f"beside the {verb}", beside)):
        p50, p95 = np.percentile(waits, [50, 95])
        rows.append({"load": name, "lookups": len(waits), "p50 ms": float(p50), "p95 ms": float(p95)})
    return row_of(verb, "the load", told), rows


@program()
def main(given: Given) -> Result:
    num_chains, seconds = (16, 1.0) if given.quick else (256, 10.0)
    slab = 8 * num_chains * CHAIN * BLOCKS.block_bytes
    rows, loads = list[Row](), list[Row]()
    with scratch("backup") as scratch_home:
        home = Path(scratch_home)
        with daemon_over(home / "a", slab) as where:
            progress(f"storing {num_chains * CHAIN:,} blocks")
            chains = []
            for _ in range(num_chains):
                chains.append(stored(where[0], CHAIN))
                assert where[0].drain(_TIMEOUT)
            rows.append(row_of("export", "nothing", transfer(*where[1:], "export", "all.kva")))
            row, loads = beside_load(where, "export", chains, seconds)
            rows.append(row)
        with daemon_over(home / "b", slab) as where:
            rows.append(row_of("import", "nothing", transfer(*where[1:], "import", "all.kva")))
        with daemon_over(home / "c", slab) as where:
            own = [stored(where[0], CHAIN) for _ in range(8)]
            assert where[0].drain(_TIMEOUT)
            row, more = beside_load(where, "import", own, seconds)
            rows.append(row)
    return [*rows, *loads, *more]

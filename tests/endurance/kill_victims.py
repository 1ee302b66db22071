"""The processes that kills.py kills, forked from a warm server: each does one thing for ever and says how far it is."""

import logging
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("rigs", "faults", "endurance"))]

import _slab_child as slab  # noqa: E402
from block_client import BlockClient, Model  # noqa: E402
from doubles import chain_of  # noqa: E402
from service_rig import ask, attach, load, store, wanted  # noqa: E402

import kvtier.service.web.http_client  # noqa: E402, F401  # warm for the verbs
from kvtier.cli import main  # noqa: E402
from kvtier.tiers.naming.chain import TokenChain  # noqa: E402

NUM_CHAINS: Final = 40
CHAIN_BLOCKS: Final = 6
_QUIET: Final = os.devnull


def chain(number: int) -> TokenChain:
    """One of the chains that clients of the daemon store and look for."""
    return chain_of(CHAIN_BLOCKS, first_token=1000 * number)


def write_slab(directory: Path, first: int, tell: Connection) -> None:
    """Batch after batch, each told once it is stored; blocks are read in between, so that some are kept at eviction."""
    _hush()
    opened = slab.open_store(directory)
    number = first
    while True:
        numbers = range(number, number + slab.BATCH)
        opened.write([slab.record_of(n) for n in numbers], [memoryview(slab.payload_of(n)) for n in numbers])
        number += slab.BATCH
        tell.send(number)
        opened.read([slab.hash_of(first)], [memoryview(bytearray(slab.SLOT_BYTES))])


def run_verb(arguments: Sequence[str], variables: Mapping[str, str], forever: bool, tell: Connection) -> None:
    """A command of `kvtier`, once or again and again; told before each."""
    _hush()
    os.environ.update(variables)
    sys.argv = ["kvtier", *arguments]
    while True:
        tell.send("begins")
        with suppress(SystemExit):
            main()
        if not forever:
            return


def use_daemon(socket: Path, seed: int, tell: Connection) -> None:
    """A client that stores, loads and verifies, and keeps leases and filling slots in its hands."""
    _hush()
    dice = random.Random(seed)
    tiers = attach(socket)
    kept: list[object] = []
    tell.send("attached")
    while True:
        mine = chain(dice.randrange(NUM_CHAINS))
        load(tiers, mine)
        store(tiers, mine)
        claim, _ = ask(tiers, chain(dice.randrange(NUM_CHAINS)))
        kept.append(tiers.lease(claim))
        kept.append(tiers.reserve([wanted(chain(NUM_CHAINS + dice.randrange(9)))]))
        if len(kept) > 4:
            kept.clear()  # leases go back, reservations are abandoned


def keep_using(socket: Path, model: Model, seed: int, tell: Connection) -> None:
    """A client that outlives its daemons, and tells what it has seen twice a second."""
    _hush()
    client = BlockClient(socket, model, seed, per_second=20.0)
    while True:
        tell.send(client.tally)
        time.sleep(0.5)


def _hush() -> None:
    logging.disable(logging.WARNING)
    silence = os.open(_QUIET, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

"""A KV client of a daemon that may die at any time: stores blocks whose bytes derive from their keys, checks each read.

As a program it is one to be killed: `block_client.py SOCKET FINGERPRINT BLOCK_SIZE SLOT_BYTES HOST_SIZE SEED` stores
chains, holds leases and reserves slots until then.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

from doubles import payload_of  # noqa: E402

from kvtier.connector.daemon.client import RemoteTiers  # noqa: E402
from kvtier.connector.daemon.wire import Hello  # noqa: E402
from kvtier.tiers.hierarchy.cache_tiers import Pending, Wanted  # noqa: E402
from kvtier.tiers.naming.chain import TokenChain, root_hash  # noqa: E402
from kvtier.tiers.tier import BlockRecord  # noqa: E402

HANG: Final = 90.0  # seconds: no question may be open for longer, whatever fails
_CALL: Final = 20.0  # seconds for an answer from the daemon's memory, on a busy machine


@dataclass(frozen=True)
class Model:
    """What the daemon knows a model by."""

    fingerprint: bytes
    block_size: int  # tokens
    slot_bytes: int
    host_size: int  # bytes of L2

    @property
    def arguments(self) -> list[str]:
        """For a child's command line."""
        return [self.fingerprint.hex(), str(self.block_size), str(self.slot_bytes), str(self.host_size)]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Model":
        """`arguments` again."""
        return cls(bytes.fromhex(arguments[0]), *map(int, arguments[1:4]))


@dataclass
class Tally:
    """What a client did and saw; `wrong` and `hangs` must stay empty."""

    blocks_checked: int = 0
    blocks_stored: int = 0
    found: Counter[str] = field(default_factory=Counter)  # blocks by the tier they were in
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # exceptions, which no storage failure may raise (I2)


class BlockClient:
    """Reads and stores random chains at a bounded rate, on a thread of its own, until `end`."""

    def __init__(self, socket: Path, model: Model, seed: int, *, chains: int = 60, per_second: float = 4.0) -> None:
        self.tally = Tally()
        self._model, self._dice, self._pause = model, random.Random(seed), 1 / per_second
        self._chains = [self._chain(number) for number in range(chains)]
        hello = Hello(model.fingerprint, model.block_size, model.slot_bytes, model.host_size, reset=False)
        self.tiers = RemoteTiers(socket, hello, patience=60.0, deadline=_CALL)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="block client")
        self._thread.start()

    def end(self) -> None:
        """Stop, and let go of the daemon."""
        self._ending.set()
        self._thread.join(2 * HANG)
        if self._thread.is_alive():
            self.tally.hangs.append("the client never came back from the daemon")
            return
        self.tiers.close()

    def _chain(self, number: int) -> TokenChain:
        chain = TokenChain(root_hash(self._model.fingerprint, cache_salt="soak"), self._model.block_size)
        tokens = 2 + number % 9  # blocks: chains of all lengths
        chain.extend([1000 * number + i for i in range(tokens * self._model.block_size)])
        return chain

    def _run(self) -> None:
        while not self._ending.wait(self._pause):
            started = time.monotonic()
            chain = self._dice.choice(self._chains)
            try:
                self._store(chain, self._load(chain))
            except Exception as error:  # I2: whatever fails below is a miss, and no exception
                self.tally.errors.append(repr(error))
            if (took := time.monotonic() - started) > HANG:
                self.tally.hangs.append(f"a block client's turn took {took:.0f} s")

    def _load(self, chain: TokenChain) -> int:
        """Claim what there is of the chain and compare every byte; how many blocks."""
        tiers = self.tiers
        claim = tiers.submit(chain.hashes, chain.root, block_size=self._model.block_size)
        end = time.monotonic() + HANG
        while isinstance(tiers.poll(claim), Pending):
            if time.monotonic() > end:
                self.tally.hangs.append(f"no answer about a chain within {HANG:g} s")
                tiers.cancel(claim)
                return 0
            tiers.wait_progress(0.1)
        with tiers.lease(claim) as lease:
            region = tiers.region
            for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
                assert region is not None
                self.tally.blocks_checked += 1
                if bytes(region.slot(slot)) != payload_of(chain_hash, region.slot_bytes):
                    self.tally.wrong.append(f"slot {slot} does not hold block {chain_hash.hex()}")
            if claim.found is not None and len(lease):
                for tier in ("l2", "file", "redis"):
                    self.tally.found[tier] += claim.found[tier]
            return len(lease)

    def _store(self, chain: TokenChain, first: int) -> None:
        """What a worker's copies do with the rest of the chain."""
        if first == len(chain.hashes):
            return
        wanted = Wanted(chain.hashes[first:], chain.parent(first), chain.tenant)
        (reservation,) = self.tiers.reserve([wanted])
        if reservation is None:
            return
        region = self.tiers.region
        at = {chain_hash: i for i, chain_hash in enumerate(chain.hashes)}
        epoch = self.tiers.epoch
        assert region is not None
        for slot, chain_hash in zip(reservation.slots, reservation.hashes, strict=True):
            region.slot(slot)[:] = payload_of(chain_hash, region.slot_bytes)
        records = [
            BlockRecord(chain_hash, chain.parent(at[chain_hash]), chain.block_tokens(at[chain_hash]), 0)
            for chain_hash in reservation.hashes
        ]
        self.tiers.seal(reservation, records, epoch)
        self.tally.blocks_stored += len(reservation)


def hold(socket: Path, model: Model, seed: int) -> None:
    """Take leases and reserve slots, and keep them until we are killed."""
    client = BlockClient(socket, model, seed, per_second=50.0)
    time.sleep(0.5)
    tiers = client.tiers
    kept: list[object] = []
    for number in range(3):
        chain = TokenChain(root_hash(model.fingerprint, cache_salt="killed"), model.block_size)
        chain.extend([seed + number + i for i in range(3 * model.block_size)])
        kept.append(tiers.reserve([Wanted(chain.hashes, chain.root, chain.tenant)]))
    time.sleep(600)


if __name__ == "__main__":
    hold(Path(sys.argv[1]), Model.parse(sys.argv[2:6]), int(sys.argv[6]))

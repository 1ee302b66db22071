"""What [file] key_file costs: the same slab in the clear and encrypted, in turns, on the same disk.

By two threads, as the file tier has them: writes into a new slab, and cold reads of whole batches (the page cache
dropped, O_DIRECT). The reads are repeated beside a busy Python thread. The limit is the lesser of two: the slab in the
clear, and AES-256-GCM alone by one thread. One thread may wait for the disk while another ciphers, but ciphering holds
the GIL, so its rate is one core's. Ratios are of medians over rounds.
"""

import shutil
import tempfile
from pathlib import Path
from statistics import median

from _report import DISK, Given, Race, Result, Row, program, progress, took
from _rig import busy_thread, drop_caches
from file_bandwidth import NUM_THREADS, Workload

from kvtier.tiers import RecordCipher
from kvtier.tiers.file import FileStore

KEYS = {"plain": None, "encrypted": bytes(range(32))}
FRESH, COLD, BUSY = "write, fresh", "cold read", "read beside a busy thread"


class Pair:
    def __init__(self, directory: Path, block_bytes: int, size: int) -> None:
        self.load, self.size, self.race = Workload(block_bytes), size, Race()
        self.homes = {kind: directory / kind for kind in KEYS}

    def open(self, kind: str) -> FileStore:
        return self.load.opened(self.homes[kind], self.size, key=KEYS[kind])

    def round(self) -> None:
        """Fill both slabs anew, and read them back cold."""
        length = self.load.per_batch * 8
        num_chains = max(1, int(self.size * 0.8) // (length * self.load.block_bytes))
        chains = [(name, self.load.chain(name, length)) for name in range(num_chains)]
        for kind in KEYS:
            shutil.rmtree(self.homes[kind], ignore_errors=True)
            store = self.open(kind)
            self.race.add((FRESH, kind), self.load.write(store, chains))
            store.close()
        for kind in KEYS:
            drop_caches(next(self.homes[kind].glob("*.slab")))
            store = self.open(kind)
            whole = [batch for batch in self.load.held(store, chains) if len(batch) == self.load.per_batch]
            half = len(whole) // 2
            self.race.add((COLD, kind), self.load.read(store, whole[:half]))
            with busy_thread():
                self.race.add((BUSY, kind), self.load.read(store, whole[half:]))
            store.close()

    def rows(self) -> list[Row]:
        block_kib, found = self.load.block_bytes >> 10, list[Row]()
        sealing, opening = (cipher_rate(self.load, encrypts=encrypts) for encrypts in (True, False))
        for what in (FRESH, COLD, BUSY):
            sides = [(what, kind) for kind in KEYS]
            plain, encrypted = map(self.race.rate, sides)
            plain_cpu, encrypted_cpu = map(self.race.cpu, sides)
            cipher = sealing if what == FRESH else opening
            row: Row = {"block KiB": block_kib, "what": f"{what}, GB/s", "plain": plain, "encrypted": encrypted}
            row |= {"ratio": encrypted / plain, "AES alone": cipher}
            if what != BUSY:
                row |= {"of the limit": encrypted / min(plain, cipher), "CPU s/GB more": encrypted_cpu - plain_cpu}
            found.append(row)
        return found


def cipher_rate(load: Workload, *, encrypts: bool) -> float:
    """GB/s of one thread that does nothing else, of nine passes the median."""
    cipher, name, into = RecordCipher(bytes(32), b"benchmark"), bytes(32), load.targets[0]
    stamp = cipher.encrypt_into(load.sources[0], name, into)
    sealed = bytes(into)

    def run() -> None:
        for payload in load.sources:
            if encrypts:
                cipher.encrypt_into(payload, name, into)
            else:
                cipher.decrypt_into(sealed, stamp, name, into)

    return len(load.sources) * load.block_bytes / median(took(run) for _ in range(9)) / 1e9


@program(DISK)
def main(given: Given) -> Result:
    size, rounds = (256 << 20, 1) if given.quick else (4 << 30, 5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="encryption-") as directory:
        for block_bytes in (1 << 20,) if given.quick else (64 << 10, 512 << 10, 2 << 20):
            pair = Pair(Path(directory), block_bytes, size)
            for number in range(rounds):
                progress(f"{block_bytes >> 10} KiB, round {number + 1} of {rounds}")
                pair.round()
            rows += pair.rows()
    setup = {"slab MiB": size >> 20, "rounds": rounds, "threads": NUM_THREADS}
    return rows, [], setup

"""What [file] key_file costs: the same slab in the clear and encrypted, in turns, on the same disk.

By two threads, as the file tier has them: writes into a new slab, and cold reads of whole batches (the page cache
dropped, O_DIRECT). The reads are repeated beside a busy Python thread. The limit is the lesser of two: the slab in the
clear, and AES-256-GCM alone by one thread. One thread may wait for the disk while another ciphers, but ciphering holds
the GIL, so its rate is one core's. "open" is the recovery of the table with its names. Ratios are of medians over
rounds.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _process import busy_thread
from _races import Race, Row, took
from _report import parser, progress, report
from file_bandwidth import FINGERPRINT, NUM_THREADS, Workload, drop_caches

from kvtier.tiers import RecordCipher
from kvtier.tiers.file import FileStore

KEYS = {"plain": None, "encrypted": bytes(range(32))}
WHAT = ("write, fresh", "cold read", "read beside a busy thread")


class Pair:
    """One block size: a slab in the clear and an encrypted one, measured in turns."""

    def __init__(self, directory: Path, block_bytes: int, size: int) -> None:
        self.load = Workload(block_bytes)
        self.size = size
        self.homes = {kind: directory / kind for kind in KEYS}
        self.race = Race()
        self.opened: dict[str, list[float]] = {kind: [] for kind in KEYS}

    def open(self, kind: str) -> FileStore:
        """The slab of that kind; how long it took is kept."""
        start = time.perf_counter()
        store = FileStore.open(self.homes[kind], FINGERPRINT, slot_bytes=self.load.block_bytes, block_size=16,
                               size=self.size, mode="direct", key=KEYS[kind])  # fmt: skip
        self.opened[kind].append(time.perf_counter() - start)
        return store

    def round(self) -> None:
        """Fill both slabs anew, and read them back cold."""
        length = self.load.per_batch * 8
        num_chains = max(1, int(self.size * 0.8) // (length * self.load.block_bytes))
        chains = [(name, self.load.chain(name, length)) for name in range(num_chains)]
        fresh, cold, busy = WHAT
        for kind in KEYS:
            shutil.rmtree(self.homes[kind], ignore_errors=True)
            store = self.open(kind)
            self.opened[kind].pop()  # a creation
            self.race.add((fresh, kind), self.load.write(store, chains))
            store.close()
        for kind in KEYS:
            drop_caches(next(self.homes[kind].glob("*.slab")))
            store = self.open(kind)
            whole = [batch for batch in self.load.held(store, chains) if len(batch) == self.load.per_batch]
            half = len(whole) // 2
            self.race.add((cold, kind), self.load.read(store, whole[:half]))
            with busy_thread():
                self.race.add((busy, kind), self.load.read(store, whole[half:]))
            store.close()

    def rows(self) -> list[Row]:
        """Medians, plain beside encrypted."""
        block_kib, found = self.load.block_bytes >> 10, list[Row]()
        sealing, opening = (cipher_rate(self.load, encrypts=encrypts) for encrypts in (True, False))
        for what in WHAT:
            sides = [(what, kind) for kind in KEYS]
            plain, encrypted = map(self.race.rate, sides)
            plain_cpu, encrypted_cpu = map(self.race.cpu, sides)
            cipher = sealing if "write" in what else opening
            row = {"block KiB": block_kib, "what": f"{what}, GB/s", "plain": plain, "encrypted": encrypted}
            row |= {"ratio": encrypted / plain, "AES alone": cipher}
            if "busy" not in what:
                row |= {"of the limit": encrypted / min(plain, cipher), "CPU s/GB more": encrypted_cpu - plain_cpu}
            found.append(row)
        opened = {kind: median(seconds) * 1e3 for kind, seconds in self.opened.items()}
        return [*found, {"block KiB": block_kib, "what": "open, ms", **opened}]


def cipher_rate(load: Workload, *, encrypts: bool) -> float:
    """GB/s of one thread that does nothing else, of nine passes the median."""
    cipher, name = RecordCipher(bytes(32), b"benchmark"), bytes(32)
    into = load.targets[0]
    stamp = cipher.encrypt_into(load.sources[0], name, into)
    sealed = bytes(into)

    def run() -> None:
        for payload in load.sources:
            if encrypts:
                cipher.encrypt_into(payload, name, into)
            else:
                cipher.decrypt_into(sealed, stamp, name, into)

    return len(load.sources) * load.block_bytes / median(took(run) for _ in range(9)) / 1e9


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--dir", type=Path, help="where the slabs are made; default: a temporary directory here")
    given = options.parse_args()
    size, rounds = (256 << 20, 1) if given.quick else (4 << 30, 5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.dir or Path.cwd(), prefix="encryption-") as directory:
        for block_bytes in (1 << 20,) if given.quick else (64 << 10, 512 << 10, 2 << 20):
            pair = Pair(Path(directory), block_bytes, size)
            for number in range(rounds):
                progress(f"{block_bytes >> 10} KiB, round {number + 1} of {rounds}")
                pair.round()
            rows += pair.rows()
    setup = {"slab MiB": size >> 20, "rounds": rounds, "threads": NUM_THREADS}
    return report("encryption", rows, [], given.json, given.save, setup)


if __name__ == "__main__":
    sys.exit(main())

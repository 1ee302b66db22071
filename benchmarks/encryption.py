"""What [file] key_file costs: the same slab in the clear and encrypted, in turns, on the same disk.

By two threads, as the file tier has them: writes into a new slab, and cold reads of whole batches (the page cache
dropped, O_DIRECT). The reads are repeated beside a busy Python thread. The limit is the lesser of two: the slab in the
clear, and AES-256-GCM alone by one thread. One thread may wait for the disk while another ciphers, but ciphering holds
the GIL, so its rate is one core's. "open" is the recovery of the table with its names. Ratios are of medians over
rounds.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _busy import busy_thread
from _report import Speed, Target, parser, progress, report
from file_bandwidth import (
    FINGERPRINT,
    NUM_THREADS,
    RecordChain,
    Workload,
    drop_caches,
    held_batches,
    read_batches,
    write_chains,
)

from kvtier.tiers import RecordCipher
from kvtier.tiers.file import FileStore

KEYS = {"plain": None, "encrypted": bytes(range(32))}
WORTH = 0.8  # of the limit: what is left for rows, calls and locks


class Pair:
    """One block size: a slab in the clear and an encrypted one, measured in turns."""

    def __init__(self, directory: Path, block_bytes: int, size: int) -> None:
        self.load = Workload(block_bytes)
        self.size = size
        self.homes = {kind: directory / kind for kind in KEYS}
        self.speeds: dict[str, dict[str, list[Speed]]] = {}
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
        chains = self.chains()
        for kind in KEYS:
            shutil.rmtree(self.homes[kind], ignore_errors=True)
            store = self.open(kind)
            self.opened[kind].pop()  # a creation
            self.note("write, fresh", kind, write_chains(store, self.load, chains))
            store.close()
        for kind in KEYS:
            drop_caches(next(self.homes[kind].glob("*.slab")))
            store = self.open(kind)
            whole = [batch for batch in held_batches(store, self.load, chains) if len(batch) == self.load.per_batch]
            half = len(whole) // 2
            self.note("cold read", kind, read_batches(store, self.load, whole[:half]))
            with busy_thread():
                self.note("read beside a busy thread", kind, read_batches(store, self.load, whole[half:]))
            store.close()

    def chains(self) -> list[tuple[int, RecordChain]]:
        """What fills most of a slab."""
        length = self.load.per_batch * 8
        num_chains = max(1, int(self.size * 0.8) // (length * self.load.block_bytes))
        return [(name, self.load.chain(name, length)) for name in range(num_chains)]

    def note(self, what: str, kind: str, speed: Speed) -> None:
        """Keep a measurement."""
        self.speeds.setdefault(what, {}).setdefault(kind, []).append(speed)

    def rows(self) -> list[dict[str, object]]:
        """Medians, plain beside encrypted."""
        block_kib = self.load.block_bytes >> 10
        sealing, opening = (cipher_rate(self.load, encrypts=encrypts) for encrypts in (True, False))
        found: list[dict[str, object]] = []
        for what, speeds in self.speeds.items():
            plain, encrypted = (statistics.median(speed.gb_per_s for speed in speeds[kind]) for kind in KEYS)
            plain_cpu, encrypted_cpu = (statistics.median(s.cpu_s_per_gb for s in speeds[kind]) for kind in KEYS)
            cipher = sealing if "write" in what else opening
            row: dict[str, object] = {"block KiB": block_kib, "what": f"{what}, GB/s", "plain": plain}
            row |= {"encrypted": encrypted, "ratio": encrypted / plain, "AES alone": cipher}
            if "busy" not in what:
                row |= {"of the limit": encrypted / min(plain, cipher), "CPU s/GB more": encrypted_cpu - plain_cpu}
            found.append(row)
        plain, encrypted = (statistics.median(self.opened[kind]) * 1e3 for kind in KEYS)
        found.append({"block KiB": block_kib, "what": "open, ms", "plain": plain, "encrypted": encrypted})
        return found


def cipher_rate(load: Workload, *, encrypts: bool) -> float:
    """GB/s of one thread that does nothing else, of nine passes the median."""
    cipher, name = RecordCipher(bytes(32), b"benchmark"), bytes(32)
    into = load.targets[0][0]
    stamp = cipher.encrypt_into(load.payloads[0], name, into)
    sealed = bytes(into)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        for payload in load.payloads:
            if encrypts:
                cipher.encrypt_into(payload, name, into)
            else:
                cipher.decrypt_into(sealed, stamp, name, into)
        seconds.append(time.perf_counter() - start)
    return len(load.payloads) * load.block_bytes / statistics.median(seconds) / 1e9


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--dir", type=Path, help="where the slabs are made; default: a temporary directory here")
    arguments = options.parse_args()
    size, rounds = (256 << 20, 1) if arguments.quick else (4 << 30, 5)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.cwd(), prefix="encryption-") as directory:
        for block_bytes in (1 << 20,) if arguments.quick else (64 << 10, 512 << 10, 2 << 20):
            pair = Pair(Path(directory), block_bytes, size)
            for number in range(rounds):
                progress(f"{block_bytes >> 10} KiB, round {number + 1} of {rounds}")
                pair.round()
            rows += pair.rows()
    targets = [
        Target(f"{row['what']} of {row['block KiB']} KiB: of the limit", WORTH, float(str(row["of the limit"])), False)
        for row in rows
        if "of the limit" in row
    ]
    setup = {"slab MiB": size >> 20, "rounds": rounds, "threads": NUM_THREADS}
    return report("encryption", rows, targets, arguments.json, arguments.save, setup)


if __name__ == "__main__":
    sys.exit(main())

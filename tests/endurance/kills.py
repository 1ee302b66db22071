"""kill -9 at random times: slab writers, the daemon, its clients, `kvtier verify`, `kvtier export`.

`python tests/endurance/kills.py --count 1000`: after each kill the next opening is read block by block. Exit status 1
where a byte was wrong, what was acknowledged is gone, a law is broken, or something was left over or hangs.
"""

import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from endurance import within

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / name) for name in ("tests", "tests/rigs", "tests/faults", "tests/endurance")),
    str(ROOT / "benchmarks"),
]

import _slab_child as slab  # noqa: E402
import httpx2  # noqa: E402
import kill_victims as victims  # noqa: E402
from block_client import Model, Tally  # noqa: E402
from doubles import BLOCK_SIZE, SLOT_BYTES, payload_of  # noqa: E402
from endurance import Progress, options, origin, tell  # noqa: E402
from node_rig import free_port  # noqa: E402
from service_rig import FINGERPRINT, attach, load, patient_options  # noqa: E402

from kvtier.service.archive.archive import Parser, decode_header, header_bytes_of  # noqa: E402
from kvtier.tiers.errors import KVTierError  # noqa: E402
from kvtier.tiers.file.store import FileStore  # noqa: E402
from kvtier.tiers.tier import BlockRecord, Outcome  # noqa: E402

WRONG: Final = ("wrong_bytes", "lost", "laws_broken", "left_over", "hangs")
SHARES: Final = {"slab writer": 40, "client": 25, "daemon": 15, "verify": 10, "export": 10}
_PATIENCE: Final = 90.0  # seconds for anything to come about on a busy machine
_L2_SLOTS: Final = 64


@dataclass
class Verdict:
    """What the kills showed."""

    kills: Counter[str] = field(default_factory=Counter)
    blocks_checked: int = 0
    blocks_right: int = 0
    archives_whole: int = 0
    wrong_bytes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    laws_broken: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


class Victim:
    """A process that is killed in the end."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.told, telling = _CONTEXT.Pipe(duplex=False)
        self.process: ForkServerProcess = _CONTEXT.Process(target=target, args=(*arguments, telling), daemon=True)
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server looks for modules there
            self.process.start()
        telling.close()

    def next_word(self) -> object:
        """Wait until it says something, or more. EOFError when it died before, TimeoutError when it says nothing."""
        if not self.told.poll(_PATIENCE):
            raise TimeoutError("a victim never began")
        return self.told.recv()

    def words(self, number: int) -> None:
        """Wait until it has said so much."""
        for _ in range(number):
            self.next_word()

    def kill(self) -> list[Any]:
        """kill -9; what it had said and nobody had heard."""
        self.process.kill()
        self.process.join(_PATIENCE)
        words = list(_words(self.told))
        self.told.close()
        self.process.close()
        return words


def _words(pipe: Connection) -> Iterator[Any]:
    with suppress(EOFError, OSError):  # its last word may be torn
        while pipe.poll(0):
            yield pipe.recv()


class SlabStory:
    """A slab whose writers and verifiers are killed, one after the other."""

    def __init__(self, directory: Path, dice: random.Random, verdict: Verdict) -> None:
        self._directory, self._dice, self._verdict = directory, dice, verdict
        self._next = 0  # one past the last block that was ever acknowledged

    def kill_writer(self) -> None:
        """The newest of what had been acknowledged is there; the batch under way is whole or a miss."""
        first = self._next
        victim = Victim(victims.write_slab, self._directory, first)
        number = victim.next_word()
        time.sleep(self._dice.random() * 0.05)
        said: list[Any] = [number, *victim.kill()]
        self._next = int(max(said))
        newest = range(max(first, self._next - 3 * slab.BATCH), self._next)
        store = slab.open_store(self._directory)
        right = self._read(store, self._next + slab.BATCH)
        if lost := set(newest) - right:
            self._verdict.lost.append(f"slab writer: blocks {sorted(lost)} had been acknowledged")
        self._next += slab.BATCH  # those of the batch under way may be there
        self._close(store)

    def kill_verify(self) -> None:
        """`kvtier verify --repair` over a slab with damaged blocks: those are misses, all others are as they were."""
        store = slab.open_store(self._directory)
        before = self._read(store, self._next)
        damaged = set(self._dice.sample(sorted(before), min(len(before), self._dice.randrange(4))))
        for number in damaged:
            self._damage(store, number)
        self._close(store)
        arguments = ["verify", str(self._directory), *self._dice.choice([["--repair"], []])]
        victim = Victim(victims.run_verb, arguments, {}, True)
        victim.words(2)
        time.sleep(self._dice.random() * 0.05)
        victim.kill()
        store = slab.open_store(self._directory)
        after = self._read(store, self._next)
        if lost := before - damaged - after:
            self._verdict.lost.append(f"verify: blocks {sorted(lost)} were there before")
        self._close(store)

    def _damage(self, store: FileStore, number: int) -> None:
        """Change a byte of a block on the disk, wherever it lies."""
        data = store.path.read_bytes()
        at = data.find(slab.payload_of(number), store.superblock.payload_offset(0))
        if at >= 0:
            with store.path.open("r+b") as file:
                file.seek(at + self._dice.randrange(slab.SLOT_BYTES))
                file.write(b"\xa5")

    def _read(self, store: FileStore, upto: int) -> set[int]:
        """Every block ever written that may still be there: a miss, or exactly right; which are."""
        right = set()
        for begin in range(max(0, upto - 4 * store.superblock.num_slots), upto, 64):
            numbers = range(begin, min(begin + 64, upto))
            buffers = [memoryview(bytearray(slab.SLOT_BYTES)) for _ in numbers]
            results = store.read([slab.hash_of(number) for number in numbers], buffers)
            for number, buffer, result in zip(numbers, buffers, results, strict=True):
                self._verdict.blocks_checked += 1
                if isinstance(result, BlockRecord):
                    right.add(number)
                    if bytes(buffer) != slab.payload_of(number) or result != slab.record_of(number):
                        self._verdict.wrong_bytes.append(f"slab: block {number}")
                elif result not in (Outcome.ABSENT, Outcome.CHECKSUM):
                    self._verdict.laws_broken.append(f"slab: block {number} is {result}")
        self._verdict.blocks_right += len(right)
        return right

    def _close(self, store: FileStore) -> None:
        try:
            store.check()
        except AssertionError as error:
            self._verdict.laws_broken.append(f"slab: {error}")
        store.close()


class DaemonStory:
    """A daemon with a client that outlives it; it, other clients and exports are killed."""

    def __init__(self, home: Path, dice: random.Random, verdict: Verdict) -> None:
        self._home, self._dice, self._verdict = home, dice, verdict
        self._socket, self._http = home / "kv.sock", f"127.0.0.1:{free_port()}"
        options = {
            **patient_options(),
            "service__http": self._http,
            "service__archives": str(home),
            "host__size": "1MiB",
            "file__path": str(home / "slabs"),
            "file__size": "2MiB",
            "cache__load_or_recompute": "load",
        }
        self._variables = {f"KVTIER_{name.upper()}": value for name, value in options.items()}
        self._daemon = self._start()
        self._steady: Victim | None = None
        self._tally = Tally()

    def _start(self) -> Victim:
        victim = Victim(victims.run_verb, ["serve", "--socket", str(self._socket)], self._variables, False)
        victim.next_word()
        end = time.monotonic() + _PATIENCE
        while not self._page("/healthz"):
            if time.monotonic() > end or not victim.process.is_alive():
                raise RuntimeError("the daemon does not start")
            time.sleep(0.01)
        return victim

    def kill_daemon(self) -> None:
        """Amid its clients' stores and loads; the next one serves from its slab what is whole there."""
        self._listen()
        clients = [Victim(victims.use_daemon, self._socket, self._dice.randrange(2**32)) for _ in range(2)]
        for client in clients:
            client.next_word()
        time.sleep(self._dice.random() * 0.4)
        self._daemon.kill()
        for client in clients:
            client.kill()
        self._daemon = self._start()
        self._check()

    def kill_client(self) -> None:
        """With leases and filling slots in its hands, which all come back."""
        client = Victim(victims.use_daemon, self._socket, self._dice.randrange(2**32))
        client.next_word()
        time.sleep(self._dice.random() * 0.2)
        client.kill()
        self._check()

    def kill_export(self) -> None:
        """The command, or its daemon, amid an export: there is a whole archive or none, and nothing half done stays."""
        archive = self._home / "archive.kvt"
        before = archive.read_bytes() if archive.exists() else None
        arguments = ["export", str(archive), "--force", "--http", self._http]
        victim = Victim(victims.run_verb, arguments, {}, True)
        victim.words(2)  # one archive is whole
        time.sleep(self._dice.random() * 0.4)
        is_daemon = self._dice.random() < 0.3
        if is_daemon:
            self._daemon.kill()
        victim.kill()
        if is_daemon:
            self._daemon = self._start()
        self._check()
        part = archive.with_name(archive.name + ".part")
        if is_daemon:
            part.unlink(missing_ok=True)  # an operator's to remove: the next export says so, in one line
        elif not within(lambda: not part.exists()):
            self._verdict.left_over.append(f"export: {part.name} is still there")
        if archive.exists():
            self._judge_archive(archive.read_bytes())
        elif before is not None:
            self._verdict.lost.append("export: the archive that was there is gone")

    def end(self) -> None:
        """Hear the steady client out; nobody holds anything then."""
        if self._steady is not None:
            for tally in self._steady.kill()[-1:]:
                self._tally = tally
        tally, verdict = self._tally, self._verdict
        verdict.blocks_checked += tally.blocks_checked
        verdict.blocks_right += tally.blocks_checked - len(tally.wrong)
        verdict.wrong_bytes += tally.wrong
        verdict.hangs += tally.hangs
        verdict.laws_broken += tally.errors
        self._check()
        self._daemon.process.terminate()
        self._daemon.process.join(_PATIENCE)
        if self._daemon.process.exitcode is None:
            verdict.hangs.append("the daemon does not end on SIGTERM")
        self._daemon.kill()

    def _listen(self) -> None:
        """Hear what the client says that outlives its daemons; the first time, have it begin."""
        if self._steady is None:
            model = Model(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, _L2_SLOTS * SLOT_BYTES)
            self._steady = Victim(victims.keep_using, self._socket, model, self._dice.randrange(2**32))
            self._steady.next_word()
        for tally in _words(self._steady.told):
            self._tally = tally

    def _check(self) -> None:
        """What the killed held has come back, the laws hold, and every block that is found has its key's bytes."""
        if not within(lambda: not self._held()):
            self._verdict.left_over += self._held()
        tiers = attach(self._socket, size=_L2_SLOTS * SLOT_BYTES)
        try:
            for number in self._dice.sample(range(victims.NUM_CHAINS), 12):
                chain = victims.chain(number)
                found = load(tiers, chain)  # compares every byte
                self._verdict.blocks_checked += len(chain.hashes)
                self._verdict.blocks_right += found
            tiers.check()
        except AssertionError as error:
            text = str(error)
            (self._verdict.hangs if "no answer" in text else self._verdict.wrong_bytes).append(f"daemon: {text[:300]}")
        finally:
            tiers.close()

    def _held(self) -> list[str]:
        """What clients that are gone still hold; the steady one is there all the time."""
        page = self._page("/status") or {"clients": [], "models": []}
        return [f"a client that is gone holds {client}" for client in page["clients"] if not client["connected"]]

    def _judge_archive(self, data: bytes) -> None:
        try:
            encoded = data[: header_bytes_of(data)]
            header = decode_header(encoded)
            parser = Parser(header, encoded)
            for record, payload in parser.blocks(memoryview(data)[len(encoded) :]):
                self._verdict.blocks_checked += 1
                if bytes(payload) != payload_of(record.chain_hash, header.slot_bytes):
                    self._verdict.wrong_bytes.append(f"archive: {record.chain_hash.hex()}")
                else:
                    self._verdict.blocks_right += 1
            if not parser.ended:
                self._verdict.left_over.append("export: an archive without its end")
            else:
                self._verdict.archives_whole += 1
        except KVTierError as error:
            self._verdict.left_over.append(f"export: half an archive, {error}")

    def _page(self, path: str) -> Any:
        with suppress(httpx2.HTTPError):
            answer = httpx2.get(f"http://{self._http}{path}", timeout=_PATIENCE, trust_env=False)
            return answer.json() if path == "/status" else answer.status_code == 200
        return None


@contextmanager
def stories(seed: int) -> Iterator[tuple[Verdict, dict[str, Callable[[], None]]]]:
    """What can be killed, by name."""
    dice, verdict = random.Random(seed), Verdict()
    with tempfile.TemporaryDirectory(prefix="kvk-") as home:
        slabs, node = SlabStory(Path(home) / "slab", dice, verdict), DaemonStory(Path(home), dice, verdict)
        yield (
            verdict,
            {
                "slab writer": slabs.kill_writer,
                "verify": slabs.kill_verify,
                "daemon": node.kill_daemon,
                "client": node.kill_client,
                "export": node.kill_export,
            },
        )
        node.end()


def kills(seed: int, count: int) -> Verdict:
    """So many, of victims chosen at random."""
    dice = random.Random(seed)
    with stories(seed) as (verdict, kinds), Progress("kills", count) as progress:
        for _ in range(count):
            (kind,) = dice.choices(list(SHARES), weights=list(SHARES.values()))
            try:
                kinds[kind]()
            except (
                EOFError,
                KVTierError,
                RuntimeError,
                TimeoutError,
            ) as error:  # one that died by itself, or never began
                verdict.hangs.append(f"{kind}: {error!r}")
            verdict.kills[kind] += 1
            progress.add(1)
    return verdict


_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kill_victims"])


def main() -> int:
    """See the top."""
    arguments = options(__doc__, "count", 1000).parse_args()
    print(f"seed {arguments.seed}", flush=True)
    logging.disable(logging.WARNING)
    verdict = kills(arguments.seed, arguments.count)
    names = ("blocks_checked", "blocks_right", "archives_whole", *WRONG)
    figures: dict[str, Any] = {name: getattr(verdict, name) for name in names}
    report = {"program": "kills", **origin(), "seed": arguments.seed, "count": verdict.kills.total(),
              "kills": dict(sorted(verdict.kills.items())), **figures}  # fmt: skip
    return tell(report, WRONG, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

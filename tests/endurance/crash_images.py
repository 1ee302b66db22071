"""What a power loss can leave of a slab: recorded writes cut, torn and reordered, each image opened and read whole.

`python tests/endurance/crash_images.py --count 10000`: the slab's own write path runs over a recorder; an image is a
disk that had everything up to some write, or lost or reordered what no sync had made sure of. Exit status 1 where an
image serves a wrong byte, cannot be opened, breaks a law, or lacks what `durable` had promised.
"""

import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("rigs", "faults")), str(ROOT / "benchmarks")]

import _slab_child as child  # noqa: E402
from endurance import Progress, options, origin, tell  # noqa: E402

from kvtier.tiers.errors import KVTierError  # noqa: E402
from kvtier.tiers.file.file_io import FileIO  # noqa: E402
from kvtier.tiers.file.store import FileStore  # noqa: E402
from kvtier.tiers.tier import BlockRecord, Outcome  # noqa: E402

KINDS: Final = ("cut", "torn", "lost", "reordered", "sectors")
WRONG: Final = ("wrong_bytes", "not_opened", "laws_broken", "promises_broken")
_SECTOR: Final = 512  # bytes a disk writes whole or not at all
_IMAGES: Final = 25  # of one recorded run
_SIZES: Final = (child.SIZE, child.SIZE // 2, child.SIZE * 3 // 4)


@dataclass(frozen=True)
class Write:
    """Bytes on their way to the disk."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Length:
    """The file was cut, or made so long at least."""

    size: int
    is_cut: bool


@dataclass(frozen=True)
class Sync:
    """Everything before is on the disk."""


@dataclass(frozen=True)
class Held:
    """What the slab said it held at this moment, and how large it was to be."""

    numbers: frozenset[int]
    size: int


Event = Write | Length | Sync | Held


class Recorder(FileIO):
    """Real system calls on the slab, all of them written down."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, and remember what."""
        moved = super().pwritev(fd, buffers, offset)
        self.events.append(Write(offset, b"".join(buffers)[:moved]))
        return moved

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Make it longer."""
        super().allocate(fd, offset, length)
        self.events.append(Length(offset + length, is_cut=False))

    def truncate(self, fd: int, length: int) -> None:
        """Cut it."""
        super().truncate(fd, length)
        self.events.append(Length(length, is_cut=True))

    def sync(self, fd: int) -> None:
        """What was written before stays."""
        super().sync(fd)
        self.events.append(Sync())


@dataclass
class Run:
    """A recorded run: the slab as it was at first, all that was done to it, and the highest block number."""

    name: str
    before: bytes
    events: list[Event]
    num_blocks: int
    durable: bool


@dataclass
class Verdict:
    """What images showed."""

    images: Counter[str] = field(default_factory=Counter)
    blocks_checked: int = 0
    blocks_served: int = 0
    caught: int = 0  # reads whose checksum said no
    wrong_bytes: list[str] = field(default_factory=list)
    not_opened: list[str] = field(default_factory=list)
    laws_broken: list[str] = field(default_factory=list)
    promises_broken: list[str] = field(default_factory=list)


def record(directory: Path, dice: random.Random, recorder: Recorder, *, durable: bool) -> Run:
    """Store, read, forget and reset at random for a while, now and then over a slab of another size."""
    store = child.open_store(directory)
    path, number = store.path, 0
    for _ in range(dice.choice([0, 3, 20])):  # empty, begun, or full
        number = _store_batch(store, number)
    store.close()
    before, size = path.read_bytes(), child.SIZE
    store = _open(directory, size, recorder, durable=durable)
    recorder.events.append(_held(store, number, size))
    for _ in range(dice.randrange(5, 30)):
        what = dice.random()
        if what < 0.75:
            number = _store_batch(store, number)
        elif what < 0.85:
            _read(store, dice.choices(range(max(1, number)), k=8))  # a hit is kept at its extent's eviction
        elif what < 0.92:
            store.discard([child.hash_of(n) for n in dice.choices(range(max(1, number)), k=5)])
        elif what < 0.94:
            store.reset()
        else:
            store.close()
            size = dice.choice(_SIZES)
            store = _open(directory, size, recorder, durable=durable)
        recorder.events.append(_held(store, number, size))
    store.close()
    return Run(path.name, before, recorder.events, number + child.BATCH, durable)


def images(run: Run, dice: random.Random, count: int) -> Iterator[tuple[str, bytes, int]]:
    """Disks that the run could have left: kind, bytes, and the place among its events where the power went."""
    for _ in range(count):
        kind = dice.choice(KINDS)
        end = dice.randrange(1, len(run.events))
        synced = max((i for i in range(end) if isinstance(run.events[i], Sync)), default=0)
        if kind != "cut" and dice.random() < 0.5:
            synced = max(synced, end - dice.choice([3, 10, 40]))  # the kernel has written older ones by itself
        done, late = (
            run.events[:synced],
            [event for event in run.events[synced:end] if isinstance(event, Write | Length)],
        )
        disk = bytearray(run.before)
        for event in done:
            _apply(disk, event)
        for event in _survivors(kind, late, dice):
            _apply(disk, event)
        yield kind, bytes(disk), end


def _survivors(kind: str, late: list[Write | Length], dice: random.Random) -> list[Write | Length]:
    """Which of the writes since the last sync reached the disk, in which order."""
    if kind == "cut" or not late:
        return late
    if kind == "torn":  # all in order, but of the last one some sectors only
        return [*late[:-1], *_torn(late[-1], dice, 0.5)]
    if kind == "lost":  # any of them, in order
        return [event for event in late if isinstance(event, Length) or dice.random() < 0.5]
    if kind == "reordered":
        # What changes a file's length is a journal's matter, and in order; data is not.
        some = [event for event in late if dice.random() < 0.7]
        dice.shuffle(some)
        return [each for each in late if isinstance(each, Length)] + [each for each in some if isinstance(each, Write)]
    return [sector for event in late for sector in _torn(event, dice, 0.6)]


def _torn(event: Write | Length, dice: random.Random, share: float) -> list[Write | Length]:
    if isinstance(event, Length):
        return [event]
    edges = range(event.offset // _SECTOR * _SECTOR, event.offset + len(event.data), _SECTOR)
    pieces = ((max(edge, event.offset), min(edge + _SECTOR, event.offset + len(event.data))) for edge in edges)
    return [
        Write(begin, event.data[begin - event.offset : stop - event.offset])
        for begin, stop in pieces
        if dice.random() < share
    ]


def _apply(disk: bytearray, event: Event) -> None:
    if isinstance(event, Write):
        if len(disk) < event.offset + len(event.data):
            disk.extend(bytes(event.offset + len(event.data) - len(disk)))
        disk[event.offset : event.offset + len(event.data)] = event.data
    elif isinstance(event, Length):
        if event.is_cut:
            del disk[event.size :]
        disk.extend(bytes(max(0, event.size - len(disk))))


def judge(directory: Path, run: Run, kind: str, disk: bytes, end: int, verdict: Verdict) -> None:
    """Open an image, recover it, read every block there ever was, store on, and open it again."""
    path = directory / run.name
    path.write_bytes(disk)
    label = f"{kind}, durable {run.durable}, event {end}"
    verdict.images[f"{kind}{', durable' if run.durable else ''}"] += 1
    near = [event for event in run.events[:end] if isinstance(event, Held)][-1:]
    after = next((event for event in run.events[end:] if isinstance(event, Held)), None)
    size = near[0].size if near else child.SIZE
    try:
        store = _open(directory, size, None, durable=False)
    except KVTierError as error:
        verdict.not_opened.append(f"{label}: {error}")
        return
    served = _read_all(store, run.num_blocks, label, verdict)
    if run.durable and near and after is not None and after.size == size:
        lost = near[0].numbers & after.numbers - served
        # Blocks that were hit move when their extent goes; those under way then may be lost, two extents' worth.
        if len(lost) > 2 * store.superblock.slots_per_extent:
            verdict.promises_broken.append(f"{label}: {len(lost)} blocks are gone, {sorted(lost)[:9]}")
    try:
        store.check()
        _store_batch(store, run.num_blocks)
        held = _held(store, run.num_blocks + child.BATCH, size).numbers
        store.check()
        store.close()
        again = _open(directory, size, None, durable=False)
        found = _held(again, run.num_blocks + child.BATCH, size).numbers
        again.check()
        again.close()
    except (AssertionError, KVTierError) as error:
        verdict.laws_broken.append(f"{label}: {error!r}")
        return
    if found != held:
        verdict.laws_broken.append(f"{label}: {len(held)} blocks before, {len(found)} after a second opening")


def _read_all(store: FileStore, upto: int, label: str, verdict: Verdict) -> set[int]:
    """Each block is a miss or exactly right; which are."""
    right = set()
    for begin in range(0, upto, 64):
        numbers = range(begin, min(begin + 64, upto))
        for number, (result, data) in zip(numbers, _read(store, numbers), strict=True):
            verdict.blocks_checked += 1
            if isinstance(result, BlockRecord):
                right.add(number)
                if data != child.payload_of(number) or result != child.record_of(number):
                    verdict.wrong_bytes.append(f"{label}: block {number}")
            elif result is Outcome.CHECKSUM:
                verdict.caught += 1
            elif result is not Outcome.ABSENT:
                verdict.laws_broken.append(f"{label}: block {number} is {result}")
    verdict.blocks_served += len(right)
    return right


def _read(store: FileStore, numbers: Sequence[int]) -> list[tuple[BlockRecord | Outcome, bytes]]:
    buffers = [memoryview(bytearray(child.SLOT_BYTES)) for _ in numbers]
    results = store.read([child.hash_of(number) for number in numbers], buffers)
    return [(result, bytes(buffer)) for result, buffer in zip(results, buffers, strict=True)]


def _store_batch(store: FileStore, number: int) -> int:
    numbers = range(number, number + child.BATCH)
    payloads = [memoryview(child.payload_of(n)) for n in numbers]
    store.write([child.record_of(n) for n in numbers], payloads)
    return number + child.BATCH


def _held(store: FileStore, upto: int, size: int) -> Held:
    held = store.holds([child.hash_of(number) for number in range(upto)])
    return Held(frozenset(number for number, is_held in enumerate(held) if is_held), size)


def _open(directory: Path, size: int, io: FileIO | None, *, durable: bool) -> FileStore:
    return FileStore.open(directory, child.FINGERPRINT, slot_bytes=child.SLOT_BYTES, block_size=child.BLOCK_SIZE,
                          size=size, mode="buffered", durable=durable, key=child.KEY, io=io)  # fmt: skip


def crash_images(seed: int, count: int, recorder: type[Recorder] = Recorder) -> Verdict:
    """So many images, of as many runs as that takes."""
    dice, verdict = random.Random(seed), Verdict()
    with Progress("images", count) as progress:
        while (done := verdict.images.total()) < count:
            with tempfile.TemporaryDirectory(prefix="kvtier-images-") as home:
                run = record(_made(Path(home) / "run"), dice, recorder(), durable=dice.random() < 0.5)
                place = _made(Path(home) / "image")
                for kind, disk, end in images(run, dice, min(_IMAGES, count - done)):
                    judge(place, run, kind, disk, end, verdict)
                    progress.add(1)
    return verdict


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def main() -> int:
    """See the top."""
    arguments = options(__doc__, "count", 10_000).parse_args()
    print(f"seed {arguments.seed}", flush=True)
    logging.disable(logging.WARNING)  # each block that a checksum caught is told
    verdict = crash_images(arguments.seed, arguments.count)
    figures: dict[str, Any] = {
        name: getattr(verdict, name) for name in ("blocks_checked", "blocks_served", "caught", *WRONG)
    }
    report = {"program": "crash-images", **origin(), "seed": arguments.seed, "count": verdict.images.total(),
              "images": dict(sorted(verdict.images.items())), **figures}  # fmt: skip
    return tell(report, WRONG, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

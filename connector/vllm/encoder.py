"""Outputs of vLLM's encoders (images, audio, video) in kvtier's tiers: the scheduler's and a worker's half. No vLLM.

An output is `[rows, width]`. It is kept as pieces: blocks of one chain, which the item's content hash names. A slot is
a head, the name of its piece and the output's form, then `ROWS` rows. Pieces are written and read within a step, since
vLLM has no pool of them: each is a tensor of its own. The worker writes the head last, so the head says that the slot
is filled. The scheduler reads it there: vLLM does not pass on the reports of a worker that only encodes.
"""

import hashlib
import logging
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvtier.connector import CopyOp, SchedulerSide, StepPlan, WorkerReport
from kvtier.connector.vllm.keys import is_content
from kvtier.connector.vllm.worker import RegionHandle, handle_of
from kvtier.tiers import ConfigError, TierUnavailable
from kvtier.tiers.hierarchy import CacheTiers, Pending
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import TokenChain, root_hash

_log = logging.getLogger(__name__)

ROWS: Final = 32  # of the widest output, in a slot
_HEAD: Final = struct.Struct("<32sIII20x")  # the piece's name; the output's rows, width and dtype
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_REFUSED: Final = b"\xff" * 32  # in place of the name: the worker's output does not fit what was reserved
_LOST: Final = 60.0  # seconds after which a store that no worker has made is given up
_IDLE_WAIT: Final = 0.005  # seconds an idle step waits for the tiers


@dataclass(frozen=True)
class EncoderShape:
    """A `BlockShape` of pieces. `itemsize` and `width` are those of the widest output, in bytes and numbers."""

    width: int
    itemsize: int
    block_size: int = ROWS

    @property
    def payload_bytes(self) -> int:
        return ROWS * self.width * self.itemsize

    @property
    def block_bytes(self) -> int:
        return _HEAD.size + self.payload_bytes

    def num_pieces(self, rows: int, width: int) -> int:
        return -(-rows * width * self.itemsize // self.payload_bytes)


@dataclass(eq=False)
class Item:
    """One image, clip or video as a request of `SchedulerSide`: all of its pieces, or none."""

    request_id: str  # its content hash
    chain: TokenChain
    num_tokens: int
    size: tuple[int, int]  # rows and width of its output, as vLLM expects it
    is_doubtful: bool = False  # live requests have outputs of several sizes by this name, which a client has given
    users: set[str] = field(default_factory=set)  # vLLM's requests that have it

    @property
    def num_pieces(self) -> int:
        return len(self.chain.hashes)

    @classmethod
    def of(cls, identifier: str, root: bytes, size: tuple[int, int], num_pieces: int) -> "Item":
        """Block 0 has SHA-256 of the identifier and the output's expected size as its tokens, block n the number n."""
        digest = struct.unpack("<8I", hashlib.sha256(identifier.encode()).digest())
        chain = TokenChain(root, ROWS)
        chain.extend([*digest, *size, *[0] * (ROWS - 10)])
        for piece in range(1, num_pieces):
            chain.extend([piece] * ROWS)
        return cls(identifier, chain, num_pieces * ROWS + 1, size)  # one more: the last token is never promised


@dataclass
class EncoderStep:
    """What a step's message says: the region, its copies as a `StepPlan`, and the loads whose items vLLM expects."""

    region: RegionHandle | None
    plan: bytes
    shape: EncoderShape
    names: dict[int, list[bytes]]  # op → names of its pieces
    sizes: dict[int, int]  # op → pieces of its item, stored before or not


@dataclass
class EncoderReport:
    """A worker's answer, summed over ranks: who has mapped the region, and who has made which load."""

    mapped: Counter[int] = field(default_factory=Counter)  # region → ranks
    loaded: Counter[int] = field(default_factory=Counter)  # op → ranks

    def plus(self, other: "EncoderReport") -> "EncoderReport":
        return EncoderReport(self.mapped + other.mapped, self.loaded + other.loaded)


class EncoderScheduler:
    """The scheduler's half. Called from vLLM's scheduler thread; waits only in an idle step.

    An item is promised only while every rank has this region mapped. So a load cannot fail: vLLM could not undo it.
    """

    def __init__(
        self, shape: EncoderShape, tiers: CacheTiers, fingerprint: bytes, salt: str | None, num_ranks: int
    ) -> None:
        """`num_ranks`: workers that load each item."""
        self.side = SchedulerSide(tiers, keeps_blocks=False)
        self._shape, self._num_ranks = shape, num_ranks
        self._root = root_hash(fingerprint, cache_salt=salt)
        self._items: dict[str, Item] = {}
        self._cached: set[str] = set()  # in vLLM's own cache
        self._granted: dict[str, bool] = {}  # items that this step was asked for, and whether all of each is loaded
        self._expected: set[str] = set()  # of these, the ones that vLLM has scheduled
        self._computed: dict[str, Item] = {}  # items that this step encodes
        # stores under way, their region and since when
        self._writing: dict[int, tuple[CopyOp, list[bytes], HostRegion, float]] = {}
        self._loading: set[int] = set()
        self._handle: RegionHandle | None = None
        self._mapped: int | None = None  # the region that every rank has mapped
        self._awaits = False

    def is_ready(self, request_id: str, items: Sequence[tuple[str, int, int]], *, loads: bool) -> bool:
        """Whether it is known what the tiers have of a request's items: (identifier, rows, width) each."""
        pending = False
        for identifier, rows, width in items:
            if not is_content(identifier):
                continue
            item = self._items.get(identifier)
            if item is None:
                pieces = self._shape.num_pieces(rows, width)
                item = self._items[identifier] = Item.of(identifier, self._root, (rows, width), pieces)
            item.is_doubtful |= item.size != (rows, width)
            item.users.add(request_id)
            if loads and identifier not in self._cached and self._is_mapped:
                pending |= isinstance(self._lookup(item), Pending)
        self._awaits |= pending
        return not pending

    def has(self, identifier: str) -> bool:
        """Whether an item can be loaded in this step. If so, its load is planned."""
        item = self._items.get(identifier)
        if item is None or item.is_doubtful or not self._is_mapped:
            return False
        if identifier in self._granted:
            return self._granted[identifier]
        found = self._lookup(item)
        if isinstance(found, Pending) or found < item.num_pieces * ROWS:
            return False
        loading = self.side.allocated(identifier, range(item.num_pieces), found)
        self._granted[identifier] = loading == found  # fewer if the daemon is away meanwhile
        return loading == found

    def scheduled(self, identifier: str) -> None:
        """vLLM has room for the item in this step: it is loaded if `has` said so, else encoded."""
        self._cached.add(identifier)
        if self._granted.get(identifier):
            self._expected.add(identifier)
        elif (item := self._items.get(identifier)) is not None and not item.is_doubtful:
            self._computed[identifier] = item

    def build(self, evicted: Sequence[str], *, is_idle: bool, stores: bool) -> EncoderStep:
        """This step's message. `evicted`: items that leave vLLM's own cache."""
        if is_idle and self._awaits:
            self.side.wait(_IDLE_WAIT)
        self._awaits = False
        self._cached.difference_update(evicted)
        for item in self._computed.values() if stores else ():
            self.side.admit(item)
            self.side.store(item.request_id, 0, range(item.num_pieces))
        plan = self.side.build_plan()
        unused = tuple(op.op_id for op in plan.loads if op.request_id not in self._expected)
        plan = StepPlan(plan.step, plan.region, tuple(op for op in plan.loads if op.op_id not in unused), plan.stores)
        self._loading |= {op.op_id for op in plan.loads}
        names = {op.op_id: self._names(op) for op in (*plan.loads, *plan.stores)}
        region, now = self.side.tiers.region, time.monotonic()
        for op in plan.stores:
            assert region is not None
            for slot in op.host_slots:
                region.slot(slot)[:32] = bytes(32)
            self._writing[op.op_id] = op, names[op.op_id], region, now
        self._granted, self._expected, self._computed = {}, set(), {}
        self._settle(unused)
        self._handle = handle_of(self.side.tiers, self._handle, plan)
        self._mapped = self._mapped if self._handle is not None else None  # workers unmap it
        sizes = {op.op_id: self._items[op.request_id].num_pieces for op in plan.stores}
        return EncoderStep(self._handle, plan.encode(), self._shape, names, sizes)

    def update(self, report: EncoderReport) -> None:
        for region, ranks in report.mapped.items():
            if ranks >= self._num_ranks:
                self._mapped = region
        loaded = tuple(op_id for op_id, ranks in report.loaded.items() if ranks >= self._num_ranks)
        self._loading.difference_update(loaded)
        self._settle(loaded)

    def finished(self, request_id: str, identifiers: Sequence[str]) -> None:
        """A request has finished: forget the items that no other one has."""
        for identifier in identifiers:
            if (item := self._items.get(identifier)) is not None:
                item.users.discard(request_id)
                if not item.users:
                    del self._items[identifier]
                    self.side.finished(identifier)
        self._settle(())

    def close(self) -> None:
        self._settle(())
        self.side.close()
        self.side.tiers.close()

    @property
    def _is_mapped(self) -> bool:
        region = self.side.tiers.region
        return region is not None and region.region_id == self._mapped

    def _lookup(self, item: Item) -> int | Pending:
        return self.side.lookup(item, 0, spares=ROWS)

    def _names(self, op: CopyOp) -> list[bytes]:
        hashes = self._items[op.request_id].chain.hashes
        return [hashes[piece] for piece in op.device_blocks]

    def _settle(self, loaded: tuple[int, ...]) -> None:
        """Seal the stores whose heads are written, and report loads."""
        now = time.monotonic()
        filled, failed, lost = list[int](), list[int](), list[int]()
        for op_id, (op, names, region, since) in list(self._writing.items()):
            is_gone = region is not self.side.tiers.region  # the daemon was restarted
            heads = [] if is_gone else [bytes(region.slot(slot)[:32]) for slot in op.host_slots]
            if heads == names:
                filled.append(op_id)
            elif is_gone or _REFUSED in heads:
                failed.append(op_id)
            elif now >= since + _LOST:
                _log.error("no worker has stored an encoder's output in %g s; no more are loaded or stored", _LOST)
                lost.append(op_id)
            else:
                continue
            del self._writing[op_id]
        if loaded or filled or failed or lost:
            self.side.update(WorkerReport((*loaded, *filled), (*failed, *lost), tuple(lost)))


class EncoderWorker:
    """A worker's half: copies between vLLM's encoder outputs and the scheduler's L2, within the step."""

    def __init__(self, device: torch.device, *, encodes: bool = True) -> None:
        """`encodes`: this rank has the encoder. One of a later pipeline stage maps and loads nothing."""
        self._device, self._encodes = device, encodes
        self._step, self._plan = EncoderStep(None, b"", EncoderShape(1, 1), {}, {}), StepPlan(0, 0)
        self._handle: RegionHandle | None = None
        self._region: HostRegion | None = None
        self._wanted: dict[str, CopyOp] = {}
        self._report = EncoderReport()

    def begin(self, step: EncoderStep) -> None:
        """Map the region, and note the items to be stored."""
        if not self._encodes:
            return
        self._connect(step.region)
        self._step, self._plan = step, StepPlan.decode(step.plan)
        self._wanted = {op.request_id: op for op in self._plan.stores}

    def load(self, cache: dict[str, torch.Tensor]) -> None:
        """Put this step's loads into vLLM's cache."""
        for op in self._plan.loads:
            if op.request_id not in cache:
                cache[op.request_id] = self._load(op)
            self._report.loaded[op.op_id] = 1

    def save(self, identifier: str, output: torch.Tensor) -> None:
        """Store an output, if this step's plan has slots for it."""
        op, step, region = self._wanted.pop(identifier, None), self._step, self._region
        if op is None or region is None:
            return
        shape, (rows, width) = step.shape, (*output.shape, 0, 0)[:2]
        fits = output.ndim == 2 and output.dtype in _DTYPES and output.element_size() == shape.itemsize
        if not fits or shape.num_pieces(rows, width) != step.sizes[op.op_id]:
            _log.warning("an encoder's output of %s, %s, is not stored", tuple(output.shape), output.dtype)
            region.slot(op.host_slots[0])[:32] = _REFUSED
            return
        data = output.detach().contiguous().to("cpu").view(torch.uint8).reshape(-1)
        size, form = shape.payload_bytes, (rows, width, _DTYPES.index(output.dtype))
        for piece, slot, name in zip(op.device_blocks, op.host_slots, step.names[op.op_id], strict=True):
            view, part = region.slot(slot), data[piece * size : (piece + 1) * size]
            payload = _tensor(view[_HEAD.size :])
            payload[: len(part)] = part
            payload[len(part) :] = 0  # what another item left there
            view[: _HEAD.size] = _HEAD.pack(name, *form)

    def take_report(self) -> EncoderReport:
        report, self._report = self._report, EncoderReport()
        if self._handle is not None:
            report.mapped[self._handle.region_id] = 1
        return report

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
        self._region = self._handle = None

    def _connect(self, handle: RegionHandle | None) -> None:
        if handle == self._handle:
            return
        self.close()
        if handle is None:
            return
        try:
            self._region, self._handle = handle.attach(), handle
        except (OSError, ConfigError, TierUnavailable) as error:
            _log.warning("encoder outputs are not loaded here: the scheduler's memory cannot be mapped (%s)", error)

    def _load(self, op: CopyOp) -> torch.Tensor:
        step, region, size = self._step, self._region, self._step.shape.payload_bytes
        assert region is not None, "promised only once it was mapped"
        views = [region.slot(slot) for slot in op.host_slots]
        heads = [_HEAD.unpack(view[: _HEAD.size]) for view in views]
        if [head[0] for head in heads] != step.names[op.op_id] or len({head[1:] for head in heads}) != 1:
            raise RuntimeError("an encoder's output in L2 is not the one promised")
        _, rows, width, dtype = heads[0]
        data = torch.empty(len(views) * size, dtype=torch.uint8)
        for piece, view in enumerate(views):
            data[piece * size : (piece + 1) * size] = _tensor(view[_HEAD.size :])
        output = data[: rows * width * step.shape.itemsize].view(_DTYPES[dtype])
        return output.reshape(rows, width).to(self._device)


def _tensor(view: Any) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)

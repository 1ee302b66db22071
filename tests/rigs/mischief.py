"""An engine with every kind of reuse over a real slab, and what goes wrong around it: for random stories."""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_rig import settle
from tiny_models import config_of, prompt

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.segments import Repair, Segment
from kvtier.connector.worker import WorkerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import Output, SamplingParams
from kvtier.engine.sequence import Batch, SequenceState
from kvtier.engine.sequence import Sequence as Live
from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.copies.transfer import BlockCopies, HostCopyStream
from kvtier.tiers.hierarchy.lower_tier import Rates
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.identity import ModelIdentity
from kvtier.tiers.pool.pool import READY
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

SALTS = (None, "a", "b")
TEXTS = [prompt(seed, 420) for seed in range(3)]
DOCUMENTS = [prompt(50 + seed, length) for seed, length in ((1, 48), (2, 37), (3, 70))]


class EvenRates(Rates):
    """Loading a prompt takes as long as computing it, whatever is measured: both ends are worth it."""

    def __init__(self, bytes_per_token: int) -> None:
        super().__init__("auto")
        super().loaded("file", 1000 * bytes_per_token, 1.0)
        super().computed(1000, 1.0)

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Not heard."""

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """Not heard."""


class BadCopies:
    """A copier of which some copies are late, and some fail, having written rubbish."""

    def __init__(self, real: Any, tensor: torch.Tensor, region: Any, seed: int) -> None:
        self._real, self._tensor, self._region = real, tensor, region
        self._dice = random.Random(seed)
        self.is_bad = False
        self.num_failed = 0

    def invalid(self, copies: BlockCopies) -> str | None:
        return self._real.invalid(copies)  # type: ignore[no-any-return]

    def copy(self, direction: str, copies: BlockCopies, cancelled: Any) -> str | None:
        luck = self._dice.random() if self.is_bad else 1.0
        if luck < 0.15:
            time.sleep(0.03)  # longer than a layer waits
        if luck >= 0.1:
            return self._real.copy(direction, copies, cancelled)  # type: ignore[no-any-return]
        self.num_failed += 1
        if direction == "load":
            first, last = copies.layers or (0, self._tensor.shape[1])
            self._tensor[torch.from_numpy(copies.device_blocks), first:last] = 1e3
        else:
            self._region.array[copies.host_slots] = 0x5A
        return "the driver reports a failed copy"


class BadReads:
    """Reads of the slab that are late or fail, now and then."""

    def __init__(self, tier: Any, seed: int) -> None:
        self._read = tier.read
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self.is_bad = False
        tier.read = self

    def __call__(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        with self._lock:
            luck, late = self._dice.random(), self._dice.random()
        time.sleep(0.01 * late)
        if self.is_bad and luck < 0.05:
            return [Outcome.IO_ERROR] * len(hashes)
        if self.is_bad and luck < 0.1:
            time.sleep(0.4)  # longer than a request waits
        return self._read(hashes, into)  # type: ignore[no-any-return]


class BadConnector:
    """As `LocalConnector`, with copies and reads that go wrong."""

    identity: Any = None

    def __init__(self, identity: ModelIdentity, pool: BlockPool, config: Config, seed: int) -> None:
        self.hierarchy = open_hierarchy(config, identity.fingerprint(), pool.shape)
        self.hierarchy.rates = EvenRates(pool.shape.block_bytes // pool.shape.block_size)
        self.scheduler = SchedulerSide(self.hierarchy, partial_blocks=True)
        region = self.hierarchy.host.region
        stream = HostCopyStream(pool.tensor, region)
        stream._copier = self.copies = BadCopies(stream._copier, pool.tensor, region, seed)  # type: ignore[assignment]
        self.worker = WorkerSide(stream, pool.shape.num_layers, pool.shape.layer_bytes, 0.01)
        self.slab: Any = self.hierarchy.ports[0].tier
        self.reads = BadReads(self.slab, seed + 1)

    def reset(self) -> None:
        self.hierarchy.reset()

    def close(self) -> None:
        self.scheduler.update(self.worker.close(timeout=60))
        self.scheduler.close()
        settle(self.hierarchy)


class Asked:
    """One request of a story."""

    def __init__(self, live: Live, salt: str | None, params: SamplingParams) -> None:
        self.live, self.salt, self.params = live, salt, params
        self.logits: list[Any] = []
        self.ended: Output | None = None
        self.exact_until = 0  # the most tokens of which it ever had exact KV

    @property
    def reuses(self) -> bool:
        """Whether its answer may be approximate. Without marks that shows once its exact prefix is known."""
        return self.live.reuse is not None or self.live.find is not None

    def look(self) -> None:
        """Note how much of it is exact, as long as it has blocks."""
        if self.live.state is not SequenceState.WAITING or not self.reuses:
            self.exact_until = max(self.exact_until, self.live.num_exact)


class Mischief:
    """One random story: requests of all kinds over a small L1, a small L2 and a slab, while all of them go wrong."""

    def __init__(
        self, home: Path, seed: int, *, exact: bool, marks: bool = True, block_size: int = 16, **options: Any
    ) -> None:
        """`exact`: nothing is approximate. Without `marks` segments are found."""
        self.dice = np.random.default_rng(seed)
        self.exact, self.marks = exact, marks
        self.block_size = block_size
        section = {"block_size": block_size, "load_or_recompute": "auto", "prefetch_deadline": "300ms"}
        config = Config.load(
            host={"size": "2MiB", "verify": str(self.dice.choice(["never", "always"])), "huge_pages": False},
            file={"path": str(home), "size": "64MiB", "deadline": "60s"},
            cache=section,
            breaker={"retry_after": "10ms"},
        )
        chosen: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": 560 // block_size + int(self.dice.integers(2, 14)),
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "loading": str(self.dice.choice(["async", "layerwise"])),
            "preemption": str(self.dice.choice(["recompute", "offload"])),
            **({"exact": True, "exact_rows": 128} if exact else {"segment_min_tokens": 16}),
            "segments": "off" if exact else "on" if marks else "auto",
            **options,
        }
        self.settings = EngineConfig(**chosen)
        connect: Any = lambda identity, pool, _: BadConnector(identity, pool, config, seed)  # noqa: E731
        self.engine = Engine.from_config(config_of("llama"), self.settings, connect)
        connector: Any = self.engine.connector
        self.connector: BadConnector = connector
        self.asked: dict[str, Asked] = {}
        self.num_faults = 0

    # what is asked

    def ask(self) -> str:
        """A prompt that leaves one of few texts at any token; or, not in `exact` mode, one of documents."""
        dice = self.dice
        salt = SALTS[int(dice.choice(3, p=[0.7, 0.2, 0.1]))]
        params = SamplingParams(max_tokens=int(dice.integers(1, 24)), ignore_eos=True, keep_logits=True)
        own = dice.integers(3, 200, int(dice.integers(1, 30))).tolist()
        segments: list[Segment] = []
        if not self.exact and dice.random() < 0.4:
            tokens = TEXTS[int(dice.integers(3))][: int(dice.integers(0, 60))]
            for index in dice.permutation(3)[: dice.integers(1, 4)]:
                segments.append(Segment(len(tokens), len(tokens) + len(DOCUMENTS[index])))
                tokens = tokens + DOCUMENTS[index]
            tokens = tokens + own
        elif not self.marks and dice.random() < 0.5:  # what returns at any place
            text, start = TEXTS[int(dice.integers(3))], int(dice.integers(0, 100))
            tokens = [*own, *text[start : start + int(dice.integers(150, 300))], *own]
        elif dice.random() < 0.15:  # a document alone, as others take it for a segment
            tokens = [*DOCUMENTS[int(dice.integers(3))], *own]
        elif self.asked and dice.random() < 0.2:  # the next turn of somebody
            before = self.asked[str(dice.choice(list(self.asked)))]
            tokens, salt = [*before.live.token_ids, *own][:500], before.salt
        else:
            tokens = [*TEXTS[int(dice.integers(3))][: int(dice.integers(1, 420))], *own]
        repair = Repair(str(dice.choice(["deviation", "question", "first"])), float(dice.choice([0.0, 0.2, 1.0])), 1, 9)
        marked = segments if self.marks or dice.random() < 0.1 else None  # the caller's are used where both are
        name = self.engine.add_request(
            tokens, params, cache_salt=salt, segments=marked, repair=repair if segments or not self.marks else None
        )
        self.asked[name] = Asked(self.engine.request(name), salt, params)
        return name

    def step(self) -> None:
        """One step; a few raise, having computed."""
        runner, told = self.engine.runner, list[Output]()
        run = runner.run

        def fail(batch: Batch) -> torch.Tensor:
            run(batch)
            raise MemoryError

        if self.dice.random() < 0.02:
            runner.run = fail  # type: ignore[method-assign]
        with suppress(MemoryError):
            told = self.engine.step()
        runner.run = run  # type: ignore[method-assign]
        for output in told:
            asked = self.asked[output.request_id]
            if output.logits is not None:
                asked.logits.append(output.logits)
            if output.finish_reason is not None:
                asked.ended = output
        assert not any(live.num_loading for live in self.engine.scheduler.running), "it runs on what may not have come"
        for asked in self.asked.values():
            asked.look()

    # what goes wrong

    def strike(self) -> None:
        """Something happens between two steps."""
        dice, connector = self.dice, self.connector
        host, what = connector.hierarchy.host, dice.random()
        live = [asked.live for asked in self.asked.values() if asked.ended is None]
        self.num_faults += 1
        if what < 0.15:
            self.engine.pool.reset()
        elif what < 0.3:
            host.pool.reset()
        elif what < 0.45:
            host.pool.evict([name for name, _ in host.lineage(partial=False).pairs() if dice.random() < 0.3])
        elif what < 0.6:
            connector.slab.discard([name for name, _ in connector.slab.lineage().pairs() if dice.random() < 0.2])
        elif what < 0.75:
            self.damage_the_slab()
        elif what < 0.85 and live:
            self.engine.abort(str(dice.choice([each.request_id for each in live])))
        elif running := [each for each in live if each.state is SequenceState.RUNNING]:
            self.engine.scheduler._preempt(running[-1])

    def damage_the_slab(self) -> None:
        """Some blocks' bytes change on the disk."""
        slab = self.connector.slab
        with slab._lock:
            slots = [slot for slot in slab._blocks.index.named().tolist() if self.dice.random() < 0.1]
        descriptor = os.open(slab.path, os.O_RDWR)
        for slot in slots:
            at = slab.superblock.payload_offset(slot) + int(self.dice.integers(slab.superblock.slot_bytes - 8))
            os.pwrite(descriptor, self.dice.bytes(8), at)
        os.close(descriptor)

    def damage_l2(self) -> None:
        """Between requests, where L2 looks at its bytes before it promises them."""
        host = self.connector.hierarchy.host
        if host.verify:
            for slot, record in enumerate(host.records):
                if record is not None and self.dice.random() < 0.1:
                    host.region.slot(slot)[:8] = self.dice.bytes(8)

    # the story

    def play(self, num_rounds: int) -> None:
        """Rounds of one request alone, which may come from both ends, or of a crowd."""
        for number in range(num_rounds):
            self.connector.copies.is_bad = self.connector.reads.is_bad = bool(self.dice.random() < 0.6)
            left, alone = int(self.dice.integers(1, 6)), self.dice.random() < 0.6
            num_steps = 0
            while left or self.engine.has_unfinished:
                if left and (not self.engine.has_unfinished if alone else self.dice.random() < 0.4):
                    if alone and self.dice.random() < 0.5:
                        self.forget()
                    self.ask()
                    left -= 1
                self.step()
                if self.dice.random() < 0.12:
                    self.strike()
                num_steps += 1
                assert num_steps < 20_000, "no progress"
            if number % 3 == 2:
                self.rest()
                self.damage_l2()

    def forget(self) -> None:
        """The slab alone has what was computed."""
        self.rest()
        self.engine.pool.reset()
        self.connector.hierarchy.host.pool.reset()

    def rest(self) -> None:
        """Everything that was computed is in L2 and on the slab, or dropped."""
        while self.engine.scheduler.has_copies:
            assert self.engine.drain(60)
        assert self.connector.hierarchy.drain(60)

    def close(self) -> None:
        """All laws hold, and nothing leaked."""
        self.connector.copies.is_bad = self.connector.reads.is_bad = False
        self.rest()
        self.engine.step()  # what ended badly is told
        assert not self.engine.scheduler._admission.computing
        if self.engine.segments is not None:
            assert not self.engine.segments._children
        self.engine.close()
        self.engine.pool.check()
        assert self.engine.pool.num_free_blocks == self.engine.pool.num_blocks

    # what has to be right

    def held(self) -> Iterator[tuple[str, BlockRecord, torch.Tensor]]:
        """Every block that anybody could find: where, what, and its KV, `[layers, 2, block size, heads, dim]`."""
        pool, host, slab = self.engine.pool, self.connector.hierarchy.host, self.connector.slab
        for block in range(pool.num_blocks):
            record = pool._records[block] if pool._records is not None else None
            if record is not None and pool._core.state[block] == READY:
                yield "L1", record, pool.tensor[block]
        for slot, record in enumerate(host.records):
            if record is None or not host.pool.is_ready(slot):
                continue
            if not host.verify or checksum(host.region.slot(slot)) == record.checksum:  # else it was damaged
                yield "L2", record, self._kv(host.region.slot(slot))
        names = [name for name, _ in slab.lineage().pairs()]
        buffers = [memoryview(bytearray(slab.superblock.slot_bytes)) for _ in names]
        for result, buffer in zip(slab.read(names, buffers), buffers, strict=True):
            if isinstance(result, BlockRecord):  # others were damaged, and that was seen
                yield "slab", result, self._kv(buffer)

    def _kv(self, data: Any) -> torch.Tensor:
        shape = self.engine.shape
        raw = np.frombuffer(bytes(data)[: shape.block_bytes], np.float32).copy()
        return torch.from_numpy(raw).view(shape.block_shape)

"""Stories of encoder outputs in kvtier's tiers: the scheduler's half and the workers' halves, without vLLM."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from doubles import wait_until
from service_rig import PATIENCE, DaemonThread, attached

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Hello
from kvtier.connector.vllm import encoder
from kvtier.connector.vllm.encoder import (
    EncoderReport,
    EncoderScheduler,
    EncoderShape,
    EncoderStep,
    EncoderWorker,
    Item,
)
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy, open_hierarchy
from kvtier.tiers.naming import root_hash

FINGERPRINT = b"encoder".ljust(32, b".")
SHAPE = EncoderShape(width=24, itemsize=4)
CAT, DOG = (hashlib.sha256(name.encode()).hexdigest() for name in ("cat", "dog"))
Items = Sequence[tuple[str, int, int]]


def output(seed: int, rows: int, dtype: torch.dtype = torch.float32, width: int = 24) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Engine:
    """vLLM's part: a scheduler's half, and one worker's half and cache for each rank."""

    def __init__(self, path: Path, shape: EncoderShape = SHAPE, num_ranks: int = 1, slots: int = 16) -> None:
        size = slots * (shape.block_bytes + 4096)
        sections = {"host": {"size": size, "shared": True}, "file": {"path": path, "size": "4MiB"}}
        self.tiers = open_hierarchy(Config.load(None, **sections), FINGERPRINT, shape)
        assert isinstance(self.tiers, Hierarchy)
        self.half = EncoderScheduler(shape, self.tiers, FINGERPRINT, None, num_ranks)
        self.workers = [EncoderWorker(torch.device("cpu")) for _ in range(num_ranks)]
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
        self.ran: list[str] = []  # items that were encoded
        self.has_lost = False  # slots that are never used again

    def step(
        self, requests: dict[str, Items], outputs: dict[str, torch.Tensor], *, reporting: int | None = None
    ) -> EncoderStep:
        """One step for these requests; the encoder's outputs by item. `reporting`: so many ranks' reports arrive."""
        encoded: list[str] = []
        for request_id, items in requests.items():
            while not self.half.is_ready(request_id, items, loads=True):
                self.half.side.wait(0.05)
            for identifier, _, _ in items:
                if identifier not in self.caches[0]:
                    encoded += [] if self.half.has(identifier) else [identifier]
                    self.half.scheduled(identifier)
        message = self.half.build([], is_idle=not requests, stores=True)
        report = EncoderReport()
        for rank, (worker, cache) in enumerate(zip(self.workers, self.caches, strict=True)):
            worker.begin(message)
            worker.load(cache)
            for identifier in encoded:
                cache[identifier] = outputs[identifier]
                if rank == 0:
                    worker.save(identifier, outputs[identifier])
            if reporting is None or rank < reporting:
                report = report.plus(worker.take_report())
        self.half.update(report)
        self.ran += encoded
        return message

    def ask(self, items: Items, outputs: dict[str, torch.Tensor], request_id: str = "r") -> torch.Tensor:
        """A request from its arrival to its end; returns the first worker's output of its first item."""
        self.step({request_id: items}, outputs)
        got = self.caches[0][items[0][0]]
        self.half.finished(request_id, [identifier for identifier, _, _ in items])
        return got

    def evict(self) -> None:
        """vLLM's own caches are empty."""
        for cache in self.caches:
            cache.clear()
        self.half.build([CAT, DOG], is_idle=True, stores=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        assert not self.half._items
        assert not self.half._writing
        assert not self.half._loading
        assert self.tiers.drain(20)
        self.tiers.check(in_use=self.has_lost)
        self.half.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(tmp_path / "slab")) as made:
        made.step({}, {})  # the workers have mapped L2
        yield made


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_output_comes_back_to_the_last_bit_after_a_restart(tmp_path: Path, rows: int, dtype: torch.dtype) -> None:
    shape, cat = EncoderShape(24, dtype.itemsize), output(1, rows, dtype)
    with closing(Engine(tmp_path / "slab", shape)) as first:
        assert first.ask([(CAT, rows, 24)], {CAT: cat}) is cat
        first.evict()
        again = first.ask([(CAT, rows, 24)], {})
        assert again is not cat
        assert torch.equal(again, cat)
    with closing(Engine(tmp_path / "slab", shape)) as second:
        second.step({}, {})
        loaded = second.ask([(CAT, rows, 24)], {})
        assert (loaded.dtype, loaded.shape) == (dtype, cat.shape)
        assert torch.equal(loaded, cat)
        assert second.ran == []


def test_items_of_one_size_are_told_apart(engine: Engine) -> None:
    cat, dog = output(1, 40), output(2, 40)
    engine.ask([(CAT, 40, 24), (DOG, 40, 24)], {CAT: cat, DOG: dog})
    engine.evict()
    engine.ask([(DOG, 40, 24), (CAT, 40, 24)], {})
    assert torch.equal(engine.caches[0][CAT], cat)
    assert torch.equal(engine.caches[0][DOG], dog)


@pytest.mark.parametrize("rows", [80, 41])
def test_another_number_of_rows_is_another_item(engine: Engine, rows: int) -> None:
    """Two images of one name, a client's that looks like a digest: vLLM cannot take one of other rows."""
    engine.ask([(CAT, 40, 24)], {CAT: output(1, 40)})
    engine.evict()
    more = output(3, rows)
    assert engine.ask([(CAT, rows, 24)], {CAT: more}) is more
    # Both are in use at once, and vLLM names only the name: none is loaded, none stored.
    engine.evict()
    assert engine.half.is_ready("one", [(CAT, 40, 24)], loads=True)
    message = engine.step({"other": [(CAT, rows, 24)]}, {CAT: more})
    assert (engine.caches[0][CAT] is more, message.sizes) == (True, {})
    for request_id in ("one", "other"):
        engine.half.finished(request_id, [CAT])


def test_a_clients_own_name_is_not_kept(engine: Engine) -> None:
    """It may mean another image in another process."""
    for _ in range(2):
        assert engine.half.is_ready("r", [("my-image", 40, 24)], loads=True)
        assert not engine.half.has("my-image")
        engine.half.scheduled("my-image")
        assert not engine.step({}, {}).sizes
    engine.half.finished("r", ["my-image"])


def test_nothing_is_promised_before_every_rank_has_mapped_l2(tmp_path: Path) -> None:
    with closing(Engine(tmp_path / "slab", num_ranks=2)) as engine:
        cat = output(1, 40)
        engine.step({"r": [(CAT, 40, 24)]}, {CAT: cat}, reporting=1)
        engine.half.finished("r", [CAT])
        engine.evict()
        engine.step({"s": [(CAT, 40, 24)]}, {CAT: cat})  # it is in L2, but one rank may be unable to read it
        engine.half.finished("s", [CAT])
        assert engine.ran == [CAT, CAT]
        engine.evict()
        engine.step({"t": [(CAT, 40, 24)]}, {})
        engine.half.finished("t", [CAT])
        assert all(torch.equal(cache[CAT], cat) for cache in engine.caches)


def test_ranks_of_later_pipeline_stages_are_not_taken_for_those_that_load(tmp_path: Path) -> None:
    with closing(Engine(tmp_path / "slab")) as engine:
        later = EncoderWorker(torch.device("cpu"), encodes=False)
        message = engine.half.build([], is_idle=True, stores=True)
        later.begin(message)
        engine.half.update(later.take_report())  # vLLM asks them in idle steps, too
        assert not engine.half._is_mapped
        engine.step({}, {})
        assert engine.half._is_mapped
        engine.ask([(CAT, 40, 24)], {CAT: output(1, 40)})
        engine.evict()
        message, cache = engine.step({"r": [(CAT, 40, 24)]}, {}), dict[str, torch.Tensor]()
        later.begin(message)
        later.load(cache)
        assert (cache, later.take_report()) == ({}, EncoderReport())
        engine.half.finished("r", [CAT])


def test_a_daemon_that_restarts_within_a_store_ends_that_store_alone(home: Path) -> None:
    """The next one may have fewer slots, and nobody writes to those of the former."""
    hello = Hello(FINGERPRINT, SHAPE.block_size, SHAPE.block_bytes, 0, reset=False)
    daemon = DaemonThread(home / "s", host={"size": 256 * SHAPE.block_bytes})
    tiers = RemoteTiers(home / "s", hello, PATIENCE, deadline=PATIENCE)
    half, worker = EncoderScheduler(SHAPE, tiers, FINGERPRINT, None, 1), EncoderWorker(torch.device("cpu"))
    assert half.is_ready("r", [(CAT, 600, 24)], loads=True)
    assert not half.has(CAT)
    half.scheduled(CAT)
    message = half.build([], is_idle=False, stores=True)
    daemon.close()
    daemon = DaemonThread(home / "s", host={"size": 32 * SHAPE.block_bytes})
    wait_until(lambda: attached(tiers))
    worker.begin(message)  # its memory is gone, or still there: the store fails
    worker.save(CAT, output(1, 600))
    half.update(worker.take_report())
    assert not half._writing
    worker.begin(half.build([CAT], is_idle=True, stores=True))
    half.update(worker.take_report())
    half.finished("r", [CAT])
    dog = output(2, 40)
    assert half.is_ready("s", [(DOG, 40, 24)], loads=True) or not half.has(DOG)
    half.scheduled(DOG)
    worker.begin(half.build([], is_idle=False, stores=True))
    worker.save(DOG, dog)
    half.update(worker.take_report())
    half.finished("s", [DOG])
    assert tiers.drain(PATIENCE)
    wait_until(lambda: half.is_ready("t", [(DOG, 40, 24)], loads=True) and half.has(DOG))
    half.scheduled(DOG)
    cache: dict[str, torch.Tensor] = {}
    worker.begin(half.build([DOG], is_idle=False, stores=True))
    worker.load(cache)
    assert torch.equal(cache[DOG], dog)
    half.update(worker.take_report())
    half.finished("t", [DOG])
    worker.close()
    half.close()
    daemon.check()
    daemon.close()


def test_slots_stay_leased_until_every_rank_has_read_them(tmp_path: Path) -> None:
    with closing(Engine(tmp_path / "slab", num_ranks=2)) as engine:
        engine.step({}, {})
        engine.step({"r": [(CAT, 40, 24)]}, {CAT: output(1, 40)})
        engine.half.finished("r", [CAT])
        engine.evict()
        engine.step({"s": [(CAT, 40, 24)]}, {}, reporting=1)
        engine.half.finished("s", [CAT])
        assert len(engine.half._loading) == 1
        assert not engine.half.side.idle
        engine.half.update(engine.workers[1].take_report())
        engine.half.update(EncoderReport(loaded=Counter(dict.fromkeys(engine.half._loading, 2))))
        assert engine.half.side.idle


def test_an_item_that_vllm_has_no_room_for_is_loaded_in_a_later_step(engine: Engine) -> None:
    cat = output(1, 40)
    engine.ask([(CAT, 40, 24)], {CAT: cat})
    engine.evict()
    assert engine.half.is_ready("r", [(CAT, 40, 24)], loads=True)
    assert engine.half.has(CAT)  # and then vLLM finds no blocks for the request
    assert not engine.step({}, {}).names
    assert engine.half.side.idle
    assert torch.equal(engine.ask([(CAT, 40, 24)], {}), cat)


@pytest.mark.parametrize("num_left", [0, 32])
def test_an_item_whose_promise_ends_is_encoded_however_often_it_is_asked_for(
    engine: Engine, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the daemon goes away; vLLM asks once for each request that has the image."""
    cat = output(1, 40)
    engine.ask([(CAT, 40, 24)], {CAT: cat})
    engine.evict()
    allocated = engine.half.side.allocated
    monkeypatch.setattr(engine.half.side, "allocated", lambda name, blocks, _: allocated(name, blocks, num_left))
    assert engine.half.is_ready("r", [(CAT, 40, 24)], loads=True)
    assert [engine.half.has(CAT) for _ in range(3)] == [False] * 3
    engine.half.scheduled(CAT)
    assert not engine.half.build([], is_idle=False, stores=True).names
    engine.half.finished("r", [CAT])
    monkeypatch.undo()
    engine.evict()
    assert torch.equal(engine.ask([(CAT, 40, 24)], {}), cat)


@pytest.mark.parametrize(
    "made", [output(1, 39), output(1, 40, width=48), output(1, 40, torch.float64), output(1, 40)[0]]
)
def test_an_output_unlike_what_was_reserved_is_not_kept(engine: Engine, made: torch.Tensor) -> None:
    if made.shape == (39, 24):  # it has as many pieces: the head says how many rows
        engine.ask([(CAT, 40, 24)], {CAT: made})
        engine.evict()
        assert torch.equal(engine.ask([(CAT, 40, 24)], {}), made)
        return
    for number in (1, 2):
        engine.ask([(CAT, 40, 24)], {CAT: made})
        engine.evict()
        assert engine.ran == [CAT] * number
    assert engine.tiers.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] == 4


def test_an_l2_without_room_leaves_the_encoder_to_work(tmp_path: Path) -> None:
    with closing(Engine(tmp_path / "slab", slots=4)) as engine:
        engine.step({}, {})
        big = output(1, 400)
        for number in (1, 2):
            assert engine.ask([(CAT, 400, 24)], {CAT: big}) is big
            engine.evict()
            assert engine.ran == [CAT] * number


def test_a_worker_that_stores_nothing_ends_all_stores(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write to those slots at any time: they are never used again."""
    monkeypatch.setattr(EncoderWorker, "save", lambda *_: None)
    engine.ask([(CAT, 40, 24)], {CAT: output(1, 40)})
    assert engine.half._writing
    monkeypatch.setattr(encoder, "_LOST", 0.0)
    engine.step({}, {})
    assert not engine.half._writing
    assert engine.tiers.host.pool.counts().quarantined == 2
    engine.has_lost = True
    monkeypatch.undo()
    engine.evict()
    engine.ask([(DOG, 40, 24)], {DOG: output(2, 40)})
    engine.evict()
    engine.ask([(DOG, 40, 24)], {DOG: output(2, 40)})
    assert engine.ran == [CAT, DOG, DOG]


def test_memory_of_another_scheduler_is_never_taken_for_an_output(engine: Engine) -> None:
    cat = output(1, 40)
    engine.ask([(CAT, 40, 24)], {CAT: cat})
    engine.evict()
    assert engine.half.is_ready("r", [(CAT, 40, 24)], loads=True)
    assert engine.half.has(CAT)
    engine.half.scheduled(CAT)
    message = engine.half.build([], is_idle=False, stores=True)
    (op_id,) = message.names
    message.names[op_id][0] = bytes(32)
    engine.workers[0].begin(message)
    with pytest.raises(RuntimeError, match="not the one promised"):
        engine.workers[0].load(engine.caches[0])
    engine.half.update(EncoderReport(loaded=Counter({op_id: 1})))
    engine.half.finished("r", [CAT])


def test_names_of_pieces_depend_on_the_item_its_pieces_and_the_root() -> None:
    root, salted = root_hash(FINGERPRINT), root_hash(FINGERPRINT, cache_salt="a")
    same = CAT, root, (80, 24), 3
    others = (DOG, *same[1:]), (CAT, root, (99, 24), 4), (CAT, root, (81, 24), 3), (CAT, salted, (80, 24), 3)
    names = [name for each in (same, *others) for name in Item.of(*each).chain.hashes]
    assert len(set(names)) == 16
    assert [*Item.of(*same).chain.hashes] == names[:3]

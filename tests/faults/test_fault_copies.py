"""Faults 16-19 and 24: copies that are late, never end or fail, under a real engine; the test ends each copy itself."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from doubles import MemoryTier, chain_of, hierarchy_of, payload_of, store, wait_until
from extent import brief
from fault_rig import ask, settle
from manual_copies import ManualCopyStream
from numpy.typing import NDArray
from tiny_models import config_of, prompt

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import FinishReason, SamplingParams
from kvtier.engine.sequence import Batch, Completion, SequenceState
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.copies.transfer import BlockCopies, CopyEvent, HostCopyStream, HostEvent
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.naming.identity import ModelIdentity
from kvtier.tiers.tier import Outcome

KEEP = SamplingParams(max_tokens=3, ignore_eos=True, keep_logits=True)
EXACT: dict[str, Any] = {
    "block_size": 16,
    "exact": True,
    "exact_rows": 32,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}


class Witness(ManualCopyStream):
    """Copies end when the test says so; a store must bring L2 the bytes L1 had when it was asked for (16)."""

    def __init__(self, device: Any, region: HostRegion) -> None:
        super().__init__(device, region)
        self.bytes_of_l1 = device.view(-1).view(torch.uint8).numpy().reshape(len(device), -1)
        self.region = region
        self.asked: dict[int, tuple[BlockCopies, NDArray[np.uint8]]] = {}
        self.num_stored = 0

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        event = super().store(copies, after)
        self.asked[id(event)] = copies, self.bytes_of_l1[copies.device_blocks].copy()
        return event

    def complete_next(self) -> CopyEvent:
        event = super().complete_next()
        if (asked := self.asked.pop(id(event), None)) is not None:
            copies, expected = asked
            found = self.region.array[copies.host_slots, : expected.shape[1]]
            assert np.array_equal(found, expected), "L2 got other bytes than L1 had when the store was asked for"
            self.num_stored += len(copies.host_slots)
        return event

    def spoil_next(self) -> CopyEvent:
        """The driver reports a failure: some of the bytes may have been written."""
        task = self.take()
        target = self.bytes_of_l1 if task.direction == "load" else self.region.array
        into = task.copies.device_blocks if task.direction == "load" else task.copies.host_slots
        target[into, : self.bytes_of_l1.shape[1] // 2] = 0x5A
        self.asked.pop(id(task.event), None)
        return self._end(task, "the driver reports a failed copy")


class Prompt(Witness):
    """Copies end at once; the n-th fails."""

    def __init__(self, device: Any, region: HostRegion) -> None:
        super().__init__(device, region)
        self.left = 0

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        super().load(copies, after)
        return self._now()

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        super().store(copies, after)
        return self._now()

    def _now(self) -> CopyEvent:
        self.left -= 1
        return self.spoil_next() if self.left == 0 else self.complete_next()


class ManualConnector:
    """LocalConnector, but for its copy stream."""

    identity: Any = None

    def __init__(self, identity: ModelIdentity, pool: BlockPool, kind: type[Witness], host: str) -> None:
        config = Config.load(host={"size": host, "huge_pages": False}, cache={"load_or_recompute": "load"})
        self.hierarchy = open_hierarchy(config, identity.fingerprint(), pool.shape)
        self.scheduler = SchedulerSide(self.hierarchy, partial_blocks=pool.partial_blocks)
        self.stream = kind(pool.tensor, self.hierarchy.host.region)
        self.worker = WorkerSide(self.stream, pool.shape.num_layers, pool.shape.layer_bytes, 0.01)

    def reset(self) -> None:
        self.hierarchy.reset()

    def close(self) -> None:
        self.scheduler.update(self.worker.close(timeout=0))
        self.scheduler.close()
        settle(self.hierarchy)


Make = Callable[..., tuple[Engine, ManualConnector]]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(kind, …)`: an engine and its connector; at the end all is idle by the laws, L1 and L2."""
    engines: list[Engine] = []

    def build(kind: type[Witness] = Witness, host: str = "2MiB", **options: Any) -> tuple[Engine, ManualConnector]:
        settings = EngineConfig(**EXACT | {"num_blocks": 24} | options)
        connect: Any = lambda identity, pool, _: ManualConnector(identity, pool, kind, host)  # noqa: E731
        engine = Engine.from_config(config_of("llama"), settings, connect)
        engines.append(engine)
        assert isinstance(engine.connector, ManualConnector)
        return engine, engine.connector

    yield build
    for engine in engines:
        assert isinstance(engine.connector, ManualConnector)
        engine.connector.stream.complete_all()
        engine.step()
        engine.close()
        engine.pool.check()
        assert engine.pool.num_free_blocks == engine.pool.num_blocks
        assert engine.scheduler._admission.computing == {}


@pytest.fixture(scope="module")
def cold() -> Iterator[Callable[[list[int]], Completion]]:
    """What an engine without any cache answers."""
    engine = Engine.from_config(config_of("llama"), EngineConfig(**EXACT, num_blocks=64, enable_prefix_caching=False))
    answers: dict[tuple[int, ...], Completion] = {}

    def ask(tokens: list[int]) -> Completion:
        if tuple(tokens) not in answers:
            answers[tuple(tokens)] = engine.generate([tokens], KEEP)[0]
        return answers[tuple(tokens)]

    yield ask
    engine.close()


Cold = Callable[[list[int]], Completion]


def serve(engine: Engine, connector: ManualConnector, tokens: list[int]) -> Completion:
    """Answer a prompt; copies end where nothing else can go on."""
    answer = Completion(engine.add_request(tokens, KEEP))
    while engine.has_unfinished:
        outputs = engine.step()
        for output in outputs:
            if output.token_id is not None:
                assert output.logits is not None
                answer.token_ids.append(output.token_id)
                answer.logits.append(output.logits)
        if not outputs:
            connector.stream.complete_all()
    return answer


def same(answer: Completion, expected: Completion) -> bool:
    return answer.token_ids == expected.token_ids and np.array_equal(answer.logits, expected.logits)


def come_to_rest(engine: Engine, connector: ManualConnector) -> None:
    while engine.has_unfinished or engine.scheduler.has_copies:
        connector.stream.complete_all()
        engine.step()
    assert connector.hierarchy.drain(60)


def warm(engine: Engine, connector: ManualConnector, tokens: list[int]) -> None:
    """The prompt's blocks are in L2 and only there."""
    serve(engine, connector, tokens)
    come_to_rest(engine, connector)
    engine.pool.reset()


# 16: an L1 block freed while its d2h copy is in flight.


def test_a_block_is_not_taken_again_before_its_store_has_ended(make: Make, cold: Cold) -> None:
    engine, connector = make(num_blocks=12)
    first, second, third = prompt(1, 64), prompt(2, 90), prompt(3, 60)
    assert same(engine.generate([first], KEEP)[0], cold(first))  # ended: its four blocks wait for their copy
    assert engine.pool.num_free_blocks == 7  # … and its unfinished last one
    assert same(engine.generate([second], KEEP)[0], cold(second))  # six blocks, none of them those
    third_id = engine.add_request(third, KEEP)
    for _ in range(5):
        assert engine.step() == []  # it needs four and one to grow: it waits, nobody raises
    assert engine.request(third_id).state is SequenceState.WAITING
    connector.stream.complete_all()  # the Witness compares each slot with what L1 held at store time
    assert connector.stream.num_stored == 11  # with the unfinished last block of each
    come_to_rest(engine, connector)
    # And what L2 got is what the prompts' KV is.
    for tokens in (first, second, third):
        engine.pool.reset()
        engine.pool.tensor.fill_(torch.nan)
        before = engine.stats["external_tokens"]
        assert same(serve(engine, connector, tokens), cold(tokens))
        # All blocks, the unfinished last one, too; all but the token that is always computed.
        assert engine.stats["external_tokens"] - before == len(tokens) - 1


# 17: a load into a block that compute still reads.


def test_a_load_waits_for_the_compute_that_still_reads_its_block() -> None:
    l1 = np.zeros((4, 1, 4096), np.uint8)
    region = HostRegion.allocate(2, 4096, huge_pages=False, prefault=False)
    region.slot(0)[:] = bytes([7]) * 4096
    stream = HostCopyStream(l1, region)
    compute, seen = HostEvent(), set[int]()
    go_on = threading.Event()

    def attend() -> None:
        while not go_on.is_set():
            seen.add(int(l1[2].max()))
        compute.end()

    reader = threading.Thread(target=attend)
    reader.start()
    loaded = stream.load(BlockCopies(np.array([2]), np.array([0])), after=compute)
    assert not loaded.wait(0.1)
    go_on.set()
    assert loaded.wait(60)
    reader.join()
    assert seen == {0}
    assert set(l1[2, 0].tolist()) == {7}
    stream.close(1)
    region.close()


# 18: aborted or preempted at every step, copies coming late.


@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_aborted_at_every_step_with_its_copies_coming_late(make: Make, cold: Cold, loading: str) -> None:
    engine, connector = make(loading=loading)
    victim = prompt(4, 90)
    met = set()
    for num_steps in range(6):
        warm(engine, connector, victim)  # so that it loads
        request_id = engine.add_request(victim, SamplingParams(max_tokens=40, ignore_eos=True))
        for step in range(num_steps):
            engine.step()
            if step == 1:
                connector.stream.complete_all()
        met.add(engine.request(request_id).state)
        assert engine.abort(request_id)
        # Its copies are still on their way. Others compute meanwhile, in blocks of their own …
        other = prompt(50 + num_steps, 40)
        assert same(engine.generate([other], KEEP)[0], cold(other))
        come_to_rest(engine, connector)  # … and nobody reads where the late bytes land
        assert same(engine.generate([other], KEEP)[0], cold(other))  # from L1
        come_to_rest(engine, connector)
        connector.hierarchy.check()
        assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert met == {SequenceState.WAITING, SequenceState.LOADING, SequenceState.RUNNING}


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_preempted_at_every_step_the_answer_is_the_same(make: Make, cold: Cold, loading: str, preemption: str) -> None:
    engine, connector = make(loading=loading, preemption=preemption)
    tokens = prompt(6, 90)
    warm(engine, connector, tokens)
    for at in range(10):
        engine.pool.reset()
        request_id = engine.add_request(tokens, KEEP)
        answer = Completion(request_id)
        for step in range(200):
            if not engine.has_unfinished:
                break
            sequence = engine.request(request_id)
            if step == at and sequence.state is SequenceState.RUNNING:
                engine.scheduler._preempt(sequence)
            for output in engine.step():
                assert output.token_id is not None
                assert output.logits is not None
                answer.token_ids.append(output.token_id)
                answer.logits.append(output.logits)
            if step % 3 == at % 3:  # copies end now and then
                connector.stream.complete_all()
        assert same(answer, cold(tokens))
        come_to_rest(engine, connector)
    assert engine.stats["preempted"] >= 3


# 16, 18, 22 and 24 at once: a random crowd, copies that end late, out of step, or badly.


@pytest.mark.parametrize("seed", [1, *brief([], [2, 5])])  # whose crowds load something, too
@pytest.mark.parametrize(("loading", "preemption"), [("async", "offload"), ("layerwise", "recompute")])
def test_a_crowd_over_slow_and_failing_copies(make: Make, cold: Cold, loading: str, preemption: str, seed: int) -> None:
    dice = np.random.default_rng(seed)
    engine, connector = make(host="160KiB", num_blocks=16, loading=loading, preemption=preemption)
    heads = [prompt(10 + i, 64) for i in range(2)]  # four blocks each
    waiting = [[*heads[int(dice.integers(2))], *prompt(20 + i, 5)] for i in range(6)] * 3
    tokens_of: dict[str, list[int]] = {}
    said: dict[str, list[int]] = {}
    num_steps = 0
    while waiting or engine.has_unfinished:
        num_steps += 1
        assert num_steps < 3000, "no progress"
        if waiting and dice.random() < 0.4:
            tokens = waiting.pop()
            tokens_of[engine.add_request(tokens, KEEP)] = tokens
        if dice.random() < 0.03 and (live := [name for name in tokens_of if name in engine.scheduler.live]):
            engine.abort(str(dice.choice(live)))
        if dice.random() < 0.05:
            engine.pool.reset()  # L1 forgets: the next ones load
        for output in engine.step():
            if output.token_id is not None:
                said.setdefault(output.request_id, []).append(output.token_id)
            elif output.finish_reason is FinishReason.ABORT:
                said.setdefault(output.request_id, [])
        while connector.stream.num_pending and dice.random() < 0.3:
            connector.stream.spoil_next() if dice.random() < 0.2 else connector.stream.complete_next()
    assert said.keys() == tokens_of.keys()
    for name, tokens in tokens_of.items():
        assert said[name] == cold(tokens).token_ids[: len(said[name])]
    assert engine.stats["external_tokens"] > 0
    come_to_rest(engine, connector)


# P6, and of whole blocks: a load that its step did not wait for.


@pytest.mark.parametrize("shared", [48, 41])  # tokens: whole blocks, and a part of one
def test_a_layerwise_load_that_ends_right_after_its_step_gave_up_on_it(make: Make, cold: Cold, shared: int) -> None:
    """Asked behind the compute, all copies have ended well; but the compute did not have them."""
    engine, connector = make(loading="layerwise")
    held = prompt(60, 64)
    warm(engine, connector, held)
    engine.pool.tensor.fill_(torch.nan)
    tokens = [*held[:shared], (held[shared] - 2) % 200 + 3, *prompt(61, 20)]
    run = engine.runner.run

    def run_and_copy(batch: Batch) -> torch.Tensor:
        logits = run(batch)
        connector.stream.complete_all()
        return logits

    engine.runner.run = run_and_copy  # type: ignore[method-assign]
    answer = serve(engine, connector, tokens)
    assert same(answer, cold(tokens))
    assert engine.stats["external_tokens"] == shared
    assert engine.stats["failed_loads"] == 0
    come_to_rest(engine, connector)


# 19: L2 eviction during promotion.


def test_nothing_on_its_way_up_is_evicted() -> None:
    tier, chain = MemoryTier(), chain_of(4)
    tier.fill(chain)
    tier.gate.clear()
    hierarchy = hierarchy_of(slots=16, tier=tier)

    def flood() -> None:
        for n in range(8):
            store(hierarchy, chain_of(8, first_token=1000 * (n + 1)))

    prefetch = ask(hierarchy, chain)
    flood()  # while the read is under way
    assert hierarchy.host.pool.counts().filling == 4
    tier.gate.set()
    wait_until(lambda: hierarchy.poll(prefetch) == 4)
    flood()  # while it is promised
    lease = hierarchy.lease(prefetch)
    assert lease.hashes == chain.hashes
    flood()  # while it is copied to L1
    for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
        assert bytes(hierarchy.host.region.slot(slot)) == payload_of(chain_hash)
    lease.release()
    assert hierarchy.drain(60)
    flood()  # only now may it go
    assert hierarchy.lookup(chain.hashes)["l2"] == 0
    settle(hierarchy)


# 24: the driver reports a failed copy.


@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_whichever_copy_fails_the_answer_is_right(make: Make, cold: Cold, loading: str) -> None:
    engine, connector = make(Prompt, loading=loading)
    stream = connector.stream
    assert isinstance(stream, Prompt)
    for n in range(1, 8):
        tokens = [*prompt(30 + n, 80), *prompt(7, 10)]
        engine.generate([tokens[:50]], KEEP)  # part of it is stored …
        come_to_rest(engine, connector)  # the last block's unfinished copy, too
        engine.pool.reset()
        engine.pool.tensor.fill_(torch.nan)
        stream.left = n
        assert same(engine.generate([tokens], KEEP)[0], cold(tokens))  # … so this one loads and stores
        stream.left = 0
        come_to_rest(engine, connector)  # the last block's unfinished copy, too
        engine.pool.reset()
        assert same(engine.generate([tokens], KEEP)[0], cold(tokens))  # and nothing half copied was kept
    stats = connector.hierarchy.stats()
    assert stats[f'kvtier_miss_total{{reason="{Outcome.COPY_FAILED}"}}'] == 4  # of n = 1: all it wanted to load
    assert stats[f'kvtier_store_dropped_total{{tier="l2",reason="{Outcome.COPY_FAILED}"}}'] > 0
    assert engine.stats["failed_loads"] == 1

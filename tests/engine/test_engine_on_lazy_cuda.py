"""The engine over an adversary's CUDA: copies run late and in any order, answers are a cold engine's, nothing races."""

import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cupy import LazyCupy
from extent import brief
from lazy_cuda import LazyCuda, LazyDriver, pin, ranges_of, rows_of
from tiny_models import config_of, prompt
from torch.overrides import TorchFunctionMode

from kvtier.connector.local import LocalConnector
from kvtier.connector.segments import Repair, Segment
from kvtier.connector.segments.paged_attention import PagedKV, uploaded
from kvtier.connector.worker import WorkerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.model_runner import ModelRunner
from kvtier.engine.requests import SampledToken, SamplingParams
from kvtier.engine.sequence import Batch
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies import packer
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SHARED = prompt(3, 64)
PROMPTS = [[*SHARED, *prompt(10 + i, 20 + 9 * i)] for i in range(8)]  # together more than L1 has


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_config(config_of("llama"), dtype="float32")


@pytest.fixture(scope="module")
def answers(model: Model) -> list[list[int]]:
    """What an engine without a cache says."""
    config = EngineConfig(block_size=16, num_blocks=128, max_num_batched_tokens=16, enable_prefix_caching=False)
    with Engine(model, config) as engine:
        return [engine.generate([tokens], GREEDY)[0].token_ids for tokens in PROMPTS]


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyCuda]:
    """The device below the engine: what it computes reads and writes L1 at once, copies run when they like."""
    seed = int(request.param)
    cuda = LazyCuda(seed, eager=random.Random(seed).choice([0.0, 0.05, 0.3]))
    cuda.patch(monkeypatch)
    write, gather, copy, sample = PagedKV.write, PagedKV.gather, BlockPool.copy, ModelRunner.sample

    def written(self: PagedKV, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for half in (0, 1):
            rows = slots + (layer * 2 + half) * self.block_size
            cuda.compute_op("KV written", [], rows_of(self._token_rows, rows))
        write(self, layer, slots, key, value)

    def gathered(self: PagedKV, layer: int, blocks: torch.Tensor, num_tokens: int) -> Any:
        for half in (0, 1):
            index = blocks * (self.num_layers * 2) + (layer * 2 + half)
            cuda.compute_op("KV read", rows_of(self._block_rows, index), [])
        return gather(self, layer, blocks, num_tokens)

    def copied(self: BlockPool, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            cuda.compute_op("a block copied", ranges_of(self.tensor[source]), ranges_of(self.tensor[target]))
        copy(self, pairs)

    def sampled(self: ModelRunner, batch: Batch, logits: torch.Tensor) -> list[SampledToken]:
        cuda.compute.synchronize()  # the host reads the logits
        return sample(self, batch, logits)

    monkeypatch.setattr(PagedKV, "write", written)
    monkeypatch.setattr(PagedKV, "gather", gathered)
    monkeypatch.setattr(BlockPool, "copy", copied)
    monkeypatch.setattr(ModelRunner, "sample", sampled)
    yield cuda
    cuda.finish()


@pytest.mark.parametrize(
    ("cuda", "way", "loading"),
    brief(
        [(0, "kernel", "async"), (1, "batches", "layerwise")],
        [*product(range(2), ["kernel", "copies", "batches"], ["async", "layerwise"])],
    ),
    indirect=["cuda"],
)
def test_answers_are_a_cold_engines_and_nothing_races(
    cuda: LazyCuda,
    loading: str,
    way: str,
    model: Model,
    answers: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "kernel" and shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")
    ways = CopyWays(CopyChoice(batch_from=0, torch_from=None if way == "kernel" else 0))
    driver: Any = LazyDriver(cuda) if way == "batches" else None

    def stream(tensor: torch.Tensor, region: HostRegion) -> CudaCopyStream:
        cuda.own(tensor)
        pin(region, cuda, piece_bytes=64 << 10)
        return CudaCopyStream(tensor, region, cupy=LazyCupy(cuda), driver=driver, ways=ways)

    monkeypatch.setattr("kvtier.tiers.copies.HostCopyStream", stream)
    cache = {"block_size": 16, "load_or_recompute": "load", "prefetch_deadline": "30s"}
    file = {"path": str(tmp_path / "slab"), "size": "16MiB", "deadline": "30s"} if cuda.seed % 2 else {}
    config = Config.load(host={"size": ["64MiB", "2MiB"][cuda.seed % 2]}, file=file, cache=cache)
    settings = EngineConfig(
        block_size=16,
        num_blocks=24,
        max_num_batched_tokens=96,
        loading=loading,  # type: ignore[arg-type]
        preemption="offload" if cuda.seed % 2 else "recompute",
    )
    with Engine(model, settings, LocalConnector.connect(config)) as engine:
        for turn in range(3):
            given = engine.generate(PROMPTS, GREEDY)
            assert [answer.token_ids for answer in given] == answers
            cuda.require_clean()
            if turn == 1:
                assert engine.drain(30)
                engine.pool.reset()  # all of it comes from L2 or below
        assert engine.stats["external_tokens"] > 0
        assert driver is None or driver.num_batches > 10
        assert not engine.stats["failed_loads"]
        assert engine.drain(30)
        engine.pool.check()
        assert isinstance(engine.connector, LocalConnector)
        assert engine.connector.hierarchy.drain(30)
        engine.connector.hierarchy.check()


@pytest.mark.slow
@pytest.mark.parametrize("cuda", [1], indirect=True)
def test_an_engine_whose_copies_are_lost_goes_on_without_them(
    cuda: LazyCuda,
    model: Model,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packer.TensorCopier, "_compiled", lambda *_: None)
    driver: Any = LazyDriver(cuda, copies_in_batches=False)

    def stream(tensor: torch.Tensor, region: HostRegion) -> CudaCopyStream:
        cuda.own(tensor)
        pin(region, cuda, piece_bytes=64 << 10)
        return CudaCopyStream(tensor, region, driver=driver, ways=CopyWays(CopyChoice(None, torch_from=0)))

    monkeypatch.setattr("kvtier.tiers.copies.HostCopyStream", stream)
    kept = len(host._KEPT)
    cache = {"block_size": 16, "load_or_recompute": "load"}
    config = Config.load(host={"size": "64MiB"}, file={}, cache=cache)
    settings = EngineConfig(block_size=16, num_blocks=24, max_num_batched_tokens=96)
    with Engine(model, settings, LocalConnector.connect(config)) as engine:
        for tokens in PROMPTS[:2]:
            engine.add_request(tokens, GREEDY)
        assert isinstance(engine.worker, WorkerSide)
        while not engine.worker._stores:
            engine.step()
        cuda.dead = "CUDA error: an illegal memory access was encountered"
        while engine.has_unfinished:
            engine.step()
        assert [answer.token_ids for answer in engine.generate(PROMPTS[:3], GREEDY)] == answers[:3]
        assert engine.drain(30)
        assert isinstance(engine.connector, LocalConnector)
        hierarchy = engine.connector.hierarchy
        assert hierarchy.host.pool.counts().quarantined
        assert hierarchy.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] > 0
        engine.pool.check()
        hierarchy.check(in_use=True)
    assert sum("CUDA has failed for good" in message for message in caplog.messages) == 1
    assert len(host._KEPT) == kept + 1  # what the device may still write to
    cuda.dead = ""
    while cuda.step():
        pass
    cuda.races.clear()  # the engine computes, which no lost device lets it do
    del host._KEPT[kept:]


# One step of the engine crosses to the device once, and back once: nothing else in it waits for a GPU.


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero")


class Crossings(TorchFunctionMode):
    """Counts what would cross between host and device, by name; of `to` those where the caller would wait.

    RoPE's frequencies are on the device: `to` does nothing to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        is_move = name == "to" and any(isinstance(each, torch.device | str) for each in (*args[1:], *options.values()))
        caller = sys._getframe(1).f_code.co_filename
        if name in (*READS, "tensor", "as_tensor") or (
            is_move and "rope" not in caller and "transformers" not in caller
        ):
            self.seen["upload" if options.get("non_blocking") else name] += 1
        return func(*args, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_a_step_uploads_once_and_reads_the_tokens_once(family: str) -> None:
    model = Model.from_config(config_of(family), dtype="float32")
    draws = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=1)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    with Engine(model, EngineConfig(block_size=16, num_blocks=128)) as engine:
        for number in range(8):
            engine.add_request(prompt(number, 20 + 3 * number), draws if number % 2 else greedy)
        num_steps = 0
        while engine.has_unfinished:
            with Crossings() as crossings:
                engine.step()
            num_steps += 1
            # The greedy tokens; the logits of those that draw, together.
            assert crossings.seen == {"upload": 1, "tolist": 1, "cpu": 1, "numpy": 1}
        assert num_steps >= 6


def test_a_blend_uploads_without_waiting() -> None:
    """Only its choice of tokens reads what the device found."""
    model = Model.from_config(config_of("llama"), dtype="float32")
    tokens = [*prompt(3, 5), *prompt(1, 64), *prompt(2, 53), *prompt(4, 9)]
    with Engine(model, EngineConfig(block_size=16, num_blocks=128, segments="on")) as engine:
        segments = [[Segment(5, 69), Segment(69, 122)]]
        with Crossings() as crossings:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            engine.generate([tokens], params, segments=segments, repair=Repair("deviation", 0.25, max_deviation=9))
        assert not crossings.seen["tensor"]
        assert not crossings.seen["to"]


def test_uploads_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = LazyCuda()
    cuda.patch(monkeypatch)
    arrays = [np.arange(5), np.empty(0, np.int64), np.array([7])]
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        tensors = uploaded(arrays, torch.device("cuda"))
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2, 3, 4], [], [7]]
    assert cuda.num_ops == 1
    cuda.finish()  # of pageable memory it complains

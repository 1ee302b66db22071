"""The whole engine on a real device: the same greedy text from L1, from L2, from the slab, and without kvtier."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import config_of, prompt

from kvtier.connector.local import LocalConnector
from kvtier.connector.segments import Repair, Segment
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.model_runner import ModelRunner
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies import copy_ways

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CuPy's and the driver's own
]

BLOCK = 16
SMALL: dict[str, Any] = {
    **{"block_size": BLOCK, "num_blocks": 128, "max_num_batched_tokens": BLOCK},
    "partial_blocks": False,
}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, keep_logits=True)


@pytest.fixture(params=["kernel", "copy", "pageable"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks move: by the kernel and by the copy engine, both with a pinned L2, or by a thread."""
    if request.param == "kernel":
        pytest.importorskip("cupy")
    choice = copy_ways.CopyChoice(batch_from=None, torch_from=None if request.param == "kernel" else 0)
    monkeypatch.setattr(copy_ways.CopyWays, "to_measure", lambda host, metrics: copy_ways.CopyWays(choice, metrics))
    return str(request.param)


def model_of(family: str, dtype: str) -> Model:
    return Model.from_config(config_of(family), dtype=dtype, device=DEVICE)


@contextmanager
def engine_of(model: Model, home: Path, path: str = "kernel", **options: Any) -> Iterator[Engine]:
    config = Config.load(
        host={"size": "64MiB", "pin": path != "pageable"},
        file={"path": home, "size": "256MiB", "deadline": "30s"},
        # Whole blocks only: behind a part of one a step computes other shapes, with other last bits.
        cache={"load_or_recompute": "load", "prefetch_deadline": "30s", "partial_blocks": False},
    )
    # Steps of one block: whatever was found, a token is computed in the same shapes, and its bits don't change.
    settings = {**SMALL, **options}
    with Engine(model, EngineConfig(**settings), LocalConnector.connect(config)) as engine:
        assert engine.pool.tensor.is_cuda == (DEVICE == "cuda")
        pinning = hierarchy_of(engine).host.region.pinning
        assert pinning is None or pinning.wait(60)
        yield engine


def cold(model: Model, tokens: list[int], **options: Any) -> Completion:
    settings = {**SMALL, **options}
    with Engine(model, EngineConfig(**settings, enable_prefix_caching=False)) as engine:
        return engine.generate([tokens], GREEDY)[0]


def hierarchy_of(engine: Engine) -> Any:
    assert isinstance(engine.connector, LocalConnector)
    return engine.connector.hierarchy


def settle(engine: Engine) -> None:
    assert engine.drain(30)
    assert hierarchy_of(engine).drain(30)


def from_file(engine: Engine) -> int:
    return int(hierarchy_of(engine).stats().get('kvtier_lookup_blocks_total{tier="file"}', 0))


def same(answer: Completion, expected: Completion) -> bool:
    bits = zip(answer.logits, expected.logits, strict=True)
    return answer.token_ids == expected.token_ids and all(np.array_equal(a, b) for a, b in bits)


@pytest.mark.parametrize("loading", ["async", "layerwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_greedy_text_is_the_same_from_every_tier(path: str, dtype: str, loading: str, disk_dir: Path) -> None:
    model, tokens = model_of("llama", dtype), prompt(1, 90)
    found = len(tokens) // BLOCK * BLOCK
    expected = cold(model, tokens)
    with engine_of(model, disk_dir, path, loading=loading) as engine:
        assert hierarchy_of(engine).host.region.pinned == (path != "pageable" and DEVICE == "cuda")
        [first] = engine.generate([tokens], GREEDY)
        assert (first.num_l1_tokens, first.num_external_tokens) == (0, 0)
        assert same(first, expected)
        settle(engine)
        for tier in ("l1", "l2", "file"):
            if tier != "l1":
                engine.pool.reset()
                engine.pool.tensor.fill_(7)  # what is not loaded shows
            if tier == "file":
                hierarchy_of(engine).host.pool.reset()
            [answer] = engine.generate([tokens], GREEDY)
            assert (answer.num_l1_tokens, answer.num_external_tokens) == ((found, 0) if tier == "l1" else (0, found))
            assert same(answer, expected), tier
            settle(engine)
        assert from_file(engine) == found // BLOCK
        hierarchy_of(engine).check()
        engine.pool.check()
    with engine_of(model, disk_dir, path, loading=loading) as engine:  # the next process: all of it from the slab
        [answer] = engine.generate([tokens], GREEDY)
        assert (answer.num_l1_tokens, from_file(engine)) == (0, found // BLOCK)
        assert same(answer, expected)


@pytest.mark.parametrize("family", ["qwen2-mixed", "qwen3", "mistral-window"])
def test_other_attention_kinds_too(family: str, disk_dir: Path) -> None:
    model, tokens = model_of(family, "float32"), prompt(2, 100)
    expected = cold(model, tokens)
    with engine_of(model, disk_dir) as engine:
        engine.generate([tokens[:70]], GREEDY)
        settle(engine)
        engine.pool.reset()
        [answer] = engine.generate([tokens], GREEDY)
        assert (answer.num_l1_tokens, answer.num_external_tokens) == (0, 64)
        assert same(answer, expected)


@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_many_requests_in_a_tight_l1(path: str, loading: str, disk_dir: Path) -> None:
    model = model_of("llama", "float32")
    shared = prompt(3, 64)
    prompts = [[*shared, *prompt(10 + i, 20 + 9 * i)] for i in range(8)]
    expected = [cold(model, tokens).token_ids for tokens in prompts]
    options = {"num_blocks": 24, "max_num_batched_tokens": 96, "loading": loading}
    with engine_of(model, disk_dir, path, **options) as engine:
        for _ in range(4):  # loads, stores and compute of many requests at once; other shapes, so other last bits
            answers = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
            assert [answer.token_ids for answer in answers] == expected
            settle(engine)
            engine.pool.check()
        assert engine.stats["external_tokens"] > 0


def test_exact_mode_gives_the_same_bits_however_a_prompt_is_cut(disk_dir: Path) -> None:
    model, tokens = model_of("llama", "float32"), prompt(4, 120)
    exact: dict[str, Any] = {"exact": True, "exact_rows": 128, "max_num_seqs": 4}
    expected = cold(model, tokens, **exact, max_num_batched_tokens=128)
    assert same(cold(model, tokens, **exact, max_num_batched_tokens=37), expected)
    with engine_of(model, disk_dir, **exact, max_num_batched_tokens=50) as engine:
        engine.generate([tokens[:70]], GREEDY)
        settle(engine)
        engine.pool.reset()
        [answer] = engine.generate([tokens], GREEDY)
        assert answer.num_external_tokens == 64
        assert same(answer, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_waits_for_the_device_only_to_read_its_tokens(
    temperature: float, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA itself warns of every call that waits: of those, a step has one for greedy tokens, one for drawn ones."""
    model = model_of("llama", "float32")
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=1)
    with engine_of(model, disk_dir, max_num_batched_tokens=256) as engine:
        engine.generate([prompt(1, 90)], params)  # kernels are loaded, memory is taken
        settle(engine)
        for number in range(4):
            engine.add_request(prompt(2 + number, 40), params)
        waits, sample = list[int](), ModelRunner.sample

        def sampled(self: ModelRunner, *arguments: Any) -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tokens = sample(self, *arguments)
            waits.append(sum("synchronizing" in str(each.message) for each in caught))
            return tokens

        monkeypatch.setattr(ModelRunner, "sample", sampled)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*synchronizing.*")
                while engine.has_unfinished:
                    engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert waits
        assert max(waits) <= (2 if temperature else 1)


@pytest.mark.parametrize("rule", ["deviation", "question"])
def test_segments_are_blended_on_the_device(rule: str) -> None:
    """Repairing everything is a full prefill; a share is computed, and what is copied is what the CPU copies."""
    model = model_of("llama", "float32")
    documents = [prompt(1, 64), prompt(2, 53)]
    tokens = [*prompt(3, 5), *documents[0], *documents[1], *prompt(4, 9)]
    segments = [Segment(5, 69), Segment(69, 122)]
    with Engine(model, EngineConfig(block_size=BLOCK, num_blocks=128)) as plain:
        [full] = plain.generate([tokens], GREEDY)
    with Engine(model, EngineConfig(block_size=BLOCK, num_blocks=128, segments="on")) as engine:
        [whole] = engine.generate([tokens], GREEDY, segments=[segments], repair=Repair(rule, 1.0))
        assert np.allclose(whole.logits[0], full.logits[0], atol=1e-2)
        [some] = engine.generate([tokens], GREEDY, segments=[segments], repair=Repair(rule, 0.25, max_deviation=9))
        assert (some.num_segment_tokens, some.num_repaired_tokens) == (112, 28)
        assert engine.stats["segments_held"] == 2

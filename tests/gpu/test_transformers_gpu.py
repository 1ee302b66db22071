"""transformers' generate() on a real device: what is stored from it, loaded to it and blended on it is a CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kv_tier_rig import GREEDY, Open, left_padded
from tiny_models import VOCAB, plain, plain_logits, prompt
from transformers import AutoModelForCausalLM, Lfm2Config

from kvtier.connector.models import cache_option
from kvtier.connector.segments import REPAIR_RULES, Repair, Segment
from kvtier.connector.transformers import device_copies
from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.blocks import Blocks
from kvtier.tiers.config.config import Config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CuPy's and the driver's own
]

ROWS = [prompt(5, 150), prompt(6, 150)]
DOCUMENTS = [prompt(1, 48), prompt(2, 64)]
PROMPT = [*prompt(8, 5), *DOCUMENTS[0], *DOCUMENTS[1], *prompt(9, 11)]
SEGMENTS = [Segment(5, 53), Segment(53, 117)]


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def pin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Staging of a few of these small blocks, so that a call takes many pieces."""
    monkeypatch.setattr(device_copies, "STAGING_BYTES", 64 << 10)
    return bool(request.param)


def tier(model: Any, directory: Path, pin: bool) -> KVTier:
    cache = {"block_size": 16, "load_or_recompute": "load", "prefetch_deadline": "60s"}
    file = {"path": str(directory), "size": "64MiB", "deadline": "60s"}
    kv = KVTier(model, Config.load(host={"size": "16MiB", "pin": pin}, file=file, cache=cache))
    region = kv._tiers.region
    assert region is not None
    device = kv._blocks._device
    assert device is not None
    if model.device.type == "cuda":
        assert device.connect(region)
        assert (region.pinning is not None) == pin
        assert region.pinning is None or region.pinning.wait(60)
    return kv


def tensors_of(cache: Any, num_tokens: int) -> list[torch.Tensor]:
    return [tensor[:, :, :num_tokens] for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral-window"])
def test_what_the_device_stored_comes_back_bit_for_bit_and_to_a_cpu_too(
    open_tier: Open, disk_dir: Path, kind: str, dtype: torch.dtype, pin: bool
) -> None:
    model: Any = plain(kind, dtype).to("cuda")
    tokens = torch.tensor(ROWS, device="cuda")
    with tier(model, disk_dir, pin) as kv:
        cache: Any = kv.load(tokens)[0]
        with torch.inference_mode():
            model(tokens, **cache_option(model, cache))
            expected = [tensor.clone() for tensor in tensors_of(cache, 144)]
            kv.store(tokens, cache)
            for tensor in tensors_of(cache, 150):
                tensor.fill_(7)  # the caller's own again
        loaded, num_tokens = kv.load(tokens)
        assert num_tokens == 144
        assert all(tensor.is_cuda for tensor in tensors_of(loaded, 144))
        assert all(map(torch.equal, tensors_of(loaded, 144), expected))
        assert kv.drain()
        kv._tiers.check()
    again = open_tier(model.cpu(), name=None)
    loaded, num_tokens = again.load(tokens.cpu())
    assert num_tokens == 144
    assert all(torch.equal(one, other.cpu()) for one, other in zip(tensors_of(loaded, 144), expected, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_are_those_without_kvtier_turn_after_turn(disk_dir: Path, kind: str, pin: bool) -> None:
    model: Any = plain(kind).to("cuda")
    texts = [prompt(3, 70), prompt(4, 101)]
    with tier(model, disk_dir, pin) as kv:
        for turn in range(4):
            batch = {name: tensor.cuda() for name, tensor in left_padded(texts).items()}
            expected = model.generate(**batch, **GREEDY)
            assert torch.equal(kv.generate(**batch, **GREEDY), expected)
            assert bool(kv.num_cached_tokens) == bool(turn)
            texts = [
                [*text, *row[-8:].tolist(), *prompt(9 + turn, 5)] for text, row in zip(texts, expected, strict=True)
            ]
        assert kv.drain()


def test_states_go_to_host_memory_beside_the_compute_and_come_back(disk_dir: Path, pin: bool) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    config = Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"], conv_L_cache=3, initializer_range=0.2)
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config).eval().to("cuda")
    tokens = torch.tensor(ROWS, device="cuda")
    expected = model.generate(tokens, **GREEDY)
    with tier(model, disk_dir, pin) as kv:
        for cached in (0, 144):
            assert torch.equal(kv.generate(tokens, **GREEDY), expected)
            assert kv.num_cached_tokens == cached


def test_a_gather_takes_no_memory_beside_its_staging(disk_dir: Path) -> None:
    """Blocks are views of the cache, and go through staging of a bounded size."""
    model: Any = plain("llama").to("cuda")
    tokens = torch.tensor(ROWS, device="cuda")
    with tier(model, disk_dir, True) as kv, torch.inference_mode():
        cache: Any = kv.load(tokens)[0]
        model(tokens, **cache_option(model, cache))
        torch.cuda.synchronize()
        before, taken = torch.cuda.memory_allocated(), list[int]()
        real = Blocks.read

        def read(blocks: Blocks, *arguments: Any) -> None:
            real(blocks, *arguments)
            taken.append(torch.cuda.memory_allocated() - before)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Blocks, "read", read)
            kv.store(tokens, cache)
        assert taken
        assert max(taken) <= 0


def test_segments_are_stored_from_the_device_and_blended_on_it(disk_dir: Path) -> None:
    model: Any = plain("qwen3").to("cuda")
    file = {"path": str(disk_dir), "size": "64MiB", "deadline": "60s"}
    cache = {"segments": "on", "segment_min_tokens": 16, "block_size": 16}
    cache |= {"load_or_recompute": "load", "prefetch_deadline": "60s"}
    config = Config.load(host={"size": "8MiB"}, file=file, cache=cache)
    tokens = torch.tensor([PROMPT], device="cuda")
    full = plain_logits(plain("qwen3"), PROMPT)[-1]
    for outcome in ("computed", "loaded"):
        with KVTier(model, config) as kv:
            cached, num_tokens = kv.load(tokens, segments=SEGMENTS, repair=Repair(share=1.0))
            with torch.inference_mode():
                found = model(tokens[:, num_tokens:], **cache_option(model, cached)).logits[0, -1]
            assert torch.allclose(found.cpu(), full, atol=1e-3 * float(full.abs().max()))
            assert kv.stats()[f"segments_{outcome}"] == 2
            for rule in REPAIR_RULES:
                kv.generate(tokens, segments=SEGMENTS, repair=Repair(rule, 0.25, max_deviation=9), max_new_tokens=4)
                assert (kv.num_segment_tokens, kv.num_repaired_tokens) == (112, 28)
            assert kv.drain()

"""What nothing names is refused in one line, and generated as ever: odd weights, images. And threads take turns."""

import logging
import re
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from at_once import at_once
from kv_tier_rig import Open, hits
from tiny_models import SIZES, plain, prompt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
)

from kvtier.connector.models import cache_option
from kvtier.connector.models.hf_model import weights_of
from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.calls import other_tokens
from kvtier.engine.model import Model
from kvtier.tiers import ConfigError
from kvtier.tiers.config import Config

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
IMAGE = 5  # the token that stands for one


class Halved(torch.Tensor):
    """As a quantiser's tensor: other numbers than it has bytes, and no storage of its own."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> "Halved":
        made: Halved = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.whole = whole
        return made

    whole: torch.Tensor

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        def opened(each: Any) -> Any:
            return each.whole / 2 if isinstance(each, Halved) else each

        made = function(*tree_map(opened, arguments), **tree_map(opened, options or {}))
        return Halved(made * 2) if function is torch.ops.aten.detach.default else made


def wrapped(model: Any) -> Any:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(Halved(layer.weight.detach()), requires_grad=False)
    return model


def quantized(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def offloaded(model: Any) -> Any:
    """As accelerate leaves a layer whose weights are on the disk, until its hooks bring them."""
    layer = model.model.layers[1].mlp
    kept = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    layer.to("meta")

    def bring(module: Any, arguments: Any) -> None:
        for name, weight in kept.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(weight, requires_grad=False))

    def take(module: Any, arguments: Any, output: Any) -> None:
        module.to("meta")

    layer.register_forward_pre_hook(bring)
    layer.register_forward_hook(take)
    return model


def sparse(model: Any) -> Any:
    model.register_buffer("mask", torch.eye(4).to_sparse())
    return model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wrapped, r"weight 'model\.layers\.1\.mlp\.up_proj\.weight': a [\w.]*Halved, of which no bytes are known"),
        (quantized, r"_packed_params.*: a torch.dtype, of which no bytes are known.*load the model unquantised"),
        (offloaded, r"weight 'model\.layers\.1\.mlp\.gate_proj\.weight': on the meta device.*whole model into memory"),
        (sparse, r"weight 'mask': torch\.sparse_coo, torch\.float32, of which no plain bytes are there"),
    ],
)
def test_weights_without_bytes_are_refused_by_name_and_the_model_generates_as_ever(
    open_tier: Open, caplog: pytest.LogCaptureFixture, change: Any, told: str
) -> None:
    model = change(plain("llama"))
    tokens = torch.tensor([prompt(1, 60)])
    with torch.inference_mode():
        expected = model.generate(tokens, **GREEDY)
        kv = open_tier(model)
        for _ in range(2):
            assert hits(kv, tokens, expected, GREEDY) == 0
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("nothing is kept of this model: ")
    with pytest.raises(ConfigError, match=told):
        weights_of(model)
    with pytest.raises(ConfigError, match=told):
        Model(model, "m")


def test_a_rank_of_a_divided_model_is_refused() -> None:
    model: Any = plain("llama")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer, mesh = model.model.layers[1].mlp.up_proj, init_device_mesh("cpu", (1,))
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ConfigError, match=r"up_proj\.weight': a [\w.]*DTensor, .* in one process, without tp_plan"):
            weights_of(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def seeing() -> Any:
    """A model that takes images; four tokens stand for one."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(**SIZES)
    parts: dict[str, Any] = {"vision_config": vision.to_dict(), "text_config": text.to_dict()}
    config = LlavaConfig(**parts | {"image_token_id": IMAGE, "vision_feature_layer": -1})
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


def without_images(length: int, seed: int = 1) -> list[int]:
    return [token if token != IMAGE else IMAGE + 1 for token in prompt(seed, length)]


def test_own_loops_get_and_keep_nothing_of_prompts_whose_images_they_do_not_show(
    open_tier: Open, seeing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_tier(seeing)
    ids = torch.tensor([[1, *[IMAGE] * 4, *without_images(90)]])
    images = [torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with torch.inference_mode():
        # generate() sees what it computes with: the bare tokens are a text like any other
        bare = kv.generate(ids, **GREEDY)
        kv.generate(ids, **GREEDY)
        assert kv.num_cached_tokens == 80
        assert torch.equal(kv.generate(ids, **GREEDY), bare)
        # an own loop, with one image and then another
        for image in images:
            cache, num_tokens = kv.load(ids)
            assert num_tokens == 0
            seeing(ids, pixel_values=image, **cache_option(seeing, cache))
            kv.store(ids, cache)
    assert kv.load(ids)[1] == 0
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    [line] = lines
    assert re.fullmatch(
        r"nothing is loaded or kept of such a call: token 5 \(image_token_\w+\) stands for what load\(\) and store\(\) "
        r"are not shown; let generate\(\) compute such prompts, or pass those without images, sound and video",
        line,
    )
    # nothing of it took the place of the bare tokens' KV, and texts go the old way
    assert torch.equal(kv.generate(ids, **GREEDY), bare)
    text = torch.tensor([without_images(90, seed=2)])
    cache, _ = kv.load(text)
    with torch.inference_mode():
        seeing(text, **cache_option(seeing, cache))
    kv.store(text, cache)
    assert kv.load(text)[1] == 80


def with_rope_of_images() -> Any:
    """A model that keeps of an image how far it moved later positions, and renews that without a cache alone."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 14, "fullatt_block_indexes": [0], "window_size": 112,
    }  # fmt: skip
    text = {**SIZES, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 220}
    tokens = {"image_token_id": 211, "video_token_id": 212, "vision_start_token_id": 213, "vision_end_token_id": 214}
    torch.manual_seed(0)
    config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def test_what_an_image_left_in_the_model_does_not_reach_a_text(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_rope_of_images()
    ids = torch.tensor([[1, 9, 213, *[211] * 4, 214, *prompt(1, 30)]])
    pixels = torch.randn(16, 1176, generator=torch.Generator().manual_seed(1))
    image = {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 211).int(),
    }
    first, longer = (torch.tensor([[*prompt(4, 70), *prompt(5, length)]]) for length in (0, 60))
    with torch.inference_mode():
        seen, expected = (model.generate(text, **GREEDY, **more) for text, more in ((ids, image), (longer, {})))
        model.generate(ids, **GREEDY, **image)  # left before there are tiers
        kv = open_tier(model)
        kv.generate(first, **GREEDY)
        assert torch.equal(kv.generate(ids, **GREEDY, **image), seen)
        for found in (64, 128):  # behind what was kept, and behind what was kept so
            assert hits(kv, longer, expected, GREEDY) == found
            assert model.model.rope_deltas.tolist() == [[0]]  # as of any text
            model.generate(ids, **GREEDY, **image)
        # own loops: `load` takes away what is left, and what comes back before a pass shows
        cache, num_tokens = kv.load(longer)
        assert num_tokens == 128
        own = model(longer[:, num_tokens:], **cache_option(model, cache)).logits[:, -1]
        assert torch.allclose(own, model(longer).logits[:, -1], atol=1e-3)
        for is_loaded in (True, False):
            other = torch.tensor([prompt(6 + is_loaded, 70)])
            cache = kv.load(other)[0] if is_loaded else DynamicCache()
            model(other[:, :40], **cache_option(model, cache))
            model.generate(ids, **GREEDY, **image)
            model(other[:, 40:], **cache_option(model, cache))
            if is_loaded:
                model.generate(first, **GREEDY)  # as if nothing had been: only the passes told
            kv.store(other, cache)
            assert kv.load(other)[1] == 0
    assert "the model has rope_deltas of another call; call load() for this text before its passes" in caplog.text


def test_a_model_that_keeps_anything_else_of_a_call_is_left_alone(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = plain("llama")
    model.model.layers[1].seen = None
    kv, tokens = open_tier(model), torch.tensor([prompt(1, 60)])
    kv.generate(tokens, **GREEDY)
    for value, found in ((torch.ones(3), 0), (torch.zeros(3), 48), (None, 48)):
        model.model.layers[1].seen = value
        kv.generate(tokens, **GREEDY)
        assert kv.num_cached_tokens == found
        assert model.model.layers[1].seen is value
    assert "the model has seen of another call; set it to None, as it was at the start" in caplog.text


def test_tokens_that_stand_for_images_sound_and_video_are_known_by_their_configuration(seeing: Any) -> None:
    assert set(other_tokens(seeing.config) or {}) == {IMAGE}
    assert other_tokens(plain("llama").config) == {}
    several: Any = Qwen2VLConfig(image_token_id=7, video_token_id=8, vision_start_token_id=9, vision_end_token_id=10)
    assert set(other_tokens(several) or {}) == {7, 8, 9, 10}
    # a part for something else, and no word about its tokens: any text may have some
    without: dict[str, Any] = {"image_token_id": None}
    silent: Any = LlavaConfig(**without)
    assert other_tokens(silent) is None


def test_threads_take_turns_and_each_gets_its_own_text(open_tier: Open) -> None:
    model: Any = plain("llama")
    tokens = [torch.tensor([prompt(seed, 80)]) for seed in range(3)]
    with torch.inference_mode():
        expected = [model.generate(each, **GREEDY) for each in tokens]
    kv, wrong = open_tier(model), []

    def work(first: int) -> None:
        for turn in range(4):
            number = (first + turn) % 3
            if turn == 2:
                loaded, num_tokens = kv.load(tokens[number])
                if loaded.get_seq_length() != num_tokens:
                    wrong.append(number)
            elif not torch.equal(kv.generate(tokens[number], **GREEDY), expected[number]):
                wrong.append(number)

    at_once(*(partial(work, first) for first in range(3)))
    assert not wrong
    for each, text in zip(tokens, expected, strict=True):
        assert hits(kv, each, text, GREEDY) == 64


def test_while_a_call_runs_nobody_makes_another_tier_over_its_model(open_tier: Open) -> None:
    model: Any = plain("llama")
    kv, tokens = open_tier(model), torch.tensor([prompt(1, 60)])

    def make() -> None:
        with KVTier(model, Config.load(host={"size": "4MiB"}, cache={"block_size": 16})):
            made.set()

    for _ in range(2):
        made, maker = threading.Event(), threading.Thread(target=make)

        def meanwhile(
            input_ids: torch.Tensor, scores: torch.Tensor, made: threading.Event = made, maker: threading.Thread = maker
        ) -> torch.Tensor:
            if maker.ident is None:
                maker.start()
            assert not made.wait(0.05)
            return scores

        kv.generate(tokens, logits_processor=[meanwhile], **GREEDY)
        assert made.wait(30)
        maker.join(30)
        kv.close()  # without tiers it generates as ever, and in turn

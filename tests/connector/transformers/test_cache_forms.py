"""Stories of KVTier with every form of cache: K and V of one shape, MLA, indexer keys, layers that differ or share."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from _architectures import ARCHITECTURES
from extent import brief
from kv_tier_rig import Open, hits, restarted
from transformers import AutoModelForCausalLM, DynamicCache

from kvtier.connector.models import cache_option
from kvtier.connector.models.hf_model import identity_of
from kvtier.connector.transformers import cache_form
from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming import KVShape

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ROWS = {row.name: row for row in ARCHITECTURES}
EVEN = ["llama", "qwen3", "mistral", "gemma3"]  # K and V of one shape, windows nowhere, in all layers or in some
LATENT = ["deepseek-v2", "deepseek-v3", "minicpm3", "longcat-flash", "glm4-moe-lite"]  # one latent a token
INDEXED = ["deepseek-v3.2", "glm-moe-dsa"]  # and a key of the indexer
SHARING = ["gemma3n", "gemma4-shared"]  # the last two of four layers read what others keep
FORMS = [*EVEN, *LATENT, *INDEXED, *SHARING, "gemma4", "mimo-v2-flash"]
SHOWN = brief(["llama", "mistral", "deepseek-v3", "deepseek-v3.2", "gemma4-shared"], FORMS)  # one of each class


@cache
def model_of(name: str) -> Any:
    lacks = name in INDEXED and int(transformers.__version__.split(".")[1]) < 19
    if lacks or ROWS[name].make_config() is None:
        pytest.skip(f"transformers {transformers.__version__} lacks {name}")
    return ROWS[name].make_model()


def prompt(seed: int, length: int) -> torch.Tensor:
    return torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(seed))


def tensors(one: DynamicCache, num_tokens: int) -> dict[str, torch.Tensor]:
    """All that a cache holds of its first tokens, by layer and name."""
    held = {}
    layers: Any = one.layers
    for number, layer in enumerate(layers):
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                held[f"{number}.{name}"] = tensor[..., :num_tokens, :]
    return held


def computed(kv: KVTier, tokens: torch.Tensor) -> DynamicCache:
    """What the model caches of the tokens, in a cache that `load` made."""
    cache = kv.load(tokens)[0]
    with torch.inference_mode():
        kv.model(tokens[:, cache.get_seq_length() :], **cache_option(kv.model, cache))
    return cache


def slots_of(kv: KVTier, tokens: torch.Tensor) -> torch.Tensor:
    """What the tiers hold of the tokens, `[num_blocks, num_elements]`."""
    [row] = kv._rows(tokens)
    blocks = kv._blocks.load(row.chain.hashes)
    slots = torch.empty(len(blocks), kv._form.num_elements)
    blocks.read(slots, kv._form, range(len(blocks)))
    return slots


@pytest.mark.parametrize("name", SHOWN)
def test_a_prompt_is_found_by_the_next_call_and_after_a_restart(open_tier: Open, name: str) -> None:
    model = model_of(name)
    tokens = prompt(1, 90)
    expected = model.generate(tokens, **GREEDY)
    # The answer depends on the prompt, and on more of it than its last block.
    answers = {
        tuple(model.generate(each, **GREEDY)[0, 90:].tolist())
        for each in (tokens, prompt(2, 90), torch.cat([prompt(2, 80), tokens[:, 80:]], dim=1))
    }
    assert len(answers) == 3
    kv = open_tier(model)
    for num_cached in (0, 80):
        assert hits(kv, tokens, expected, GREEDY) == num_cached
    turn = torch.cat([expected, prompt(3, 9)], dim=1)
    assert hits(kv, turn, options=GREEDY) == 96
    again = restarted(kv, open_tier)
    assert hits(again, tokens, expected, GREEDY) == 80
    stats = again.stats()
    assert stats['kvtier_lookup_blocks_total{tier="file"}'] == 5
    assert stats['kvtier_bytes_total{tier="l2",direction="load"}'] == 5 * again._form.block_bytes


@pytest.mark.parametrize("dtype", brief([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", SHOWN)
def test_what_is_loaded_is_what_was_stored_bit_for_bit(open_tier: Open, name: str, dtype: torch.dtype) -> None:
    model = model_of(name)
    if dtype != torch.float32:
        model = ROWS[name].make_model().to(dtype)
    tokens = torch.cat([prompt(1, 70), prompt(2, 70)])
    kv = open_tier(model)
    stored = computed(kv, tokens)
    kv.store(tokens, stored)
    again = restarted(kv, open_tier)
    loaded, num_cached = again.load(tokens)
    assert num_cached == 64
    held, expected = tensors(loaded, 64), tensors(stored, 64)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], expected[key]) for key in held)
    # The rest is computed upon it.
    with torch.inference_mode():
        rest = model(tokens[:, 64:], **cache_option(model, loaded)).logits[:, -1]
        whole = model(tokens).logits[:, -1]
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert torch.allclose(whole, rest, atol=bound * whole.abs().max().item())
    # A row nobody knows: all rows start where the least known one does.
    assert again.load(torch.cat([prompt(1, 70), prompt(5, 70)]))[1] == 0
    assert len({tuple(tensor.flatten().tolist()) for tensor in expected.values()}) == len(
        expected
    )  # none could be swapped
    layers: Any = loaded.layers
    kept = {number for number, layer in enumerate(layers) if layer.keys is not None and layer.keys.numel()}
    assert kept == ({0, 1} if name in SHARING else {0, 1, 2, 3})


@pytest.mark.parametrize("name", ["deepseek-v3.2", "gemma4", "mimo-v2-flash"])
def test_a_block_holds_layer_by_layer_what_each_keeps(open_tier: Open, name: str) -> None:
    kv = open_tier(model_of(name))
    tokens = prompt(1, 70)
    stored: Any = computed(kv, tokens)
    kv.store(tokens, stored)
    blocks = slots_of(kv, tokens)
    offset = 0
    for layer in stored.layers:
        pieces = [layer.keys, layer.values]
        if name == "deepseek-v3.2":
            pieces = [torch.cat(pieces, dim=-1), layer.indexer_keys[:, None]]
        for tensor in pieces:
            first = tensor[0, :, 16:32].transpose(0, 1).flatten()  # tokens, heads, dim of the second block
            assert torch.equal(blocks[1, offset : offset + len(first)], first)
            offset += len(first)
    assert offset == blocks.shape[1] == kv._form.block_bytes // 4
    assert kv._form.shape is None


def test_models_of_one_shape_keep_their_names_and_their_blocks() -> None:
    """Slabs that were written before other forms were kept stay readable."""
    for name, num_heads in (("llama", 2), ("gemma3", 2), ("falcon", 4), ("bloom", 4), ("llava", 2)):
        model = model_of(name)
        form, shape = CacheForm.of(model, 16), KVShape(4, num_heads, 32, 16, "float32")
        assert form.shape == shape
        assert form.block_bytes == shape.block_bytes
        identity = identity_of(model, "m", shape, hash_scheme="sha256", epoch=0)
        assert form.named(identity) == identity_of(model, "m", form.outline, hash_scheme="sha256", epoch=0) == identity


def test_the_identity_names_what_every_layer_keeps() -> None:
    def named(name: str) -> Any:
        form = CacheForm.of(model_of(name), 16)
        return form.named(identity_of(model_of(name), "m", form.outline, hash_scheme="sha256", epoch=0))

    latent, indexed, differing, sharing = (named(n) for n in ("deepseek-v3", "deepseek-v3.2", "gemma4", "gemma3n"))
    assert (latent.kind, latent.num_kv_heads, latent.head_dim) == ("mla", 1, 576)
    assert latent.forms == ("1(keys:512+values:64)",) * 4
    assert indexed.kind == "mla"
    assert indexed.forms == ("1(keys:512+values:64)/1(indexer_keys:128)",) * 4
    assert differing.kind == "full"
    assert differing.forms == ("2(keys:32)/2(values:32)", "2(keys:64)/2(values:64)") * 2
    assert (sharing.layers, sharing.forms) == ((0, 1), None)  # canonical blocks of two layers


def test_a_cache_of_another_form_is_not_kept(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    kv = open_tier(model_of("deepseek-v3.2"))
    tokens = prompt(1, 70)
    stored: Any = computed(kv, tokens)
    stored.layers[2].indexer_keys = stored.layers[2].indexer_keys[:, :-1]
    kv.store(tokens, stored)
    assert "nothing is kept of a cache that dropped tokens or has another shape" in caplog.text
    other = DynamicCache()
    with torch.inference_mode():
        model_of("llama")(tokens, **cache_option(model_of("llama"), other))
    kv.store(tokens, other)
    assert kv.load(tokens)[1] == 0
    assert kv.stats()['kvtier_store_dropped_total{tier="l2",reason="unsupported"}'] == 8


def test_a_layer_that_keeps_more_than_blocks_hold_is_named() -> None:
    """DeepSeek V4 compresses several tokens into one entry."""
    kind = getattr(transformers, "DeepseekV4Config", None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} lacks it")
    config = kind(
        vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        head_dim=32, q_lora_rank=32, o_lora_rank=32, o_groups=2, n_routed_experts=4, num_experts_per_tok=2,
        index_n_heads=2, index_head_dim=32, qk_rope_head_dim=16, mlp_layer_types=["moe"] * 2,
    )  # fmt: skip
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with pytest.raises(
        ConfigError, match=r"model kind 'deepseek_v4': .*; docs/models.md lists the models that are kept"
    ):
        CacheForm.of(model, 16)


def test_what_modules_keep_beside_the_cache_is_named() -> None:
    """As GLM-5's indexer did in transformers 5.6: blocks would lack its keys."""
    model = ROWS["llama"].make_model()

    def keep(module: Any, given: Any, output: torch.Tensor) -> None:
        module._cached_keys = output

    model.model.layers[1].self_attn.k_proj.register_forward_hook(keep)
    with pytest.raises(ConfigError, match="keep _cached_keys beside its cache; install a newer transformers, or leave"):
        CacheForm.of(model, 16)


def test_indexers_that_see_the_future_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_form, "version", "5.12.1")
    with pytest.raises(ConfigError, match=r"transformers 5\.12\.1 selects wrong tokens .*; install 5\.19 or newer"):
        CacheForm.of(model_of("deepseek-v3.2"), 16)


def test_segments_are_refused_where_layers_differ(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match="layers whose K and V differ in shape; models built as Llama"):
        open_tier(model_of("gemma4"), segments="on")

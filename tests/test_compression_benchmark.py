"""Stories of benchmarks/compression.py: blocks are a model's KV, a row follows from its rates, a store keeps less."""

from pathlib import Path

import compression
import numpy as np
import pytest
import torch
from object_rig import ObjectServer
from redis_rig import NO_REDIS, standalone
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.tiers.compression import made_up_kv

TOKENS = list(range(2 * compression.BLOCK_SIZE + 3))  # what does not fill a block is left out


def test_blocks_are_the_models_kv_in_the_canonical_layout() -> None:
    shape = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=256,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(shape)
    blocks = compression.blocks_of(model, TOKENS, torch.float32)
    assert blocks.shape == (2, 3 * 2 * compression.BLOCK_SIZE * 2 * 8 * 4)
    with torch.no_grad():
        cache = model(torch.tensor([TOKENS]), use_cache=True).past_key_values
    second = blocks[1].view(np.float32).reshape(3, 2, compression.BLOCK_SIZE, 2, 8)
    values = cache.layers[2].values[0].numpy()  # [heads, tokens, head_dim]
    assert np.array_equal(second[2, 1, 5], values[:, compression.BLOCK_SIZE + 5])


@pytest.mark.skipif(not compression.FIXTURE.exists(), reason="the trained model is not beside this checkout")
def test_rows_of_answers_tell_exact_kv_from_others() -> None:
    exact, scaled, cast = compression.answers(quick=True)
    assert (exact["KL, most"], exact["logits apart, most"], exact["as exact"]) == (0, 0, 1)
    for row in (scaled, cast):
        assert 0 < float(str(row["KL, mean"])) < float(str(row["KL, most"])) < 0.1
        assert float(str(row["right"])) > 0.9


def test_a_bucket_keeps_less_of_what_is_compressed_also_if_it_is_encrypted(s3: ObjectServer, tmp_path: Path) -> None:
    blocks = np.frombuffer(made_up_kv(8 * 262_144), np.uint8).reshape(8, -1)
    rows = compression.over_objects(s3, blocks, tmp_path)
    plain, shorter, hidden = (float(str(row["KiB in a bucket"])) for row in rows)
    assert 256 < plain < 260
    assert shorter <= hidden < 0.8 * plain


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_a_server_keeps_less_of_what_is_compressed() -> None:
    blocks = np.frombuffer(made_up_kv(8 * 262_144), np.uint8).reshape(8, -1)
    with standalone() as server:
        plain, shorter = (compression.over_redis(server, blocks, how, 1) for how in ("none", "zstd"))
        packed = compression.over_redis(server, blocks, "none", 1, fp8=True)
    assert float(str(packed["KiB kept a block"])) < 0.9 * float(str(plain["KiB kept a block"]))
    assert (plain["[cache] lossy"], packed["[cache] lossy"]) == ("none", "fp8")
    assert float(str(shorter["KiB kept a block"])) < 0.9 * float(str(plain["KiB kept a block"]))
    assert min(float(str(row[verb])) for row in (plain, shorter) for verb in ("SET GB/s", "GET GB/s")) > 0

"""`[cache] lossy`: an identity of its own for KV that can be kept so, one line of refusal for any other."""

from dataclasses import replace
from typing import Any

import pytest

from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.identity import ModelIdentity, config_digest, with_lossy

IDENTITY = ModelIdentity(
    model="tiny", revision="ab" * 20, config_digest=config_digest({}), dtype="bfloat16", kv_dtype="bfloat16",
    compute_dtype="bfloat16", num_kv_heads=2, head_dim=96, block_size=16, layers=(0, 1),
)  # fmt: skip
BLOCK_BYTES = 2 * 2 * 16 * 2 * 96 * 2


def test_it_is_another_identity_and_off_it_is_the_same() -> None:
    assert with_lossy(IDENTITY, "none", BLOCK_BYTES) is IDENTITY
    lossy = with_lossy(IDENTITY, "fp8", BLOCK_BYTES)
    assert lossy == replace(IDENTITY, lossy="fp8-e4m3/bfloat16/32")
    assert lossy.fingerprint() != IDENTITY.fingerprint()
    assert (lossy.shown()["lossy"], "lossy" in IDENTITY.shown()) == ("fp8-e4m3/bfloat16/32", False)


@pytest.mark.parametrize(("head_dim", "group"), [(8, 8), (80, 16), (64, 64), (128, 128), (512, 128), (576, 64)])
def test_a_scale_is_for_numbers_of_one_head(head_dim: int, group: int) -> None:
    identity = replace(IDENTITY, head_dim=head_dim, kv_dtype="float32")
    assert with_lossy(identity, "fp8", 16 * head_dim * 4).lossy == f"fp8-e4m3/float32/{group}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_dtype": "fp8_e4m3/uint8/fp8"}, "kv_dtype 'fp8_e4m3/uint8/fp8' is none of float32, bfloat16, float16"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is none of"),
        ({"kind": "mla"}, "kind 'mla': latents and recurrent states bear no such loss"),
        ({"kind": "state"}, "kind 'state': "),
        ({"forms": ("2(keys:8)",) * 2}, r"forms '2\(keys:8\)', …: its layers keep something else"),
        ({"compute_dtype": "bfloat16/exact-256"}, "compute_dtype 'bfloat16/exact-256': exact mode promises"),
        ({"head_dim": 100}, "head_dim 100: no groups of 8 numbers or more fill it"),
    ],
)
def test_other_kv_is_refused_in_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf'^\[cache\] lossy "fp8": {said}.*; leave it out$'):
        with_lossy(replace(IDENTITY, **change), "fp8", BLOCK_BYTES)


def test_what_an_engine_says_of_its_blocks_counts_too() -> None:
    with pytest.raises(ConfigError, match=r'lossy "fp8": a draft model is there; leave it out'):
        with_lossy(IDENTITY, "fp8", BLOCK_BYTES, unlike="a draft model is there")
    with pytest.raises(ConfigError, match="head_dim 96"):
        with_lossy(IDENTITY, "fp8", BLOCK_BYTES + 2)

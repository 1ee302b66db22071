"""Model identities: every field counts, equal models agree, and what cannot be right is refused by name."""

import hashlib
from dataclasses import fields, replace
from itertools import product
from typing import Any

import msgpack
import numpy as np
import pytest

from kvtier.tiers.errors import ConfigError, FormatError
from kvtier.tiers.naming.identity import ModelIdentity, config_digest
from kvtier.tiers.naming.kv_probe import PROBE_BYTES, TOLERANCES, KVProbe

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "eos_token_id": [1, 2],
}
IDENTITY = ModelIdentity(
    model="tiny",
    revision="0123456789abcdef0123456789abcdef01234567",
    config_digest=config_digest(CONFIG),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    compute_dtype="bfloat16",
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    layers=(0, 1),
)
# Frozen when the format was: a change leaves every slab behind.
GOLDEN_CONFIG = "154b4d5d18a6f2ea3211bf24d9243f84d6cc8c01bb08c890d280f8d788c3a295"
GOLDEN = "21e5a53007f105c3eb4dbd464b6949aa217c0cf44db5434d13205cf8118ed0ff"

CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "sha256:" + "ab" * 32},
    "config_digest": {"config_digest": "0" * 64},
    "dtype": {"dtype": "float16"},
    "kv_dtype": {"kv_dtype": "fp8_e4m3"},
    "compute_dtype": {"compute_dtype": "float32"},
    "num_kv_heads": {"num_kv_heads": 4},
    "head_dim": {"head_dim": 16},
    "block_size": {"block_size": 32},
    "layers": {"layers": (0, 2)},
    "kv_scales": {"kv_scales": (1.0, 0.5)},
    "quantization": {"quantization": "awq-4bit-128"},
    "rope_factor": {"rope_factor": 2.0},
    "kind": {"kind": "mla"},
    "window": {"kind": "sliding", "window": 64},
    "tp_ranks": {"tp_size": 2, "tp_ranks": (1, 2)},
    "tp_size": {"tp_size": 2},
    "pp_stages": {"pp_size": 2, "pp_stages": (1, 2)},
    "pp_size": {"pp_size": 2},
    "forms": {"forms": ("2(keys:8)/2(values:4)",) * 2},
    "lossy": {"lossy": "fp8-e4m3/bfloat16/8"},
    "apart": {"apart": 1},
    "layout": {"layout": "layer-first"},
    "hash_scheme": {"hash_scheme": "xxh3"},
    "format_version": {"format_version": 3},
    "epoch": {"epoch": 1},
}


def test_every_field_changes_the_fingerprint() -> None:
    assert set(CHANGES) == {field.name for field in fields(ModelIdentity)} - {"model"}
    prints = [IDENTITY.fingerprint(), *(replace(IDENTITY, **change).fingerprint() for change in CHANGES.values())]
    prints.append(replace(IDENTITY, kind="sliding", window=128).fingerprint())
    assert len(set(prints)) == len(prints)
    assert {len(name) for name in prints} == {32}


def test_what_people_call_a_model_is_no_part_of_its_name() -> None:
    assert replace(IDENTITY, model="a copy of tiny").fingerprint() == IDENTITY.fingerprint()


def test_no_two_quantisations_share_a_name() -> None:
    """Of KV, as the vLLM connector calls it, with scales of its own; of weights, by settings or by the checkpoint."""
    kv = ["bfloat16", "float8_e4m3fn", "fp8/uint8/torch.float8_e4m3fn", "fp8/uint8/torch.float8_e4m3fnuz"]
    kv += [
        "fp8_e5m2/uint8/torch.float8_e4m3fn",
        "fp8_e4m3/uint8/torch.float8_e4m3fn",
        "nvfp4/uint8/torch.float8_e4m3fn",
    ]
    scales = [None, (1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0,)]
    weights = [None, "fp8", "awq", "hqq {'nbits': 4}", "hqq {'nbits': 8}"]
    checkpoints = [{}, {"quantization_config": {"bits": 4}}, {"quantization_config": {"bits": 8}}]
    names = [
        replace(
            IDENTITY, kv_dtype=dtype, kv_scales=scale, quantization=weight, config_digest=config_digest(CONFIG | given)
        ).fingerprint()
        for dtype, scale, weight, given in product(kv, scales, weights, checkpoints)
    ]
    assert len(set(names)) == len(names) == 525


def test_golden_fingerprint() -> None:
    assert config_digest(CONFIG) == GOLDEN_CONFIG
    assert IDENTITY.fingerprint().hex() == GOLDEN


def test_equal_identities_agree() -> None:
    assert replace(IDENTITY).fingerprint() == IDENTITY.fingerprint()
    whole = replace(IDENTITY, rope_factor=2)
    assert whole.fingerprint() == replace(IDENTITY, rope_factor=2.0).fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": "main"}, "revision 'main': give the commit or the digest"),
        ({"revision": ""}, "revision '': give"),
        ({"revision": "v1.0"}, "a branch's name may move"),
        ({"config_digest": "abc"}, r"config_digest 'abc': give the result of config_digest\(\)"),
        ({"model": ""}, "model '': give its name"),
        ({"hash_scheme": ""}, "hash_scheme '': give its name"),
        ({"kind": "linear"}, "kind 'linear': use one of full, sliding, mla, state"),
        ({"kind": "sliding"}, "window None: kind 'sliding'"),
        ({"window": 64}, "window 64: kind 'full'"),
        ({"kind": "sliding", "window": 0}, "window 0: must be at least 1"),
        ({"layers": ()}, r"layers \(\): name"),
        ({"layers": (1, 0)}, "in ascending order"),
        ({"layers": (0, 0)}, "in ascending order"),
        ({"layers": (-1, 0)}, "in ascending order"),
        ({"block_size": 0}, "block_size 0: must be at least 1"),
        ({"epoch": -1}, "epoch -1: must be at least 0"),
        ({"tp_ranks": (0, 2)}, r"tp_ranks \(0, 2\): give a half-open range within the 1"),
        ({"pp_stages": (1, 1), "pp_size": 2}, r"pp_stages \(1, 1\): give"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(IDENTITY, **change)


def test_a_config_has_many_spellings_and_one_digest() -> None:
    same: list[dict[str, object]] = [
        dict(reversed(CONFIG.items())),
        {**CONFIG, "rope_theta": 10000, "eos_token_id": (1, 2)},
        {**CONFIG, "rope_scaling": None, "sliding_window": None},
        {**CONFIG, "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "_name_or_path": "/models/tiny"},
        {**CONFIG, "dtype": "bfloat16", "transformers_version": "5.0.0", "use_cache": False},
    ]
    assert {config_digest(config) for config in same} == {config_digest(CONFIG)}
    # the same holds for a model inside a model
    inner, renamed = {"text_config": CONFIG}, {"text_config": {**CONFIG, "_name_or_path": "x", "dtype": "float32"}}
    assert config_digest(inner) == config_digest(renamed)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 65},
        {"rope_theta": 10000.5},
        {"eos_token_id": [2, 1]},
        {"tie_word_embeddings": True},
        {"text_config": {"hidden_size": 1}},
        {"quantization_config": {"dtype": "int8"}},
    ],
)
def test_what_differs_differs(change: dict[str, object]) -> None:
    assert config_digest({**CONFIG, **change}) != config_digest(CONFIG)


def test_values_no_json_would_hold() -> None:
    assert config_digest({"a": 10**30}) == config_digest({"a": 1e30})
    assert config_digest({"a": {"y", "x"}}) == config_digest({"a": ["x", "y"]})
    assert config_digest({"labels": {0: "no"}}) == config_digest({"labels": {"0": "no"}})
    assert config_digest({"a": True}) != config_digest({"a": 1})
    with pytest.raises(TypeError, match=r"config\.a\[1\]\.b: no way to digest a object"):
        config_digest({"a": [1, {"b": object()}]})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_parameters": {"rope_type": "not heard of yet"}},
        {"rope_parameters": {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}},
        {"text_config": {"rope_scaling": {"type": "su"}}},
    ],
)
def test_rope_that_depends_on_the_length_needs_its_factor(rope: dict[str, object]) -> None:
    digest = config_digest({**CONFIG, **rope})
    with pytest.raises(ConfigError, match="rope_factor None: this model's RoPE depends on the text's length"):
        replace(IDENTITY, config_digest=digest)
    two, four = (replace(IDENTITY, config_digest=digest, rope_factor=factor) for factor in (2.0, 4.0))
    assert two.fingerprint() != four.fingerprint()


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "mrope", "axial"])
def test_fixed_rope_needs_none(kind: str) -> None:
    digest = config_digest({**CONFIG, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4}})
    replace(IDENTITY, config_digest=digest)


def test_the_fingerprint_is_canonical_msgpack() -> None:
    # written out by hand: sorted keys, arrays for tuples, None left out, and the label
    plain = {
        "block_size": 16,
        "compute_dtype": "bfloat16",
        "config_digest": config_digest(CONFIG),
        "dtype": "bfloat16",
        "epoch": 0,
        "format_version": 2,
        "hash_scheme": "sha256",
        "head_dim": 8,
        "kind": "full",
        "kv_dtype": "bfloat16",
        "layers": [0, 1],
        "layout": "block-first",
        "num_kv_heads": 2,
        "pp_size": 1,
        "pp_stages": [0, 1],
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "tp_ranks": [0, 1],
        "tp_size": 1,
    }
    assert hashlib.sha256(msgpack.packb(plain)).digest() == IDENTITY.fingerprint()


# A probe tells a model that computes something else from one that only rounds otherwise.


PLANES = [np.random.default_rng(seed).normal(size=(2, 7, 16)).astype(np.float32) for seed in range(8)]


def test_it_comes_out_as_it_went_in_and_no_larger_than_there_is_room() -> None:
    for count in (1, 8, 400):
        probe = KVProbe.of(PLANES * (count // 8) or PLANES[:1], "bfloat16")
        packed = probe.packed()
        assert len(packed) <= PROBE_BYTES
        again = KVProbe.unpack(packed.ljust(PROBE_BYTES, b"\0"))  # as a slab has it
        assert again.dtype == "bfloat16"
        assert probe.distance(again) == 0.0


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_is_within_the_tolerance_and_one_layer_of_many_computed_otherwise_is_not(dtype: str) -> None:
    probe = KVProbe.of(PLANES, dtype)
    off = probe.tolerance
    rounded = KVProbe.of([plane * (1 + 0.3 * off * np.cos(plane)) for plane in PLANES], dtype)
    assert probe.distance(rounded) <= off
    turned = KVProbe.of([*PLANES[:5], PLANES[5] + 4 * off * np.roll(PLANES[5], 1), *PLANES[6:]], dtype)
    assert probe.distance(turned) > off


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    probe = KVProbe.of(PLANES, "float32")
    assert probe.distance(KVProbe.of(PLANES[:4], "float32")) == float("inf")
    assert probe.distance(KVProbe.of(PLANES, "float16")) == float("inf")
    assert probe.is_finite
    for odd in (np.nan, np.inf):
        other = KVProbe.of([*PLANES[:-1], PLANES[-1] * odd], "float32")
        assert probe.distance(other) == float("inf")
        assert not other.is_finite
    assert KVProbe.of([], "float32").packed()


def test_bytes_that_are_no_whole_probe_are_a_format_error() -> None:
    packed = KVProbe.of(PLANES, "float32").packed()
    for data in (b"", bytes(PROBE_BYTES), packed[:-1], packed[:30], packed[:40] + b"x" + packed[41:]):
        with pytest.raises(FormatError):
            KVProbe.unpack(data)

"""A checkpoint's name: the same under every engine while nothing changed, another as soon as one weight does."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.connector.models.checkpoint import config_digest_of, revision_of
from kvtier.connector.models.hf_model import identity_of
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.identity import ModelIdentity


def saved(path: Path, *, tied: bool = False, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def identity(model: LlamaForCausalLM) -> ModelIdentity:
    return identity_of(model, "m", CacheForm.of(model, 16).outline, hash_scheme="sha256", epoch=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_is_named_after_its_checkpoint(tmp_path: Path, tied: bool) -> None:
    path = saved(tmp_path / "m", tied=tied)
    named = identity(LlamaForCausalLM.from_pretrained(path))
    assert named.revision == revision_of(path)
    assert named.config_digest == config_digest_of(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_whatever_dtype_it_was_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    path = saved(tmp_path / "m")
    named = identity(LlamaForCausalLM.from_pretrained(path, dtype=dtype))
    assert named.revision == revision_of(path)
    assert named.dtype == str(dtype).removeprefix("torch.")


def test_one_changed_weight_is_another_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    assert identity(model).revision != revision_of(path)
    assert identity(model).revision != identity(LlamaForCausalLM.from_pretrained(path)).revision


def test_a_changed_setting_is_another_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(path)
    model.config.rms_norm_eps = 1e-3
    assert identity(model).config_digest != config_digest_of(path)


def test_rewritten_files_are_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    before = revision_of(path)
    assert revision_of(path) == before
    saved(path, seed=2)
    os.utime(path / "model.safetensors", (1, 1))
    assert revision_of(path) != before


@pytest.mark.parametrize("name", ["adapter_config.json", "modeling_own.py"])
def test_an_adapters_settings_and_code_beside_the_weights_are_part_of_the_name(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "m")
    names = [revision_of(path)]
    for content in ('{"lora_alpha": 16}', '{"lora_alpha": 640}'):
        (path / name).write_text(content)
        names.append(revision_of(path))
    assert len(set(names)) == 3


def test_a_snapshot_goes_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert revision_of(tmp_path / "models--m" / "snapshots" / commit) == f"git:{commit}"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights there"):
        revision_of(tmp_path)
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        config_digest_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="holds no object"):
        config_digest_of(tmp_path)

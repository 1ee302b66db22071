"""A checkpoint's name: the same under every engine while nothing changed, another as soon as one weight does."""

import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.connector.models import checkpoint
from kvtier.connector.models.checkpoint import config_digest_of, revision_of
from kvtier.connector.models.hf_model import identity_of
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.identity import ModelIdentity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


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


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)])
def test_a_loaded_model_is_named_after_its_checkpoint_in_whatever_dtype(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    path = saved(tmp_path / "m", tied=tied)
    named = identity(LlamaForCausalLM.from_pretrained(path, dtype=dtype))
    assert named.revision == revision_of(path)
    assert named.config_digest == config_digest_of(path)
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


def kept_times(file: Path, change: Callable[[Path], object]) -> None:
    """Change a file and give it its old times back, as `rsync -t` and archives do."""
    before = file.stat()
    change(file)
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_place(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\1\2\3\4")


def by_rename(file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    new.replace(file)


def through_a_mapping(file: Path) -> None:
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[-4:] = b"\1\2\3\4"


@pytest.mark.parametrize("change", [in_place, by_rename, through_a_mapping])
@pytest.mark.parametrize("settled", [True, False])
def test_files_changed_with_size_and_times_kept_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], settled: bool
) -> None:
    path = saved(tmp_path / "m")
    if settled:  # long written, so that its digest is kept
        monkeypatch.setattr(checkpoint, "_TICK", -(10**18))
    before = revision_of(path)
    kept_times(path / "model.safetensors", change)
    after = revision_of(path)
    assert after != before
    assert revision_of(path) == after


def test_a_digest_is_kept_unless_the_pieces_differ_that_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m")
    monkeypatch.setattr(checkpoint, "_TICK", -(10**18))
    reads: list[Path] = []
    read_all = checkpoint._Reading._read_all
    monkeypatch.setattr(
        checkpoint._Reading, "_read_all", lambda self, file: (reads.append(file), read_all(self, file))[1]
    )
    before = revision_of(path)
    assert revision_of(path) == before
    assert len(reads) == 1
    # a file system without honest times: its stamp is as it was
    stamp = checkpoint.FileStamp.of(path / "model.safetensors")
    in_place(path / "model.safetensors")
    monkeypatch.setattr(checkpoint.FileStamp, "of", lambda file: stamp)
    assert revision_of(path) != before


def test_a_file_that_changes_while_it_is_read_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(path)
    read_all, num_changes = checkpoint._Reading._read_all, [1]

    def written_to(self: checkpoint._Reading, file: Path) -> str:
        digest = read_all(self, file)
        if num_changes[0]:
            num_changes[0] -= 1
            saved(path, seed=10 + num_changes[0])
        return digest

    monkeypatch.setattr(checkpoint._Reading, "_read_all", written_to)
    after = revision_of(path)  # once: it is read again
    assert revision_of(path) == after
    num_changes[0] = 99
    with pytest.raises(ConfigError, match=r"model\.safetensors changes while it is read; start once it is written"):
        revision_of(path)
    # what was compared with the model is not what was read for the name
    num_changes[0] = 0
    saved(path)
    num_changes[0] = 1
    assert identity(model).revision.startswith("xxh3:")
    assert identity(LlamaForCausalLM.from_pretrained(path)).revision == revision_of(path)


def hub_snapshot(root: Path, weights: Path, commit: str = COMMIT) -> Path:
    """As a hub's client lays a download out: blobs by their digest, a snapshot of links."""
    blobs, snapshot = root / "models--m" / "blobs", root / "models--m" / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in weights.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_equal_weights_have_one_name_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = saved(tmp_path / "here" / "m")
    names = {revision_of(plain), revision_of(shutil.copytree(plain, tmp_path / "elsewhere"))}
    (tmp_path / "link").symlink_to(plain)
    names.add(revision_of(tmp_path / "link"))
    # a hub's snapshots: of two commits, and one that was copied without its links
    snapshots = [hub_snapshot(tmp_path / number, plain, number * 40) for number in "12"]
    names.add(revision_of(shutil.copytree(snapshots[0], tmp_path / "3" / "snapshots" / ("3" * 40))))
    names |= set(map(revision_of, snapshots))
    assert len(names) == 1
    # the hub's client has digested what it downloaded: nobody reads it again
    monkeypatch.setattr(checkpoint._Reading, "_read_all", lambda self, file: pytest.fail(f"{file} was read"))
    assert {revision_of(each) for each in snapshots} == names


@pytest.mark.parametrize("change", [in_place, by_rename, lambda file: in_place(file.resolve())])
def test_a_hubs_snapshot_that_was_written_to_is_not_what_was_downloaded(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    snapshot = hub_snapshot(tmp_path, saved(tmp_path / "m"))
    before = revision_of(snapshot)
    time.sleep(0.02)  # longer than a tick of the file system's clock
    kept_times(snapshot / "model.safetensors", change)
    assert revision_of(snapshot) != before


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "modeling_own.py", "video_preprocessor_config.json", "hf_quant_config.json"]
)
def test_an_adapters_settings_and_code_beside_the_weights_are_part_of_the_name(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "m")
    names = [revision_of(path)]
    for content in ('{"lora_alpha": 16}', '{"lora_alpha": 640}'):
        (path / name).write_text(content)
        names.append(revision_of(path))
    assert len(set(names)) == 3


def test_a_snapshot_without_weights_is_named_by_its_commit(tmp_path: Path) -> None:
    assert revision_of(tmp_path / "models--m" / "snapshots" / COMMIT) == f"git:{COMMIT}"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights there"):
        revision_of(tmp_path)
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        config_digest_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="holds no object"):
        config_digest_of(tmp_path)

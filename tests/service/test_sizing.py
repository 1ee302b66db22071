"""`kvtier size`, beside what engine, pools and stores make of the same models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _architectures import ARCHITECTURES
from command_rig import kvtier
from extent import brief
from transformers import AutoConfig

from kvtier.connector.models import dtype_of
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.connector.transformers.config_form import form_of_config
from kvtier.service.breakeven import Breakeven, breakeven_from
from kvtier.service.simulation.value import LoadRates, rates_from
from kvtier.service.sizing import sizing_of
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.opening import open_hierarchy

ROWS = {row.name: row for row in ARCHITECTURES}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "vocab_size": 128256, "intermediate_size": 14336, "dtype": "bfloat16",
}  # fmt: skip
SIZES = {"block_size": 16, "dtype": "auto", "tensor_parallel": 1, "conversation": 8192}


def saved(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


# MHA, GQA, sliding windows, MLA, layers that share, states beside blocks, states alone, and one that looks at its data.
KINDS = ["opt", "llama", "gemma2", "deepseek-v3", "gemma3n", "qwen3-next", "mamba", "gpt2"]


@pytest.mark.parametrize("name", brief(["gemma2", "deepseek-v3", "qwen3-next"], KINDS))
def test_the_form_is_the_one_that_a_model_with_weights_has(name: str, tmp_path: Path) -> None:
    config = ROWS[name].make_config()
    if config is None:
        pytest.skip(f"this transformers lacks {name}")
    config.save_pretrained(tmp_path)
    kind, form = form_of_config(tmp_path, 16, "float32")
    assert kind == config.model_type
    assert form == CacheForm.of(ROWS[name].make_model(), 16)


def test_what_memory_and_disk_hold_is_what_the_tiers_have_room_for(tmp_path: Path) -> None:
    path = saved(tmp_path, {**LLAMA_8B, "num_hidden_layers": 4})
    rooms = {"l2": 10 << 20, "file": 40 << 20, "redis": 10 << 20}
    size = sizing_of(path, rooms, **{**SIZES, "tensor_parallel": 4, "conversation": 100})
    assert size.bytes_per_token == 4 * 2 * 8 * 128 * 2  # layers, K and V, heads, dim, bytes
    assert size.gpu_bytes_per_token == size.bytes_per_token // 4
    assert size.slots_per_conversation == 7
    (tmp_path / "slab").mkdir()
    config = Config(
        host={"size": rooms["l2"], "huge_pages": False},
        file={"path": str(tmp_path / "slab"), "size": rooms["file"]},
        cache={"block_size": 16},
    )
    hierarchy = open_hierarchy(config, bytes(32), form_of_config(path, 16)[1].pool_shape)
    (port,) = hierarchy.ports
    assert port.tier is not None
    assert [each.blocks for each in size.rooms[:2]] == [hierarchy.num_slots, port.tier.stats()["slots"]]
    hierarchy.close()
    assert [each.conversations for each in size.rooms] == [each.blocks // 7 for each in size.rooms]
    assert size.rooms[2].blocks == (10 << 20) // size.block_bytes - 1  # each record has a head


def test_the_verb_tells_a_large_model_without_its_weights(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA_8B)
    ended = kvtier(
        "size", tmp_path / "config.json", "--memory", "64GiB", "--disk", "1TiB", "--block-tokens", 16, "--json"
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["bytes_per_token"], told["block_bytes"], told["layers"]) == (131072, 2 << 20, 32)
    assert told["rooms"][0] == {
        "tier": "l2", "room_bytes": 64 << 30, "blocks": 32768, "tokens": 524288, "tokens_per_gib": 8192,
        "conversations": 64,
    }  # fmt: skip
    assert [each["tier"] for each in told["rooms"]] == ["l2", "file"]
    shown = kvtier("size", tmp_path, columns="120").stdout
    assert "blocks of 64 tokens" in shown
    assert "131,072 bytes of KV a token, 8,388,608 a block; 32 layers keep it" in " ".join(shown.split())


@pytest.mark.parametrize("outside", [True, False])
def test_a_dtype_counts_beside_the_text_model_or_inside(tmp_path: Path, outside: bool) -> None:
    """In Gemma 3's own files it stands beside."""
    config = ROWS["gemma3-vl"].make_config()
    text = {**config.get_text_config().to_dict(), "dtype": None if outside else "bfloat16"}
    whole = {**config.to_dict(), "text_config": text, "dtype": "bfloat16" if outside else None}
    path = saved(tmp_path, {name: value for name, value in whole.items() if value is not None})
    size = sizing_of(path, {}, **SIZES)
    assert size.dtype == "bfloat16"
    assert str(dtype_of(AutoConfig.from_pretrained(path), "auto")) == "torch.bfloat16"  # the engine's
    eighth = sizing_of(path, {"l2": 1 << 30}, **{**SIZES, "dtype": "fp8"})
    assert (eighth.dtype, 2 * eighth.block_bytes) == ("fp8", size.block_bytes)
    assert 2 * eighth.gpu_bytes_per_token == size.gpu_bytes_per_token


@pytest.mark.parametrize(
    ("change", "options", "complaint"),
    [
        ({"model_type": None}, [], "model_type: missing, or no name"),
        ({"model_type": "no-such"}, [], "model_type 'no-such'"),
        ({"num_hidden_layers": "many"}, [], "num_hidden_layers 'many': not a whole number from 1 to "),
        ({"num_hidden_layers": 5000}, [], "num_hidden_layers 5000: more than 4096"),
        ({"num_attention_heads": float("nan")}, [], "num_attention_heads nan: not a whole number"),
        ({"text_config": {"hidden_size": 1.5}}, [], "hidden_size 1.5: not a whole number"),
        ({}, ["--tensor-parallel", 3], "--tensor-parallel 3: the model has 8 KV heads"),
        ({}, ["--dtype", "int3"], "--dtype 'int3': use one of auto, fp8, "),
        ({}, ["--memory", "5"], '--memory "5": 5 bytes are less than a block of any model; did you mean "5GiB"?'),
        ({}, ["--redis", "0"], '--redis "0": outside 1 byte to 1PiB'),
    ],
)
def test_a_field_or_option_that_is_wrong_is_named(
    tmp_path: Path, change: dict[str, Any], options: list[object], complaint: str
) -> None:
    config = {name: value for name, value in {**LLAMA_8B, **change}.items() if value is not None}
    ended = kvtier("size", saved(tmp_path, config), *options)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_file_that_is_wrong_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 1_000_000)
    program = """
import sys
from kvtier.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    for path, complaint in ((tmp_path, "not JSON ("), (tmp_path / "none", "No such file or directory")):
        command = [sys.executable, "-c", program, "size", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert complaint in ended.stderr


# From how many tokens on loading wins, by measured times; and what the verb's forms say of it.


COMPUTE = {100: 1.0, 200: 2.0, 400: 4.0}


def _deep(path: Path) -> Path:
    path.write_text("[" * 100_000)
    return path


def worth(**loads: dict[int, float]) -> Breakeven:
    return Breakeven("tiny", "cpu", 8.0, COMPUTE, loads, gpu_hour=3.6)


def test_from_how_many_tokens_on_loading_wins() -> None:
    found = worth(
        l2={100: 0.5, 200: 0.5, 400: 0.5},  # from the shortest on
        file={100: 1.5, 200: 1.5, 400: 1.5},  # between two of them
        redis={100: 9.0, 200: 9.0, 400: 9.0},
        none={},
    )
    assert [found.wins_from(tier) for tier in found.by_tier] == [100, 150, None, None]
    assert "file: loading wins from 150 tokens on" in found.verdict
    assert "redis: computing is faster up to 400 tokens" in found.verdict
    assert "none: it did not have the prompts" in found.verdict


def test_seconds_money_and_rates_for_programs_and_people() -> None:
    found = worth(l2={100: 0.5, 200: 1.0})
    assert found.json["kvtier_worth"] == 1
    assert found.json["prefill_tokens_per_second"] == 100.0
    assert found.json["l2_bytes_per_second"] == 1600.0
    assert found.json["times"][0] == {"tokens": 100, "compute": 1.0, "l2": 0.5}
    assert list(found.table.rows[0]) == ["100", "1000.0", "500.0", "0.5000"]
    assert list(found.table.rows[2]) == ["400", "4000.0", "–", "–"]
    with pytest.raises(ConfigError, match="use a price above 0"):
        Breakeven("tiny", "cpu", 8.0, COMPUTE, {}, gpu_hour=0.0)


def test_what_was_measured_is_shown_again_and_other_files_are_named(tmp_path: Path) -> None:
    found = worth(l2={100: 0.5, 200: 1.0}, redis={})
    path = tmp_path / "worth.json"
    path.write_text(json.dumps(found.json))
    assert breakeven_from(path, None) == found
    with pytest.raises(ConfigError, match="not JSON"):
        rates_from(_deep(tmp_path / "deep"), LoadRates())
    # Its rates are those that a simulation takes.
    assert rates_from(path, LoadRates()) == LoadRates(prefill=100.0, l2=1600.0)
    shown = kvtier("worth", "--from", path, "--gpu-hour", 7.2, columns="200").stdout
    assert "l2: loading wins from 100 tokens on; redis: it did not have the prompts" in shown
    assert "1.0000" in shown
    whole = path.read_text()
    for text, complaint in (
        ("[" * 100_000, "not JSON"),
        (whole.replace('"tokens": 100', '"tokens": Infinity'), "Expected `float` < "),
        (whole.replace('"tokens": 100', '"tokens": -100'), "Expected `float` > 0.0 - at `$.times"),
        (
            whole.replace('"bytes_per_token": 8.0', '"bytes_per_token": NaN'),
            "Expected `float` > 0.0 - at `$.bytes_per_token`",
        ),
        (whole.replace('"gpu_hour": 3.6', '"gpu_hour": 1' + "0" * 400), "Number out of range - at `$.gpu_hour`"),
        ("[]", 'no "kvtier_worth": 1 there'),
        ('{"kvtier_worth": 1}', "Object missing required field `model`"),
        (whole.replace("1.0", "-1.0"), "Expected `float` > 0.0 - at `$.times"),
    ):
        path.write_text(text)
        ended = kvtier("worth", "--from", path)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"kvtier: --from {path}: {complaint}")
    path.write_text(whole.replace('"tiny"', '"[/red]tiny"'))  # markup of the table's
    assert "kvtier worth: [/red]tiny on cpu" in kvtier("worth", "--from", path, columns="200").stdout
    path.write_text(whole.replace('"tiny"', '"\\u001b[31mred"'))  # what a terminal would obey
    assert "kvtier worth: \\x1b[31mred on cpu" in kvtier("worth", "--from", path, columns="200").stdout
    ended = kvtier("worth", "--from", path, "--gpu-hour", "inf")
    assert (ended.returncode, ended.stderr) == (2, "kvtier: --gpu-hour inf: use a number from 1e-09 to 1e+12\n")
    ended = kvtier("worth")
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvtier: DIR: name a checkpoint to measure")

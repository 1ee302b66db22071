"""What vLLM is told at start where kvtier cannot serve it right: one line that names what, and the fix."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
import vllm
from safetensors.torch import load_file
from vllm.config import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVQuantMode, MambaSpec, MLAAttentionSpec
from vllm_rig import Engine, engine, make_checkpoint, prompt, tiers

from kvtier.connector.vllm import interface
from kvtier.connector.vllm import slot_plan as vllm_slot_plan
from kvtier.connector.vllm.connector import KVTierConnector, KVTierProm, KVTierStats
from kvtier.connector.vllm.encoder_connector import EncoderProm, KVTierECConnector
from kvtier.connector.vllm.identity import hash_scheme, identity
from kvtier.connector.vllm.interface import changed_parts, require_supported_version
from kvtier.connector.vllm.messages import CopyReports, StepMessage
from kvtier.connector.vllm.slot_plan import divided, slot_plan
from kvtier.connector.vllm.slots import engine_blocks
from kvtier.connector.vllm.tier import KVTierSecondaryTier
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.errors import ConfigError

LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(3))
DRAFT = SimpleNamespace(method="eagle", num_speculative_tokens=1)
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def configs(spec: Any = SPEC, *, tp: int = 1, replicas: int = 1, **changed: Any) -> tuple[Any, Any]:
    """vLLM's configuration and its KV cache's, as far as they are read; `changed` are fields of the former."""
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(model="m", is_encoder_decoder=False, dtype=torch.float32),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    for path, value in changed.items():
        section, _, field = path.partition("__")
        if field:
            setattr(getattr(config, section), field, value)
        else:
            setattr(config, section, value)
    groups = [KVCacheGroupSpec(list(LAYERS), spec)]
    kv_cache = {"kv_cache_groups": groups, "kv_cache_tensors": [], "hash_block_size": spec.block_size}
    return config, SimpleNamespace(**kv_cache, kv_tp_replicas=replicas)


def read_from(path: Path, config: Any) -> None:
    """What an identity reads of vLLM's configuration, for this checkpoint."""
    model = {"model": str(path), "dtype": torch.bfloat16, "quantization": None, "hf_overrides": {}, "revision": None}
    model |= {"hf_config_path": None, "quantization_config": None, "multimodal_config": None}
    config.model_config = SimpleNamespace(**model, is_encoder_decoder=False)
    config.cache_config = SimpleNamespace(prefix_caching_hash_algo="sha256")


def shared(share: int, spec: Any = SPEC, *, heads: int = 8, tp: int = 1, keys: str = "vllm", **options: Any) -> Any:
    """The configurations, and the plan with `[cache] share_across_tp`, of a model of `heads` KV heads."""
    width = 1 if isinstance(spec, MLAAttentionSpec) else max(1, heads // tp)
    config, kv_cache = configs(replace(spec, num_kv_heads=width), tp=tp, **options)
    config.model_config.get_total_num_kv_heads = lambda: heads
    plan = slot_plan(config, kv_cache, canonical=keys == "kvtier")
    return config, kv_cache, divided(plan, share, config, kv_cache)


def plan_of(*arguments: Any, canonical: bool = False, **options: Any) -> Any:
    return slot_plan(*configs(*arguments, **options), canonical=canonical)


def test_every_part_of_this_vllm_that_is_used_is_found() -> None:
    assert [*changed_parts(KVTierConnector, KVTierStats, KVTierProm, StepMessage, CopyReports)] == []
    assert [*changed_parts(KVTierECConnector, KVTierStats, EncoderProm)] == []
    assert [*changed_parts(KVTierSecondaryTier)] == []


def test_every_attribute_that_a_run_reads_is_checked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that kvtier's modules read of vLLM's objects in a run, but for what they read with a default."""
    read: dict[tuple[type, str], str] = {}
    checked: dict[Any, set[str]] = {}
    for path, *names in (line.split() for line in interface._FIELDS.split("\n") if line):
        checked.setdefault(interface._found(path), set()).update(names)
    for kind in [kind for kind in checked if "__getattribute__" not in vars(kind)]:

        def watched(this: Any, name: str, plain: Any = kind.__getattribute__) -> Any:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__", "").startswith("kvtier.connector.vllm."):
                read[type(this), name] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            return plain(this, name)

        monkeypatch.setattr(kind, "__getattribute__", watched)
    with engine(model, tiers(tmp_path)) as vllm:
        vllm.text([prompt(1, 100)])
        vllm.forget_l1()
        vllm.text([prompt(1, 100)])
    sources = "".join(path.read_text() for path in Path(interface.__file__).parent.glob("*.py"))
    with_default = set(re.findall(r'getattr\([^"\n]*"(\w+)",', sources))
    assert len(read) > 60
    assert {
        (kind.__name__, name): where
        for (kind, name), where in read.items()
        if name not in with_default | {"__class__", "__dict__"}.union(*(checked.get(base, ()) for base in kind.__mro__))
    } == {}


def test_an_old_version_is_refused_and_a_new_one_that_has_all_parts_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    require_supported_version(KVTierConnector)
    assert not caplog.records
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2: this kvtier needs 0\.32 or newer; install one below 0\.34"):
        require_supported_version(KVTierConnector)
    for version in ("0.34.0", "1.0.0+cpu"):
        monkeypatch.setattr(vllm, "__version__", version)
        for _ in range(2):
            require_supported_version(KVTierConnector)
    assert [record.args for record in caplog.records] == [("0.34.0", "0.34"), ("1.0.0+cpu", "0.34")]


@pytest.mark.parametrize(
    ("place", "name", "value", "named"),
    [
        (KVConnectorBase_V1, "get_num_new_matched_tokens", lambda self, request, num, more: None, "request, num, more"),
        (KVTierConnector, "__abstractmethods__", frozenset(["swap"]), "KVTierConnector lacks the new method swap"),
        (
            kv_cache_utils,
            "hash_block_tokens",
            lambda function, tokens: None,
            "hash_block_tokens takes function, tokens",
        ),
        (kv_cache_utils, "hash_block_tokens", None, "kv_cache_utils:hash_block_tokens is gone"),
        (output, "SchedulerOutput", int, "output:SchedulerOutput.num_scheduled_tokens is gone"),
        (
            KVConnectorStats,
            "aggregate",
            lambda self, others, how: self,
            "KVConnectorStats.aggregate(self, others, how)",
        ),
        (KVConnectorBase_V1, "build_prom_metrics", classmethod(lambda cls, config: None), "build_prom_metrics(cls, c"),
        (interface, "_FIELDS", "\nvllm.nothing:Request request_id\n", "vllm.nothing:Request is gone"),
    ],
)
def test_what_a_new_version_changed_is_named(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any, named: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(place, name, value)
    with pytest.raises(ConfigError) as refused:
        require_supported_version(KVTierConnector, KVTierStats)
    assert str(refused.value).startswith("vLLM 0.34.0: changed in what kvtier uses: ")
    assert named in str(refused.value)
    assert str(refused.value).endswith("; install one below 0.34, or a newer kvtier")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"parallel_config__decode_context_parallel_size": 2},
            "decode_context_parallel_size 2: .* set it to 1, and divide",
        ),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2: .* set it to 1, and"),
        ({"load_config__load_format": "dummy"}, 'load_format "dummy": random weights have no name'),
        ({"load_config__load_format": "tensorizer"}, "weights from elsewhere than the checkpoint have no name"),
        (
            {"speculative_config": SimpleNamespace(method="dflash")},
            "speculative method 'dflash': .* draft_model, eagle, ",
        ),
        (
            {"model_config__is_encoder_decoder": True},
            "vLLM has no KV connectors for encoder-decoder .* without --kv-tr",
        ),
        ({"spec": replace(SPEC, dtype=torch.uint8)}, r"layer model\.layers\.0.* keeps uint8; kvtier keeps"),
        ({"spec": replace(SPEC, state_content_bytes=100)}, "packs its blocks in an unknown way"),
        (
            {"spec": MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))},
            "mamba_cache_mode 'none': .* --enable-prefix-caching --mamba-cache-mode align",
        ),
    ],
)
def test_what_cannot_be_kept_right_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        plan_of(**changed)
    assert "secondary" not in str(refused.value).lower()  # nobody has tried KVTierSecondaryTier there


def staged(*, layers: int, stage: int = 0, **changed: Any) -> tuple[Any, Any]:
    """The configurations as one of two stages sees them: the model has more layers than it."""
    config, kv_cache = configs(parallel_config__pipeline_parallel_size=2, **changed)
    config.model_config.get_total_num_hidden_layers = lambda: layers
    moved = [name.replace(f".{number}.", f".{number + stage * 3}.") for number, name in enumerate(LAYERS)]
    kv_cache.kv_cache_groups[0].layer_names[:] = moved
    return config, kv_cache


def test_stages_lie_one_behind_the_other_in_each_ranks_part() -> None:
    layer = 2 * 32 * 2 * 64 * 2  # heads, tokens, K and V, dim, bytes
    for stage in (0, 1):
        plan = slot_plan(*staged(layers=6, stage=stage, tp=2), canonical=False)
        assert plan.block_bytes == 2 * 6 * layer  # as with one stage
        caches = {name: torch.zeros(5, 2, 32, 128, dtype=torch.bfloat16) for name in plan.layers}
        starts = [min(part.offset for part in engine_blocks(plan, caches, rank).parts) for rank in (0, 1)]
        assert starts == [stage * 3 * layer, (6 + stage * 3) * layer]


@pytest.mark.parametrize(
    ("layers", "speculative", "message"),
    [
        (8, None, r"pipeline_parallel_size 2: then kvtier keeps models whose 8 layers .* tensor_parallel_size"),
        (6, SimpleNamespace(method="ngram"), "pipeline_parallel_size 2 with speculative decoding: .* leave --specul"),
    ],
)
def test_stages_are_refused_where_one_cannot_tell_of_the_others(layers: int, speculative: Any, message: str) -> None:
    """The scheduler sees the first stage's layers alone. Of eight, a stage would have four: one here has no K and V."""
    with pytest.raises(ConfigError, match=message):
        slot_plan(*staged(layers=layers, speculative_config=speculative), canonical=False)


def test_hashes_that_end_inside_blocks_are_refused() -> None:
    config, kv_cache = configs()
    kv_cache.hash_block_size = 24
    with pytest.raises(ConfigError, match=r"prefix_match_unit 24: it does not divide blocks of 32 tokens; unset it"):
        slot_plan(config, kv_cache, canonical=False)


def test_keys_that_begin_at_random_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"'xxhash': its chains begin at a random value; set PYTHONHASHSEED"):
        hash_scheme("xxhash")
    assert hash_scheme("sha256_cbor") == (
        "vllm-sha256_cbor-9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    )
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert hash_scheme("sha256_cbor").endswith("4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e")
    assert hash_scheme("xxhash") == hash_scheme("xxhash")


def test_an_engine_that_cannot_be_served_does_not_start(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "m")
    with pytest.raises(ConfigError, match="load_format"):
        Engine(model, tiers(), load_format="dummy")


def test_weights_of_another_kind_of_file_have_another_name(tmp_path: Path) -> None:
    """A newer file that --load-format pt picks, beside older ones of the kind that vLLM takes first."""
    model, trained = make_checkpoint("llama", tmp_path / "m"), make_checkpoint("llama", tmp_path / "trained", seed=1)
    torch.save(load_file(trained / "model.safetensors"), model / "model.pt")
    with engine(trained) as plain:
        text = plain.text([prompt(1, 100)])
    with engine(model, tiers(tmp_path / "store")) as older:
        assert older.text([prompt(1, 100)]) != text
    with engine(model, tiers(tmp_path / "store"), load_format="pt") as served:
        assert served.text([prompt(1, 100)]) == text


def test_every_setting_that_changes_kv_is_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    config, kv_cache = configs()
    read_from(path, config)
    plan = slot_plan(config, kv_cache, canonical=False)

    def named(**changed: Any) -> bytes:
        cache = CacheConfig(epoch=changed.pop("epoch", 0), lossy=changed.pop("lossy", "none"))
        algorithm = changed.pop("algorithm", "sha256")
        monkeypatch.setattr(config.cache_config, "prefix_caching_hash_algo", algorithm)
        load = SimpleNamespace(load_format=changed.pop("load_format", "auto"), download_dir=None)
        settings = SimpleNamespace(**{**vars(config.model_config), **changed})
        whole = SimpleNamespace(**{**vars(config), "model_config": settings, "load_config": load})
        return identity(whole, kv_cache, plan, cache).fingerprint()

    overridden = SimpleNamespace(to_dict=lambda: {"rope_theta": 5})
    by_file = {"quantization_config_file": str(tmp_path / "quantiser.json")}
    (tmp_path / "quantiser.json").write_text("1")
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    names = [
        named(),
        named(dtype=torch.float16),
        named(quantization="fp8"),
        named(epoch=1),
        named(lossy="fp8"),
        named(algorithm="sha256_cbor"),
        named(model=str(other)),
        named(hf_overrides={"rope_theta": 5}, hf_config=overridden),
        named(hf_config_path="elsewhere", hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 6})),
        named(quantization="fp8", quantization_config={"ignore": ["model.layers.0"]}),
        named(model_class_overrides={"LlamaForCausalLM": "own:Class"}),
        named(hf_overrides=by_file, hf_config=overridden),
        named(multimodal_config=MultiModalConfig()),
        named(multimodal_config=MultiModalConfig(mm_processor_kwargs={"do_normalize": False})),
        named(multimodal_config=MultiModalConfig(media_io_kwargs={"video": {"num_frames": 8}})),
    ]
    with monkeypatch.context() as changed:
        changed.setenv("VLLM_VIDEO_LOADER_BACKEND", "another")
        names.append(named(multimodal_config=MultiModalConfig()))
        assert named() == names[0]  # a model without videos
        changed.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
        names.append(named())
        (tmp_path / "quantiser.json").write_text("2")
        names.append(named(hf_overrides=by_file, hf_config=overridden))
    assert len(set(names)) == len(names)
    assert named() == names[0]


def test_latents_with_loss_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config, kv_cache = configs(spec)
    read_from(path, config)
    plan = slot_plan(config, kv_cache, canonical=False)
    assert identity(config, kv_cache, plan, CacheConfig()).lossy is None
    with pytest.raises(ConfigError, match=r"\[cache\] lossy \"fp8\": kind 'mla': .*; leave it out"):
        identity(config, kv_cache, plan, CacheConfig(lossy="fp8"))


# --- one store for every number of ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "changed", "message"),
    [
        (3, {}, "share_across_tp 3: the model has 8 KV heads; use a number that divides them"),
        (
            4,
            {"tp": 6, "heads": 12},
            "share_across_tp 4: 6 ranks would cut its pieces; use a divisor or a multiple of 6",
        ),
        (2, {"tp": 3}, "share_across_tp 2: 3 ranks do not have equal parts of the 8 KV heads; leave it out"),
        (2, {"spec": replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)}, "packs its blocks in its own way"),
        (2, {"speculative_config": DRAFT}, "share_across_tp 2: a draft model's KV is in the same blocks, so ranks'"),
    ],
)
def test_blocks_that_cannot_be_cut_by_heads_are_refused(share: int, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shared(share, **changed)


@pytest.mark.parametrize(("share", "heads"), [(1, 8), (2, 8), (8, 8), (8, 2)])
def test_engines_of_every_size_have_one_name_and_slots_of_one_size(tmp_path: Path, share: int, heads: int) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    kept = set()
    for tp in (1, 2, 8, 16):
        config, kv_cache, plan = shared(share, tp=tp, heads=heads, replicas=max(1, tp // heads))
        alone = slot_plan(config, kv_cache, canonical=False)
        read_from(path, config)  # sets a dtype, for which a CPU with AMX has other kernels
        named = identity(config, kv_cache, plan, CacheConfig(share_across_tp=share)).fingerprint()
        kept.add((named, plan.block_bytes))
        if tp == share:  # what it stored before it had the option
            assert identity(config, kv_cache, alone, CacheConfig()).fingerprint() == named
        if tp == 16:  # the ranks of a head store it once
            assert (plan.num_parts, plan.replicas) == (heads, 16 // heads)
    assert len(kept) == 1


def test_latents_have_one_name_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    names = set()
    for tp in (1, 2, 8):
        config, kv_cache, plan = shared(4, spec, tp=tp, replicas=tp)
        read_from(path, config)
        assert plan.block_bytes == 3 * 16 * 576 * 2
        for cache in (CacheConfig(share_across_tp=4), CacheConfig()):
            names.add(identity(config, kv_cache, plan, cache).fingerprint())
    assert len(names) == 1


# --- where the bytes go ----------------------------------------------------------------------------------------------


def test_ranks_lie_one_after_another_and_equal_ones_share() -> None:
    plan = plan_of(tp=4, replicas=2)
    layer = 2 * 32 * 2 * 64 * 2  # heads, tokens, K and V, dim, bytes
    assert plan.block_bytes == 2 * 3 * layer
    caches = {name: torch.zeros(5, 2, 32, 128, dtype=torch.bfloat16) for name in LAYERS}
    starts = [min(part.offset for part in engine_blocks(plan, caches, rank).parts) for rank in range(4)]
    assert starts == [0, 0, 3 * layer, 3 * layer]


def test_one_latent_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA on two ranks: both hold the same, one copy is stored."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    plan = plan_of(spec, tp=2, replicas=2)
    assert plan.block_bytes == 3 * 16 * 576 * 2
    caches = {name: torch.zeros(5, 1, 16, 576, dtype=torch.bfloat16) for name in LAYERS}
    for rank in (0, 1):
        assert [part.offset for part in engine_blocks(plan, caches, rank).parts] == [0, 18432, 36864]
    with pytest.raises(ConfigError, match=r'keys "kvtier": .* has no canonical form; use keys "vllm"'):
        plan_of(spec, canonical=True)


@pytest.mark.parametrize("content", ["plain", "cpu-vec"])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_the_canonical_order_is_the_same_whatever_the_kernel_keeps(
    content: str, kernel_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content == "cpu-vec" and kernel_blocks > 1:
        pytest.skip("vLLM's CPU kernels take whole blocks")
    monkeypatch.setattr(vllm_slot_plan, "block_content", lambda spec, dtype: content)
    plan = plan_of(canonical=True)
    keys, values = (torch.randn(4, 32, 2, 64).to(torch.bfloat16) for _ in range(2))  # [blocks, tokens, heads, dim]
    by_head = keys.transpose(1, 2), values.transpose(1, 2)
    if content == "plain":
        kept = torch.cat(by_head, -1)
    else:  # per head all keys, dimension by dimension, then all values
        kept = torch.cat([by_head[0].transpose(2, 3).flatten(2), by_head[1].flatten(2)], -1).view(4, 2, 32, 128)
    split = kept.view(4, 2, kernel_blocks, 32 // kernel_blocks, 128)
    kept = split.transpose(1, 2).flatten(0, 1).contiguous()
    blocks = engine_blocks(plan, dict.fromkeys(LAYERS, kept), 0)
    of_layer = [part for part in blocks.parts if part.layer == 1]
    assert [part.offset for part in of_layer] == [2 * 8192, 3 * 8192]
    for part, expected in zip(of_layer, (keys, values), strict=True):
        assert torch.equal(part.tensor.flatten(1), expected.flatten(1))

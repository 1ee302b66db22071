"""vLLM's models with uneven KV groups: blocks of different sizes, several in one of kvtier's, and what each half sees.

Gemma 4 runs here. Its full layers have larger heads, so vLLM gives its sliding layers' blocks more tokens. What this
machine cannot run (DeepSeek V3.2 and V4) goes as far as vLLM's own classes go: specs, groups, the plan of both halves.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from cache_planning import planned
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request
from vllm_rig import FailingLoads, engine, greedy, make_checkpoint, prompt, said, tiers

from kvtier.connector.vllm import slot_plan as vllm_slot_plan
from kvtier.connector.vllm.identity import identity
from kvtier.connector.vllm.slot_plan import is_uneven, layer_specs, slot_plan
from kvtier.connector.vllm.slots import engine_blocks
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.copies.transfer import BlockCopies, PartCopier
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.timeout(600)

OPTIONS: dict[str, Any] = {"block_size": 32, "max_model_len": 1024, "max_num_batched_tokens": 160}
SHARED = prompt(1, 500)
PROMPTS = [SHARED + prompt(2, 70), SHARED + prompt(3, 45), SHARED[:300] + prompt(4, 200), prompt(5, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("models") / "gemma4")


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    """What a vLLM without kvtier and without a cache of its own answers."""
    with engine(model, **OPTIONS, enable_prefix_caching=False) as plain:
        return plain.text(PROMPTS)


def test_a_new_engine_finds_what_an_old_one_stored(model: Path, right: list[list[int]], tmp_path: Path) -> None:
    assert len({tuple(text) for text in right}) == len(right)  # answers depend on their prompts
    with engine(model, tiers(tmp_path), **OPTIONS) as first:
        groups = first.scheduler.kv_cache_config.kv_cache_groups
        sizes = {group.kv_cache_spec.block_size for group in groups}
        plan = first.half._plan
        assert len(sizes) > 1
        assert plan.block_size == max(sizes)
        assert max(lane.count for lane in plan.lanes) > 1
        assert first.text(PROMPTS) == right
        first.forget_l1()
        usable = [(len(tokens) - 1) // plan.block_size * plan.block_size for tokens in PROMPTS]
        assert said(first.run(PROMPTS)) == (right, usable)
    with engine(model, tiers(tmp_path), **OPTIONS) as second:
        assert said(second.run(PROMPTS)) == (right, usable)
        assert second.found_in("file") > 0


@pytest.mark.exhaustive
def test_small_blocks_that_slid_out_of_the_window_cost_nothing_else(model: Path, tmp_path: Path) -> None:
    """Answers fill their blocks token by token, while the window moves on."""
    first_turn = prompt(6, 100)
    with engine(model, **OPTIONS) as plain:
        [answer] = plain.text([first_turn], 300)
        second_turn = [*first_turn, *answer, *prompt(7, 40)]
        plain.forget_l1()
        expected = plain.text([second_turn])
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert vllm.text([first_turn], 300) == [answer]
        vllm.forget_l1()
        assert said(vllm.run([second_turn])) == (expected, [384])  # 399 tokens were computed


@pytest.mark.parametrize("lost", [0, 3])
def test_a_lost_record_ends_the_prefix(model: Path, right: list[list[int]], tmp_path: Path, lost: int) -> None:
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert vllm.text(PROMPTS[:1]) == right[:1]
        vllm.forget_l1()
        [port] = vllm.hierarchy.ports
        size = vllm.half._plan.block_size
        gone = names(PROMPTS[0], size)[lost]
        assert all(port.holds([gone]))
        port.tier.discard([gone])
        assert vllm.hierarchy.host.pool.evict([gone]) == 1
        assert said(vllm.run(PROMPTS[:1])) == (right[:1], [lost * size])


def names(tokens: list[int], size: int) -> list[bytes]:
    """What vLLM calls the blocks of `size` tokens when it hashes every 32."""
    hasher = get_request_block_hasher(32, get_hash_fn_by_name("sha256"))
    hashes = Request("names", tokens, greedy(1), None, block_hasher=hasher).block_hashes
    return [bytes(name) for name in hashes[size // 32 - 1 :: size // 32]]


def test_a_load_that_fails_is_computed(
    model: Path, right: list[list[int]], tmp_path: Path, failing_loads: FailingLoads
) -> None:
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert vllm.text(PROMPTS) == right
        vllm.forget_l1()
        failing_loads.on = True
        assert vllm.text(PROMPTS) == right
        assert failing_loads.num_failed


# --- what both halves see of models that do not run here -------------------------------------------------------------

BF16 = torch.bfloat16
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16)
INDEXER = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16)
LATENT = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=584, dtype=torch.uint8, tokens_per_state=4)
WINDOW = SlidingWindowMLASpec(block_size=64, num_kv_heads=1, head_size=584, dtype=torch.uint8, sliding_window=128)
TAIL = SlidingWindowMLASpec(block_size=4, num_kv_heads=1, head_size=2048, dtype=torch.float32, sliding_window=8)

SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=BF16, sliding_window=64)


def layers(number: int, **parts: Any) -> dict[str, Any]:
    """So many layers that have each of these caches."""
    names = {"attn": "self_attn.attn", "indexer": "self_attn.indexer.k_cache"}
    return {f"model.layers.{i}.{names.get(part, part)}": spec for i in range(number) for part, spec in parts.items()}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # one group of layers that differ: latents, and under the same index what they are found by
    "deepseek-v3.2": ("BLHNC", layers(3, attn=MLA, indexer=INDEXER)),
    "deepseek-v3.2, layer by layer": ("LBNHC", layers(3, attn=MLA, indexer=INDEXER)),
    # groups with blocks of 256, 64 and 4 tokens, and windows smaller than the largest block
    "deepseek-v4": ("BLHNC", layers(2, latent=LATENT, window=WINDOW, tail=TAIL)),
    # heads of other sizes in full layers than in sliding ones
    "gemma4": ("LBNHC", {f"model.layers.{i}.self_attn.attn": FULL if i % 3 == 2 else SLIDING for i in range(6)}),
}
NUM_BLOCKS = 240


def kv_cache_configs(layout: str, specs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What vLLM makes of a model's layers: its configuration, the workers' of the KV cache, and the scheduler's."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
        enable_prefix_caching=True,
        prefix_match_unit=None,
        cache_dtype="auto",
        block_size=next(iter(specs.values())).block_size,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1, data_parallel_size=1
    )
    config = SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        model_config=SimpleNamespace(
            model="m", is_encoder_decoder=False, dtype=BF16, max_model_len=256, original_max_model_len=256, use_mla=True
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=256),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
        kv_transfer_config=object(),
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=256,
    )
    worker = planned(config, specs)
    scheduler = generate_scheduler_kv_cache_config([worker])
    _, unit = resolve_kv_cache_block_sizes(scheduler, config)
    worker.hash_block_size = scheduler.hash_block_size = unit
    return config, worker, scheduler


def memory_of(worker: Any, layout: str) -> dict[str, torch.Tensor]:
    """A rank's tensors over one allocation, as vLLM's worker makes them. Every byte is random."""
    raw = torch.randint(-128, 128, (worker.kv_cache_tensors[0].size,), dtype=torch.int8)
    caches = dict[str, torch.Tensor]()
    specs = layer_specs(worker)
    for tensor in worker.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        views = create_kv_cache_views(raw, spec, worker.num_blocks, KVCacheLayout[layout], tensor)
        caches |= dict(zip(tensor.layers, views, strict=True))
    return caches


@pytest.mark.parametrize("model", MODELS)
def test_a_block_comes_back_byte_for_byte_in_every_group(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_slot_plan, "block_content", lambda spec, dtype: "plain")  # as on a GPU
    layout, specs = MODELS[model]
    config, worker, scheduler = kv_cache_configs(layout, specs)
    plan = slot_plan(config, worker, canonical=False)
    assert slot_plan(config, scheduler, canonical=False) == plan  # though vLLM shows its scheduler less
    assert is_uneven(plan)
    assert set(plan.layers) == set(specs)
    caches = memory_of(worker, layout)
    blocks = engine_blocks(plan, caches, 0)
    region = HostRegion.allocate(4, plan.block_bytes, prefault=False)
    # One of kvtier's blocks: every lane has a block of vLLM's, all of them different.
    ids = [number * NUM_BLOCKS + 1 + number % (NUM_BLOCKS - 1) for number, _ in plan.attention]
    copies = BlockCopies(np.array(ids), np.full(len(ids), 2))
    copier = PartCopier(blocks, region)
    before = {name: tensor.clone() for name, tensor in caches.items()}
    assert copier.copy("store", copies) is None
    moved = [number * NUM_BLOCKS + 1 + (number + 5) % (NUM_BLOCKS - 1) for number, _ in plan.attention]
    assert copier.copy("load", BlockCopies(np.array(moved), np.full(len(ids), 2))) is None
    for (_, lane), source, target in zip(plan.attention, ids, moved, strict=True):
        for name in plan.groups[lane.group]:
            tensor, old = caches[name], before[name]
            assert torch.equal(
                tensor[target % NUM_BLOCKS].view(torch.uint8), old[source % NUM_BLOCKS].view(torch.uint8)
            )
    region.close()


def test_of_small_windows_no_more_is_needed_than_a_prompt_looks_at() -> None:
    config, _, scheduler = kv_cache_configs(*MODELS["deepseek-v4"])
    plan = slot_plan(config, scheduler, canonical=False)
    assert plan.block_size == 256
    needed = {
        lane.group: [other.place for other in plan.lanes if other.group == lane.group and other.is_needed(7, 256)]
        for lane in plan.lanes
    }
    # vLLM itself says what it may have given up at the end of that block.
    for number, group in enumerate(scheduler.kv_cache_groups):
        manager = KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role)
        assert manager is not None
        skipped = manager.get_num_skipped_tokens(SimpleNamespace(**vars(group.kv_cache_spec)), 8 * 256)
        size = group.kv_cache_spec.block_size
        kept = [place for place in range(256 // size) if 7 * 256 + (place + 1) * size > skipped // size * size]
        assert needed[number] == kept
    assert sorted(map(len, needed.values())) == [1, 2, 2]


@pytest.mark.parametrize("model", MODELS)
def test_canonical_keys_are_refused(model: str) -> None:
    config, worker, _ = kv_cache_configs(*MODELS[model])
    with pytest.raises(ConfigError, match=r'keys "kvtier": .* no canonical form; use keys "vllm"'):
        slot_plan(config, worker, canonical=True)


def test_a_layer_that_the_scheduler_does_not_see_is_part_of_the_name(model: Path) -> None:
    """vLLM shows it one spec of a group: the sizes of the others come from where their tensors lie."""

    def named(**parts: Any) -> bytes:
        config, _, scheduler = kv_cache_configs("BLHNC", layers(3, **parts))
        config.model_config = SimpleNamespace(**vars(config.model_config), quantization=None, hf_overrides={})
        config.model_config.model, config.model_config.revision = str(model), None
        config.model_config.hf_config_path = config.model_config.quantization_config = None
        config.model_config.multimodal_config = None
        config.cache_config.prefix_caching_hash_algo = "sha256"
        plan = slot_plan(config, scheduler, canonical=False)
        return identity(config, scheduler, plan, CacheConfig()).fingerprint()

    other = replace(INDEXER, head_size=68)
    names = [named(attn=MLA), named(attn=MLA, indexer=INDEXER), named(attn=MLA, indexer=other)]
    assert len(set(names)) == 3
    assert named(attn=MLA, indexer=INDEXER) == names[1]

"""vLLM finds its prompts in kvtier's tiers: after its own cache is gone, after a restart, for every kind of model."""

from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from vllm_rig import BLOCK, FAMILIES, Engine, engine, greedy, make_checkpoint, prompt, tiers

from kvtier.tiers.errors import ConfigError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family) for family in FAMILIES}


PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 70), prompt(4, 31)]
BLOCKS = [6, 2, 2, 0]  # that can be loaded: full ones, and at least one token is computed
# Where a prompt and its answer fill the block that the prompt ends in, all but the prompt's last token is of use.
CACHED = [192, 95, 64, 30]


@pytest.mark.parametrize("family", brief(["llama", "gemma3"], [family for family in FAMILIES if family != "deepseek"]))
def test_a_new_engine_finds_what_an_old_one_stored(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    with engine(models[family]) as plain:
        expected = plain.text(PROMPTS)
    with engine(models[family], tiers(tmp_path)) as first:
        assert first.text(PROMPTS) == expected
        assert first.found_in("miss") == sum(BLOCKS)
    with engine(models[family], tiers(tmp_path)) as second:
        outputs = second.run(PROMPTS)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        several = len(second.half._plan.groups) > 1  # whole blocks only
        cached = [blocks * BLOCK for blocks in BLOCKS] if several else CACHED
        assert [output.num_cached_tokens for output in outputs] == cached
        assert second.found_in("file") == sum(BLOCKS)
        second.forget_l1()
        assert second.text(PROMPTS) == expected
        assert second.found_in("l2") == sum(BLOCKS)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_client_bounds_what_its_request_loads_and_stores(
    family: str, models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the names that vLLM's own offloading has for it."""

    def cached(vllm: Engine, **bounds: object) -> int:
        vllm.forget_l1()
        params = greedy(4)
        params.extra_args = {"kv_transfer_params": bounds}
        [output] = vllm.llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
        texts.add(tuple(output.outputs[0].token_ids))
        return int(output.num_cached_tokens)

    texts: set[tuple[int, ...]] = set()
    with engine(models[family], tiers(tmp_path)) as vllm:
        assert cached(vllm, max_offload_tokens=0) == 0
        assert cached(vllm, max_offload_tokens=3 * BLOCK + 5) == 0
        assert cached(vllm, max_load_tokens=2 * BLOCK + 5, max_offload_tokens=0) == 2 * BLOCK
        assert cached(vllm, max_load_tokens=0) == 0
        assert cached(vllm, max_load_tokens=-1, max_offload_tokens="all") == 6 * BLOCK
        assert "max_load_tokens -1: ignored" in caplog.text
        assert "max_offload_tokens 'all': ignored" in caplog.text
    assert len(texts) == 1


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM's MLA has no float32 on a CPU with AMX")
def test_models_without_prefixes_stay(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek's MLA on a CPU computes whole prompts only: loaded KV would be read past. No hits, and right text."""
    with engine(models["deepseek"]) as plain:
        expected = plain.text(PROMPTS)
    with engine(models["deepseek"], tiers(tmp_path)) as vllm:
        assert "no blocks of this model are kept: vLLM's MLA kernel" in caplog.text
        for _ in range(2):
            outputs = vllm.run(PROMPTS)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("waits", [True, False])
def test_no_step_waits_for_a_load_vllm_cannot_take_back(models: dict[str, Path], tmp_path: Path, waits: bool) -> None:
    """`waits` is False under asynchronous scheduling, which vLLM does not run on a CPU: here it is set by hand."""
    with engine(models["llama"], tiers(tmp_path)) as vllm:
        expected = vllm.text([PROMPTS[0]])
        vllm.forget_l1()
        vllm.half.configure(layerwise=False, waits=waits, keeps=True, shares=True, stores=True)
        llm = vllm.llm.llm_engine
        llm.add_request("asked", {"prompt_token_ids": PROMPTS[0]}, greedy())
        [request] = vllm.scheduler.requests.values()
        assert vllm.half.matched(request, 0) == (6 * BLOCK, not waits)
        [output] = [output for _ in range(60) for output in llm.step() if output.finished]
        assert [list(output.outputs[0].token_ids)] == expected
        assert output.num_cached_tokens == 6 * BLOCK


OPTIONS: dict[str, dict[str, Any]] = {
    "no prefix caching": {"enable_prefix_caching": False},
    "chunked prefill": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
    "no chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
    "sha256_cbor": {"prefix_caching_hash_algo": "sha256_cbor"},
    "bf16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", brief(["no prefix caching", "chunked prefill"], list(OPTIONS)))
def test_however_the_engine_is_set(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    with engine(models["llama"], tiers(tmp_path), **OPTIONS[name]) as vllm:
        first = vllm.text(PROMPTS)
        vllm.forget_l1()
        before = vllm.found_in("l2")
        outputs = vllm.run(PROMPTS)
        assert vllm.found_in("l2") - before == sum(BLOCKS)
        assert [output.num_cached_tokens for output in outputs] == CACHED
        if name != "bf16":  # one near tie may flip there: its KV is compared bit by bit below
            assert [list(output.outputs[0].token_ids) for output in outputs] == first


@pytest.mark.parametrize("dtype", brief(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("keys", ["vllm", "kvtier"])
def test_loaded_kv_is_the_computed_bit_by_bit(dtype: str, keys: str, models: dict[str, Path], tmp_path: Path) -> None:
    def kv(vllm: Any) -> list[torch.Tensor]:
        """KV of the first prompt's full blocks, in every layer."""
        pool = vllm.scheduler.kv_cache_manager.block_pool
        named = {block.block_hash: block.block_id for block in pool.blocks if block.block_hash is not None}
        order = [named[name] for name in sorted(named)]
        return [layer[order].clone() for layer in vllm.worker.kv_caches]

    if keys == "kvtier" and dtype == "bfloat16" and torch.cpu._is_amx_tile_supported():
        with (
            pytest.raises(ConfigError, match="KV of kind 'cpu-amx' has no canonical form"),
            engine(models["llama"], tiers(tmp_path, keys=keys), dtype=dtype),
        ):
            pass
        return
    with engine(models["llama"], tiers(tmp_path, keys=keys), dtype=dtype) as vllm:
        vllm.text([PROMPTS[0]], 1)
        computed = kv(vllm)
        vllm.forget_l1()
        for layer in vllm.worker.kv_caches:
            layer.zero_()
        assert vllm.run([PROMPTS[0]], 1)[0].num_cached_tokens == 6 * BLOCK
        for before, after in zip(computed, kv(vllm), strict=True):
            assert len(before) == 6
            assert torch.equal(before, after)


def test_answers_are_kept_for_the_next_turn_and_need_not_be(models: dict[str, Path], tmp_path: Path) -> None:
    first = prompt(5, 64)
    for store_generated, found in ((True, 4), (False, 2)):
        options = tiers(tmp_path / str(found), cache={"store_generated": store_generated})
        with engine(models["llama"], options) as vllm:
            turn = first + vllm.text([first], 70)[0]
            vllm.forget_l1()
            assert vllm.run([turn], 1)[0].num_cached_tokens == found * BLOCK


def test_tenants_with_different_salts_never_meet(models: dict[str, Path], tmp_path: Path) -> None:
    for keys in ("vllm", "kvtier"):
        with engine(models["llama"], tiers(tmp_path / keys, keys=keys)) as vllm:
            vllm.text(PROMPTS, salt="a")
            vllm.forget_l1()
            assert sum(output.num_cached_tokens for output in vllm.run(PROMPTS, salt="b")) == 0
            vllm.forget_l1()
            assert vllm.run(PROMPTS, salt="a")[0].num_cached_tokens == 6 * BLOCK

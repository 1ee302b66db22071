"""Models with several pools: SGLang's own host pools on CPU tensors, through KVTierStorage as SGLang calls it."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("needs SGLang; run `make test-sglang`", allow_module_level=True)
import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang_storages as rig
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang_storages import PAGES, TOKENS

from kvtier.connector.sglang import storage as adapter
from kvtier.connector.sglang.storage import KVTierStorage
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.key_schemes import sglang_hashes

KEYS: Final = [name.hex() for name in sglang_hashes(list(range(12 * TOKENS)), TOKENS)]
TRAILING, ALL = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES
Open = Callable[..., KVTierStorage]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.save_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def arguments(model: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's own, as it was started; tests change them."""
    made = rig.server_arguments(model)
    monkeypatch.setattr(adapter, "get_server_args", lambda: made)
    return made


@pytest.fixture
def open_storage(arguments: SimpleNamespace, tmp_path: Path) -> Iterator[Open]:
    opened: list[KVTierStorage] = []

    def open_(pools: Mapping[PoolName, Any], **changes: Any) -> KVTierStorage:
        file = {"path": str(tmp_path / "slabs"), "size": "4MiB"}
        opened.append(rig.open_storage(rig.storage_config({"file": file}, **changes), pools))
        return opened[-1]

    yield open_
    for made in opened:
        for tiers in made._tiers:
            tiers.check()
        made.close()


def indices(pool: Any, *pages: int) -> torch.Tensor:
    """Token indices of whole pages, as SGLang's allocator hands them out; of states, their own."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def page(pool: Any, number: int) -> bytes:
    """All bytes of a page, as SGLang's own backends read it."""
    if hasattr(pool, "head_dim") and pool.head_dim != pool.v_head_dim:
        return b"".join(buffer[number].contiguous().view(torch.uint8).numpy().tobytes() for buffer in pool.kv_buffer)
    return bytes(pool.get_data_page(number * pool.page_size).contiguous().view(torch.uint8).numpy().tobytes())


def drained(storage: KVTierStorage) -> KVTierStorage:
    assert all(tiers.drain(10) for tiers in storage._tiers)
    return storage


def transfer(name: PoolName, pool: Any, keys: Sequence[str], pages: Sequence[int], policy: PoolHitPolicy = ALL) -> Any:
    return PoolTransfer(name=name, keys=list(keys), host_indices=indices(pool, *pages), hit_policy=policy)


def wanted(name: PoolName, window: int, policy: PoolHitPolicy = TRAILING) -> Any:
    """What SGLang asks with: only the number of keys counts."""
    return PoolTransfer(name=name, keys=["__placeholder__"] * window, hit_policy=policy)


def sliding() -> dict[PoolName, Any]:
    return {PoolName.KV: rig.keys_and_values(), PoolName.SWA: rig.keys_and_values(layers=5)}  # five pages of one


def recurrent() -> dict[PoolName, Any]:
    return {PoolName.KV: rig.keys_and_values(), PoolName.MAMBA: rig.states()}


def indexed() -> dict[PoolName, Any]:
    first = rig.latents()
    return {PoolName.KV: first, PoolName.INDEXER: rig.indexes(first)}


def drafting() -> dict[PoolName, Any]:
    return {PoolName.KV: rig.keys_and_values(), PoolName.DRAFT: rig.keys_and_values(layers=1, heads=1)}


@pytest.mark.parametrize(("name", "make"), [
    (PoolName.SWA, sliding),
    (PoolName.MAMBA, recurrent),
    (PoolName.INDEXER, indexed),
    (PoolName.DRAFT, drafting),
])  # fmt: skip
def test_what_a_further_pool_keeps_comes_back_in_a_new_process(open_storage: Open, name: PoolName, make: Any) -> None:
    pools = make()
    first, further = pools[PoolName.KV], pools[name]
    storage = open_storage(pools)
    assert storage.batch_set_v2([transfer(name, further, KEYS[:3], [7, 2, 9])]) == {name: [True] * 3}
    assert storage.batch_exists_v2(KEYS, [wanted(name, 1)]).kv_hit_pages == 0  # no KV yet
    assert storage.batch_set_v1(KEYS[:3], indices(first, 1, 3, 5)) == [True] * 3
    kept = [page(further, number) for number in (7, 2, 9)], [page(first, number) for number in (1, 3, 5)]
    storage.close()
    # Other memory, other places.
    pools = make()
    first, further = pools[PoolName.KV], pools[name]
    storage = open_storage(pools)
    assert storage.batch_exists_v2(KEYS, [wanted(name, 1, ALL)]).kv_hit_pages == 3
    assert storage.batch_get_v2([transfer(name, further, KEYS[:3], [4, 0, 11])]) == {name: [True] * 3}
    assert storage.batch_get_v1(KEYS[:3], indices(first, 0, 2, 4)) == [True] * 3
    assert [page(further, number) for number in (4, 0, 11)] == kept[0]
    assert [page(first, number) for number in (0, 2, 4)] == kept[1]
    # A record of one pool is none of another, and none of a page that was not stored.
    assert storage.batch_get_v2([transfer(name, further, KEYS[:4], [4, 0, 11, 6])]) == {name: [True] * 3 + [False]}
    assert storage.batch_get_v2([transfer(PoolName.AUXILIARY_SWA, further, KEYS[:1], [4])])[PoolName.AUXILIARY_SWA] == [
        False
    ]


def test_a_part_that_is_damaged_is_no_part(open_storage: Open, tmp_path: Path) -> None:
    """A state of several records: one bit of one of them, and the state is not served."""
    pools = recurrent()
    storage = open_storage(pools)
    storage.batch_set_v1(KEYS[:2], indices(pools[PoolName.KV], 0, 1))
    storage.batch_set_v2([transfer(PoolName.MAMBA, pools[PoolName.MAMBA], KEYS[1:2], [0], TRAILING)])
    pattern = pools[PoolName.MAMBA].temporal_buffer[0, 2].numpy().tobytes()[:200]  # of the last layer
    storage.close()
    [slab] = (tmp_path / "slabs").glob("*.slab")
    content = bytearray(slab.read_bytes())
    content[content.index(pattern) + 100] ^= 1
    slab.write_bytes(content)
    pools = recurrent()
    storage = open_storage(pools)
    assert storage.batch_exists_v2(KEYS, [wanted(PoolName.MAMBA, 1)]).kv_hit_pages == 2
    again = transfer(PoolName.MAMBA, pools[PoolName.MAMBA], KEYS[1:2], [3], TRAILING)
    assert storage.batch_get_v2([again]) == {PoolName.MAMBA: [False]}
    assert storage.stats()['kvtier_corruption_total{tier="file"}'] == 1
    assert storage.batch_exists_v2(KEYS, [wanted(PoolName.MAMBA, 1)]).kv_hit_pages == 0  # and is asked for no more


@pytest.mark.parametrize("seed", range(12))
def test_hits_are_those_of_sglangs_own_file_backend(open_storage: Open, tmp_path: Path, seed: int) -> None:
    """Whatever was stored of whatever pool: both say the same, also of each pool by itself."""
    chance = random.Random(seed)
    pools = {**recurrent(), PoolName.SWA: rig.keys_and_values(layers=3), PoolName.DRAFT: rig.keys_and_values(layers=1)}
    storage = open_storage(pools, tp_size=2)
    own = HiCacheFile(rig.storage_config({}, tp_size=2), file_path=str(tmp_path / "files"))
    for name, pool in pools.items():
        own.register_mem_host_pool_v2(pool, name)
    held = {name: [key for key in KEYS if chance.random() < share] for name, share in (
        (PoolName.KV, 1.0), (PoolName.MAMBA, 0.5), (PoolName.SWA, 0.8), (PoolName.DRAFT, 0.95),
    )}  # fmt: skip
    held[PoolName.KV] = KEYS[: chance.randrange(4, 12)]
    for name, keys in held.items():
        for key in keys:  # one at a time: a chain's hole would hide what lies behind it
            each = transfer(name, pools[name], [key], [chance.randrange(PAGES)])
            assert storage.batch_set_v2([each]) == own.batch_set_v2([each]) == {name: [True]}
    drained(storage)
    for needed in (
        [],
        [wanted(PoolName.MAMBA, 1)],
        [wanted(PoolName.SWA, 3)],
        [wanted(PoolName.DRAFT, 1, ALL)],
        [wanted(PoolName.SWA, 2), wanted(PoolName.MAMBA, 1)],
        [wanted(PoolName.DRAFT, 1, ALL), wanted(PoolName.SWA, 2)],
    ):
        expected, told = own.batch_exists_v2(KEYS, needed), storage.batch_exists_v2(KEYS, needed)
        assert told.kv_hit_pages == expected.kv_hit_pages
        assert told.restorable_prefix_pages == expected.restorable_prefix_pages
        if len(needed) < 2:  # of several pools, the one that is asked last need not look behind the others' end
            assert told.extra_pool_hit_pages == expected.extra_pool_hit_pages
    storage._storage_config.tp_size = 1  # alone, a rank needs the longest only
    for window in (1, 2, 3):
        expected = own.batch_exists_v2(KEYS, [wanted(PoolName.SWA, window)])
        told = storage.batch_exists_v2(KEYS, [wanted(PoolName.SWA, window)])
        assert told.kv_hit_pages == expected.kv_hit_pages
        assert told.restorable_prefix_pages == expected.restorable_prefix_pages[-1:]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_quantised_pages_are_bytes_that_sglang_knows_to_read(
    open_storage: Open, arguments: SimpleNamespace, tmp_path: Path, layout: str
) -> None:
    arguments.kv_cache_dtype = "fp8_e5m2"
    pool = rig.keys_and_values("layer_first", dtype=torch.float8_e5m2)
    storage = open_storage({PoolName.KV: pool})
    storage.batch_set_v1(KEYS[:2], indices(pool, 3, 4))
    kept = [page(pool, 3), page(pool, 4)]
    storage.close()
    pool = rig.keys_and_values(layout, dtype=torch.float8_e5m2)
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_get_v1(KEYS[:2], indices(pool, 0, 1)) == [True, True]
    if layout != "page_first":  # which has its tokens outside
        assert [page(pool, 0), page(pool, 1)] == kept
    storage.close()
    # Equal bytes would mean something else in another quantisation.
    arguments.kv_cache_dtype = "fp8_e4m3"
    assert open_storage({PoolName.KV: pool}).batch_exists(KEYS) == 0


def test_keys_and_values_of_different_size(open_storage: Open) -> None:
    for layout in ("page_first", "page_first_direct"):
        pool = rig.keys_and_values(layout, head_dim=12, v_head_dim=8)
        storage = open_storage({PoolName.KV: pool})
        keys = KEYS[:2] if layout == "page_first" else KEYS[2:4]
        storage.batch_set_v1(keys, indices(pool, 6, 7))
        part = slice(6 * TOKENS, 8 * TOKENS) if layout == "page_first" else slice(6, 8)
        before = [buffer[part].clone() for buffer in rig.buffers_of(pool)]
        for buffer in rig.buffers_of(pool):
            buffer.zero_()
        drained(storage)
        assert storage.batch_get_v1(keys, indices(pool, 6, 7)) == [True, True]
        for buffer, kept in zip(rig.buffers_of(pool), before, strict=True):
            assert kept.count_nonzero() > 0
            assert torch.equal(buffer[part], kept)
        storage.close()


def test_a_draft_models_pool_comes_late_and_has_its_own_name(
    open_storage: Open, arguments: SimpleNamespace, tmp_path: Path
) -> None:
    arguments.speculative_algorithm = "EAGLE"
    arguments.speculative_draft_model_path = str(rig.save_model(tmp_path / "draft", seed=1))
    pools = drafting()
    storage = open_storage({PoolName.KV: pools[PoolName.KV]})
    storage.register_mem_host_pool_v2(pools[PoolName.DRAFT], PoolName.DRAFT)
    storage.batch_set_v1(KEYS[:2], indices(pools[PoolName.KV], 0, 1))
    storage.batch_set_v2([transfer(PoolName.DRAFT, pools[PoolName.DRAFT], KEYS[:2], [0, 1])])
    assert drained(storage).batch_exists_v2(KEYS, [wanted(PoolName.DRAFT, 1, ALL)]).kv_hit_pages == 2
    storage.close()
    # Another draft model's KV is not this one's; the model's own is.
    arguments.speculative_draft_model_path = str(rig.save_model(tmp_path / "other", seed=2))
    storage = open_storage({PoolName.KV: pools[PoolName.KV]})
    storage.register_mem_host_pool_v2(pools[PoolName.DRAFT], PoolName.DRAFT)
    assert storage.batch_exists(KEYS) == 2
    assert storage.batch_exists_v2(KEYS, [wanted(PoolName.DRAFT, 1, ALL)]).kv_hit_pages == 0
    # One that does not fit a slot is refused, with what to do.
    large = rig.keys_and_values(layers=1, heads=8, head_dim=64)
    with pytest.raises(ConfigError, match=r"pool 'auxiliary_swa' came late.*choose a larger --page-size, or serve"):
        storage.register_mem_host_pool_v2(large, PoolName.AUXILIARY_SWA)


def test_kv_with_loss_has_another_name_and_further_pools_cannot_be_kept_so(arguments: SimpleNamespace) -> None:
    pool = rig.keys_and_values(dtype=torch.bfloat16)
    names = []
    for lossy in ("none", "fp8"):
        storage = rig.open_storage(rig.storage_config({"cache": {"lossy": lossy}}), {PoolName.KV: pool})
        names.append(storage._root)
        storage.close()
    assert names[0] != names[1]
    for pools, said in (
        (drafting(), "pool 'draft' keeps something else than K and V"),
        ({PoolName.KV: rig.latents()}, "kind 'mla'"),
    ):
        with pytest.raises(ConfigError, match=rf'\[cache\] lossy "fp8": {said}.*; leave it out'):
            rig.open_storage(rig.storage_config({"cache": {"lossy": "fp8"}}), pools)


def test_pools_nobody_can_tell_pages_of_are_refused_with_the_way_out(open_storage: Open) -> None:
    class DeepSeekV4PagedHostPool:
        layout = "page_first"

    with pytest.raises(ConfigError, match=r"SGLang: host pool DeepSeekV4PagedHostPool: .*, or another storage backend"):
        open_storage({PoolName.KV: rig.latents(), PoolName.DEEPSEEK_V4_C4: DeepSeekV4PagedHostPool()})

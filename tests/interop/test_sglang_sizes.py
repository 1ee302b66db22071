"""One store for every --tp-size and --pp-size: a rank finds, bit for bit, what ranks of another size have stored."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("needs SGLang; run `make test-sglang`", allow_module_level=True)
import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang_storages as rig
from extent import brief
from sglang.srt.mem_cache.hicache_storage import PoolName
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtier.connector.sglang import storage as adapter
from kvtier.connector.sglang.pool import pool_pages
from kvtier.connector.sglang.storage import KVTierStorage
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.key_schemes import sglang_hashes

LAYERS, HEADS, DIM, PAGES = 4, 4, 8, 6
KEYS = [name.hex() for name in sglang_hashes(list(range(PAGES * rig.TOKENS)), rig.TOKENS)]
INDICES = torch.arange(PAGES * rig.TOKENS)
Open = Callable[..., tuple[KVTierStorage, Any]]


@pytest.fixture
def open_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a rank's storage and its host pool: with its part of the KV of a model, or random."""
    auto: Any = AutoModelForCausalLM
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HEADS * DIM}
    auto.from_config(LlamaConfig(vocab_size=64, intermediate_size=32, **sizes)).save_pretrained(tmp_path / "m")
    arguments: SimpleNamespace = rig.server_arguments(tmp_path / "m")
    monkeypatch.setattr(adapter, "get_server_args", lambda: arguments)

    def open_(
        layout: str, cache: dict[str, Any], rank: tuple[int, int], sizes: tuple[int, int], kv: torch.Tensor | None
    ) -> tuple[KVTierStorage, Any]:
        (tp_rank, pp_rank), (tp, pp) = rank, sizes
        start, width = pp_rank * LAYERS // pp, HEADS // tp
        pool = rig.keys_and_values(layout, layers=LAYERS // pp, heads=width, head_dim=DIM)
        pool.start_layer, pool.end_layer = start, start + LAYERS // pp
        if kv is not None:
            put(pool, kv[start : pool.end_layer, ..., tp_rank * width : (tp_rank + 1) * width, :])
        file = {"path": str(tmp_path / "slabs"), "size": "16MiB"}
        host = {"size": "2MiB", "pin": False}
        options = {"tp_rank": tp_rank, "tp_size": tp, "pp_rank": pp_rank, "pp_size": pp}
        config = rig.storage_config({"file": file, "host": host, "cache": cache}, **options)
        return rig.open_storage(config, {PoolName.KV: pool}), pool

    return open_


def put(pool: Any, kv: torch.Tensor) -> None:
    """`kv` is `[layers, 2, pages, tokens, heads, elements]`."""
    for unit, values in zip(pool_pages(pool).units, kv.flatten(0, 1), strict=True):
        unit[:PAGES].copy_(values)


def read(pool: Any) -> torch.Tensor:
    return torch.stack([unit[:PAGES] for unit in pool_pages(pool).units])


LAYOUTS = ["layer_first", "page_head", "page_first_direct", "page_first"]
SIZES = [[(1, 1), (2, 1), (4, 1), (1, 1)], [(1, 1), (1, 2), (2, 1), (2, 2), (1, 1)], [(4, 2), (1, 1), (4, 2)]]


@pytest.mark.parametrize(("layout", "sizes"), brief([*zip(LAYOUTS, SIZES, strict=False)], [*product(LAYOUTS, SIZES)]))
def test_every_size_finds_what_another_stored(open_rank: Open, layout: str, sizes: list[tuple[int, int]]) -> None:
    cache = {"share_across_tp": 4, "share_across_pp": 2}
    for (stored, loaded), epoch in zip(pairwise(sizes), range(9), strict=False):
        kv = torch.randn(LAYERS, 2, PAGES, rig.TOKENS, HEADS, DIM)
        for rank in [(tp, pp) for tp in range(stored[0]) for pp in range(stored[1])]:
            storage, _ = open_rank(layout, {**cache, "epoch": epoch}, rank, stored, kv)
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_set_v1(KEYS, INDICES) == [True] * PAGES
            storage.close()
        for rank in [(tp, pp) for tp in range(loaded[0]) for pp in range(loaded[1])]:
            other, expected = open_rank(layout, {"epoch": 99}, rank, loaded, kv)
            other.close()
            storage, pool = open_rank(layout, {**cache, "epoch": epoch}, rank, loaded, None)
            assert storage.batch_exists(KEYS) == PAGES
            assert storage.batch_get_v1(KEYS, INDICES) == [True] * PAGES
            assert torch.equal(read(pool), read(expected))
            storage.close()


def test_pages_of_a_size_without_the_option_are_found_and_one_missing_piece_is_a_miss(open_rank: Open) -> None:
    kv = torch.randn(LAYERS, 2, PAGES, rig.TOKENS, HEADS, DIM)
    for rank, count in ((0, PAGES), (1, 4)):
        storage, _ = open_rank("page_first_direct", {}, (rank, 0), (2, 1), kv)
        assert storage.batch_set_v1(KEYS[:count], INDICES[: count * rig.TOKENS]) == [True] * count
        storage.close()
    alone, pool = open_rank("page_first_direct", {"share_across_tp": 2}, (0, 0), (1, 1), None)
    assert alone.batch_exists(KEYS) == 4
    assert alone.batch_get_v1(KEYS, INDICES) == [True] * 4 + [False] * 2
    assert torch.equal(read(pool)[:, :4], kv.flatten(0, 1)[:, :4])
    alone.clear()
    assert alone.batch_exists(KEYS) == 0
    alone.close()


@pytest.mark.parametrize(
    ("layout", "cache", "sizes", "message"),
    [
        (
            "layer_first",
            {"share_across_tp": 3},
            (2, 1),
            r"share_across_tp 3: --tp-size 2 does not divide it; use a mul",
        ),
        ("layer_first", {"share_across_tp": 8}, (1, 1), r"share_across_tp 8: 4 heads a rank as layer_first cannot be"),
        (
            "page_unified",
            {"share_across_tp": 2},
            (1, 1),
            r"as page_unified cannot be cut so; use a number .* page_first_",
        ),
        ("layer_first", {"share_across_pp": 2}, (1, 4), r"share_across_pp 2: it cuts 4 layers elsewhere; use a multip"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    open_rank: Open, layout: str, cache: dict[str, int], sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_rank(layout, cache, (0, 0), sizes, None)


def test_a_page_with_a_part_in_another_pool_is_refused(open_rank: Open, tmp_path: Path) -> None:
    _, pool = open_rank("page_first_direct", {}, (0, 0), (1, 1), None)
    config = rig.storage_config({"cache": {"share_across_tp": 2}})
    with pytest.raises(ConfigError, match="share_across_pp: pages are cut, and pool 'mamba' cannot be; leave both out"):
        rig.open_storage(config, {PoolName.KV: pool, PoolName.MAMBA: rig.states()})

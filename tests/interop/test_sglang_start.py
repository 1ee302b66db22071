"""KVTierStorage as SGLang's factory and threads call it, without an engine: start, refusals, pages, counters."""

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("needs SGLang; run `make test-sglang`", allow_module_level=True)
import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang_storages as storages
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName
from sglang_storages import save_model, server_arguments, storage_config

from kvtier.connector.sglang import storage as adapter
from kvtier.connector.sglang.storage import KVTierStorage
from kvtier.tiers.errors import ConfigError, StoreLocked
from kvtier.tiers.naming.key_schemes import sglang_hashes

TOKENS, LAYERS, PAGES, HEADS, DIM = 4, 2, 8, 2, 8


class MHATokenToKVPoolHost:
    """What of SGLang's host pool is read."""

    storage_format_tag: Any = None
    layout = "layer_first"
    layer_num, start_layer, end_layer = LAYERS, 0, LAYERS
    head_num, head_dim, v_head_dim = HEADS, DIM, DIM

    def __init__(self, page_size: int = TOKENS, dtype: torch.dtype = torch.float32) -> None:
        self.page_size, self.dtype = page_size, dtype
        self.kv_buffer = torch.randn(2, LAYERS, PAGES * TOKENS, HEADS, DIM).to(dtype)

    def page(self, number: int) -> torch.Tensor:
        return self.kv_buffer[:, :, number * self.page_size : (number + 1) * self.page_size]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def arguments(model: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's own, as it was started; tests change them."""
    made = server_arguments(model)
    monkeypatch.setattr(adapter, "get_server_args", lambda: made)
    return made


Open = Callable[..., KVTierStorage]


@pytest.fixture
def open_storage(arguments: SimpleNamespace, tmp_path: Path) -> Iterator[Open]:
    opened: list[KVTierStorage] = []

    def open_(extra: dict[str, Any] | None = None, pool: Any = None, **changes: Any) -> KVTierStorage:
        file = {"path": str(tmp_path / "slabs"), "size": "4MiB"}
        config = storage_config({"file": file, **(extra or {})}, **changes)
        opened.append(storages.open_storage(config, {PoolName.KV: pool or MHATokenToKVPoolHost()}))
        return opened[-1]

    yield open_
    for made in opened:
        made.close()


KEYS = [name.hex() for name in sglang_hashes(list(range(6 * TOKENS)), TOKENS)]


def tokens_of(*pages: int) -> torch.Tensor:
    """Token indices of whole pages, as SGLang's allocator hands them out."""
    return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def test_pages_go_out_and_come_back_at_other_places(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost()
    storage = open_storage(pool=pool)
    assert storage.batch_exists(KEYS) == 0
    before = [pool.page(page).clone() for page in (5, 1, 3)]
    assert storage.batch_set_v1(KEYS[:3], tokens_of(5, 1, 3)) == [True] * 3
    pool.kv_buffer.zero_()
    assert all(tiers.drain(10) for tiers in storage._tiers)
    assert storage.batch_exists(KEYS) == 3
    assert storage.exists(KEYS[2])
    assert storage.batch_get_v1(KEYS[:4], tokens_of(0, 7, 2, 4)) == [True, True, True, False]
    for page, content in zip((0, 7, 2), before, strict=True):
        assert torch.equal(pool.page(page), content)
    # The rest of a chain by itself, its prefix named.
    info = HiCacheStorageExtraInfo(prefix_keys=KEYS[:3])
    assert storage.batch_set_v1(KEYS[3:5], tokens_of(0, 1), info) == [True, True]
    # SGLang's metrics hook: what was moved since it was last asked.
    stats = storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [3, 2])
    assert min(*stats.prefetch_bandwidth, *stats.backup_bandwidth) > 0
    assert storage.get_stats().prefetch_pgs == []
    storage.clear()
    assert storage.batch_exists(KEYS) == 0


def test_indices_that_are_not_whole_pages_are_refused_and_counted(open_storage: Open) -> None:
    storage = open_storage()
    for wrong in (tokens_of(0, 1)[:-1], tokens_of(0, 1) + 1, tokens_of(0, 1).flip(0)):
        assert storage.batch_set_v1(KEYS[:2], wrong) == [False, False]
        assert storage.batch_get_v1(KEYS[:2], wrong) == [False, False]
    assert storage.stats()['kvtier_miss_total{reason="copy_failed"}'] == 12


def test_a_closed_storage_finds_nothing_and_the_next_one_everything(
    open_storage: Open, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage()
    storage.batch_set_v1(KEYS[:3], tokens_of(0, 1, 2))
    with caplog.at_level("INFO"):
        storage.close()
        storage.close()
    [closed] = [record.message for record in caplog.records if record.message.startswith("kvtier closed: ")]
    assert json.loads(closed.removeprefix("kvtier closed: "))['kvtier_store_blocks_total{tier="file"}'] == 3
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS[:1], tokens_of(0)) == [False]
    assert storage.batch_set_v1(KEYS[:1], tokens_of(0)) == [False]
    assert open_storage().batch_exists(KEYS) == 3


def test_sglang_is_told_to_use_the_calls_without_a_copy_between(arguments: SimpleNamespace) -> None:
    config = storage_config({})
    storage = KVTierStorage(config, {})
    assert config.extra_config["interface_v1"] == 1
    # The older ones, a page a tensor, are answered and do nothing.
    assert storage.batch_get(KEYS[:2]) == [None, None]
    assert storage.set(KEYS[0], torch.zeros(1)) is False
    assert storage.batch_set(KEYS[:2], [torch.zeros(1)] * 2) is False


def test_ranks_share_the_bounds_and_nothing_else(open_storage: Open, tmp_path: Path) -> None:
    first, second = open_storage(tp_size=2), open_storage(tp_size=2, tp_rank=1)
    first.batch_set_v1(KEYS[:3], tokens_of(0, 1, 2))
    first.close()
    assert second.batch_exists(KEYS) == 0
    slabs = sorted((tmp_path / "slabs").glob("*/*.slab"))
    assert [slab.parent.name for slab in slabs] == ["tp0-pp0", "tp1-pp0"]
    assert sum(slab.stat().st_size for slab in slabs) <= 4 << 20
    # A second server over the same directory is told who has it.
    with pytest.raises(StoreLocked, match="in use by process"):
        open_storage(tp_size=2, tp_rank=1)


def change(**changes: Any) -> Callable[[SimpleNamespace], None]:
    return lambda arguments: arguments.__dict__.update(changes)


@pytest.mark.parametrize(
    ("started", "options"),
    [
        (change(dtype="bfloat16"), {}),
        (change(quantization="fp8"), {}),
        (change(kv_cache_dtype="fp8_e5m2"), {}),
        (change(json_model_override_args='{"rope_theta": 5000.0}'), {}),
        (change(), {"pool": MHATokenToKVPoolHost(dtype=torch.bfloat16)}),
        (change(), {"pool": MHATokenToKVPoolHost(page_size=2 * TOKENS)}),
        (change(modelopt_quant="fp8"), {}),
        (change(decrypted_config_file="generation_config.json"), {}),
        (change(), {"variable": "SGLANG_SIMULATE_UNIFORM_EXPERTS"}),
        (change(), {"extra": {"cache": {"epoch": 1}}}),
    ],
)
def test_whatever_changes_kv_is_another_name(
    open_storage: Open,
    arguments: SimpleNamespace,
    tmp_path: Path,
    started: Callable[[SimpleNamespace], None],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_storage().close()
    open_storage().close()
    assert len(list((tmp_path / "slabs").glob("*.slab"))) == 1
    started(arguments)
    if (variable := options.pop("variable", None)) is not None:
        monkeypatch.setenv(variable, "1")
    open_storage(**options).close()
    assert len(list((tmp_path / "slabs").glob("*.slab"))) == 2


def test_an_adapter_of_the_start_with_other_weights_is_another_name(
    open_storage: Open, arguments: SimpleNamespace, tmp_path: Path
) -> None:
    """SGLang's name of its pages stays, if the files at its path change between two starts."""
    adapter = save_model(tmp_path / "adapter")
    arguments.lora_paths = [SimpleNamespace(lora_name="a", lora_path=str(adapter))]
    for num_slabs in (1, 2):
        for _ in range(2):
            open_storage().close()
            assert len(list((tmp_path / "slabs").glob("*.slab"))) == num_slabs
        (adapter / "adapter_config.json").write_text('{"lora_alpha": 640}')
    arguments.lora_paths[0].lora_path = "somebody/nothing"
    with pytest.raises(ConfigError, match="--lora-paths 'somebody/nothing': no checkpoint of that name here"):
        open_storage()


@pytest.mark.parametrize(
    ("extra", "changes", "line"),
    [
        ({"interface_v1": 0}, {}, "extra config, interface_v1 0: kvtier has no other; leave it out, or "),
        ({"file": {"size": "no"}}, {}, '[file] size "no": not a size; '),
        ({"cash": {"epoch": 1}}, {}, "[cash]: unknown section; did you mean [cache]?"),
        ({"epoch": 1}, {}, "epoch 1: belongs in a section; write it as [cache] epoch"),
        ({"config": "none.toml"}, {}, '--config "none.toml": No such file or directory; '),
        ({"cache": {"cache_salt": "t"}}, {}, '[cache] cache_salt "t": SGLang salts each request; '),
        ({"cache": {"block_size": 32}}, {}, "[cache] block_size 32: SGLang's pages have 4 tokens; leave it out, or "),
        ({}, {"is_mla_model": True, "tp_size": 2}, "SGLang: tensor parallel size 2 of an MLA model: its first rank "
         "alone stores, and a slab is open in one process; start `kvtier serve` on this node, and add "),
        ({}, {"attn_cp_size": 2}, "SGLang: attn_cp_size 2: "),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(
    open_storage: Open, extra: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)) as refused:
        open_storage(extra, **changes)
    assert "\n" not in str(refused.value)


def test_models_without_a_name_are_refused(open_storage: Open, arguments: SimpleNamespace) -> None:
    arguments.load_format = "dummy"
    with pytest.raises(ConfigError, match="--load-format dummy: random weights have no name"):
        open_storage()
    arguments.load_format = "remote_instance"
    with pytest.raises(ConfigError, match="--load-format remote_instance: weights from elsewhere"):
        open_storage()
    arguments.load_format, arguments.model_path = "auto", "somebody/nothing"
    with pytest.raises(ConfigError, match="--model-path 'somebody/nothing': no checkpoint of that name here"):
        open_storage()


def test_rope_that_follows_a_batch_is_refused_unless_no_text_can_be_long(
    open_storage: Open, arguments: SimpleNamespace
) -> None:
    longrope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1],
        "long_factor": [2],
    }
    arguments.json_model_override_args = json.dumps({"rope_parameters": longrope})
    for length in (None, 65):
        arguments.context_length = length
        with pytest.raises(
            ConfigError, match="one of more than 64 tokens with another RoPE; start with --context-length 64"
        ):
            open_storage()
    arguments.context_length = 64
    assert open_storage().batch_exists(KEYS) == 0
    arguments.json_model_override_args = json.dumps({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    with pytest.raises(ConfigError, match="depends on the text's length in a way unknown here; leave kvtier out"):
        open_storage()


def test_other_versions_are_refused_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("0.5.22", "0.6.0", "1.0", "0.0.0.dev0"):
        with pytest.raises(ConfigError, match=rf"sglang {version}: this kvtier serves sglang>=0.5.23,<0.6; install"):
            adapter._check_version(version)
    adapter._check_version("0.5.23")
    assert not caplog.records
    adapter._check_version("0.5.24.post1")
    assert "sglang 0.5.24.post1: this kvtier was tested with sglang 0.5.23" in caplog.text


def test_options_without_effect_are_warned_of(arguments: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    KVTierStorage(storage_config({"cache": {"store_generated": False}}), {})
    assert "[cache] store_generated has no effect: SGLang decides what it backs up" in caplog.text

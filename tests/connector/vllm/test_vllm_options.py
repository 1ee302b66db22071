"""What a user may say in vLLM's extra config, and what kvtier answers where that is a slip."""

import importlib
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.connector.vllm import plugin as vllm_plugin
from kvtier.connector.vllm.options import VllmOptions, warn_of_policy
from kvtier.tiers.errors import ConfigError


def test_sections_of_our_configuration_and_four_words(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[host]\nsize = "2GiB"\n[cache]\nepoch = 3\n')
    options = VllmOptions.of({"config": str(file), "host": {"size": "1MiB"}, "keys": "kvtier", "layerwise": True})
    assert options.config.host.size == 1 << 20  # what stands beside the file overrides it
    assert options.config.cache.epoch == 3
    assert options.keys == "kvtier"
    assert options.layerwise
    assert VllmOptions.of({}).keys == "vllm"
    assert VllmOptions.of({}).on_reset == "drop"
    assert VllmOptions.of({"on_reset": "keep"}).on_reset == "keep"


def test_workers_can_map_l2_and_this_process_does_not_pin_it() -> None:
    options = VllmOptions.of({"host": {"size": "1MiB"}})
    assert options.shared().host.shared
    assert not options.shared().host.pin
    assert options.shared().host.size == 1 << 20


def test_data_parallel_replicas_have_a_directory_each() -> None:
    options = VllmOptions.of({"file": {"path": "kv", "size": "4GiB"}})
    alone, second = options.shared().file, options.shared(1, 2).file
    assert (alone.path, alone.size) == (Path("kv"), 4 << 30)
    assert (second.path, second.size) == (Path("kv/replica-1"), 2 << 30)


def test_an_unknown_name_is_a_warning_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    options = VllmOptions.of({"hots": {"size": "1MiB"}, "file": {"pathh": "kv"}, "layer_wise": True})
    assert options.config.file.path is None
    assert not options.layerwise
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config, hots: unknown and ignored; did you mean host?",
        "kv_connector_extra_config, file.pathh: unknown and ignored; did you mean path?",
        "kv_connector_extra_config, layer_wise: unknown and ignored; did you mean layerwise?",
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"keys": "sglang"}, r"keys 'sglang': use \"vllm\" \(its own hashes\) or \"kvtier\""),
        ({"layerwise": "yes"}, "layerwise 'yes': use true or false"),
        ({"on_reset": "forget"}, r"on_reset 'forget': use \"drop\" .* or \"keep\""),
        ({"host": 5}, "host 5: not a section"),
        ({"host": {"size": "5 apples"}}, r"\[host\] size \"5 apples\": no unit 'apples'"),
        ({"config": "/nowhere.toml"}, "No such file or directory; name a TOML file"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmOptions.of(extra)


def test_what_is_legal_and_hardly_meant_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    VllmOptions.of({"cache": {"block_size": 16}}).warn(32, 1024)
    assert "[cache] block_size 16: vLLM's blocks have 32 tokens" in caplog.text
    assert "--block-size 16" in caplog.text
    caplog.clear()
    VllmOptions.of({"cache": {"block_size": 32}}).warn(32, 1024)
    warn_of_policy("recompute")
    assert not caplog.records
    warn_of_policy("fail")
    [record] = caplog.records
    assert 'kv_load_failure_policy "fail"' in record.getMessage()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_the_import_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"needs vLLM from 0\.32 on \(No module named 'vllm'\); pip install 'vllm<0"):
        _ = importlib.import_module("kvtier.connector.vllm").KVTierConnector


def test_a_consumer_whose_tiers_nothing_fills_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    alone, shared = VllmOptions.of({}), VllmOptions.of({"redis": {"url": "redis://elsewhere"}})
    alone.warn(16, 1024)
    shared.warn(16, 1024, stores=False)
    assert not caplog.records
    alone.warn(16, 1024, stores=False)
    assert 'kv_role "kv_consumer": this vLLM only loads, and nothing else fills its tiers' in caplog.text


def test_a_block_that_no_prompt_fills_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Models with recurrent states or uneven KV groups may have blocks of thousands of tokens."""
    VllmOptions.of({}).warn(256, 257)
    assert not caplog.records
    VllmOptions.of({}).warn(256, 256)
    assert "--max-model-len 256: a block has 256 tokens here" in caplog.text


def test_memory_that_a_few_steps_fill_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    VllmOptions.of({"host": {"size": "96MiB"}}).warn_of_memory(16, 1 << 20, 512)  # three steps of 32 blocks
    VllmOptions.of({"host": {"size": "2MiB"}, "service": {"socket": "/run/kv"}}).warn_of_memory(16, 1 << 20, 512)
    assert not caplog.records
    VllmOptions.of({"host": {"size": "2MiB"}}).warn_of_memory(16, 1 << 20, 513)
    assert "[host] size 2 MiB: room for 2 blocks, and one step fills up to 33" in caplog.text
    assert "give it 99 MiB or more" in caplog.text


# vLLM's plugin entry point where there is no vLLM, and where there is one that this kvtier does not know.


FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """vLLM's `KVConnectorFactory` as far as the plugin uses it."""

    names: dict[str, tuple[str, str]]

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.names:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.names[name] = module_path, class_name


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the module that holds the factory; its parents are packages."""
    parts = FACTORY.split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module = ModuleType(FACTORY)
    monkeypatch.setitem(sys.modules, FACTORY, module)
    monkeypatch.setattr(Factory, "names", {}, raising=False)
    monkeypatch.setattr(vllm_plugin, "_registered", set())
    module.KVConnectorFactory = Factory  # type: ignore[attr-defined]
    return module


OURS = {"KVTierConnector": ("kvtier.connector.vllm", "KVTierConnector")}


def test_the_name_is_registered_once_however_often_vllm_asks(
    vllm: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        vllm_plugin.register()
    assert Factory.names == OURS
    assert not caplog.records


def test_a_foreign_registration_stays_and_is_said(vllm: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    Factory.names["KVTierConnector"] = theirs = ("their.module", "KVTierConnector")
    for _ in range(2):
        vllm_plugin.register()
    assert Factory.names == {"KVTierConnector": theirs}
    [record] = caplog.records
    assert 'set kv_connector_module_path to "kvtier.connector.vllm"' in record.getMessage()


def test_a_vllm_that_has_no_such_factory_starts_all_the_same(vllm: ModuleType) -> None:
    delattr(vllm, "KVConnectorFactory")
    vllm_plugin.register()
    assert not Factory.names


def test_without_vllm_nothing_happens_and_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"  # any import of it fails
        "from kvtier.connector.vllm.plugin import register; register()\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

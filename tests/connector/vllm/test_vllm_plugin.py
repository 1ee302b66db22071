"""vLLM's plugin entry point where there is no vLLM, and where there is one that this kvtier does not know."""

import subprocess
import sys
from types import ModuleType

import pytest

from kvtier.connector.vllm import plugin as vllm_plugin

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

"""Extension modules: one that is stale, broken or turned off is not used, and health says so."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.service.doctor.doctor import check_compiled
from kvtier.tiers.compiled import extensions as compiled
from kvtier.tiers.compiled.extensions import EXTENSIONS, ExtensionStatus, extension, status
from kvtier.tiers.finding import Status

ROOT = Path(__file__).resolve().parents[3]
NAME = EXTENSIONS[0]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has one module of the name built of a source, imported as an object that carries a digest; returns how."""
    compiled._loaded.cache_clear()
    monkeypatch.setattr(compiled, "EXTENSIONS", (NAME,))

    def build(source: str, digest: str | Exception) -> None:
        file = tmp_path / f"{NAME.rpartition('.')[2]}.so"
        file.with_suffix(".pyx").write_text(source)
        module = ModuleType(NAME)
        module.SOURCE_DIGEST = digest  # type: ignore[attr-defined]

        def imported(name: str) -> ModuleType:
            if isinstance(digest, Exception):
                raise digest
            return module

        monkeypatch.setattr(compiled, "find_spec", lambda name: type("Spec", (), {"origin": str(file)}))
        monkeypatch.setattr(compiled, "importlib", SimpleNamespace(import_module=imported))

    yield build
    monkeypatch.undo()
    compiled._loaded.cache_clear()


def test_every_source_in_the_tree_is_a_module_that_is_known() -> None:
    both = ("tiers/reuse/recent", "tiers/pool/core", "service/events/holders", "service/router/scores")
    sources = [*(ROOT / "tiers").rglob("*_compiled.pyx"), *(ROOT / f"{each}_compiled.pyx" for each in both)]
    names = {"kvtier." + ".".join(each.relative_to(ROOT).with_suffix("").parts) for each in sources}
    assert names == set(EXTENSIONS)


def test_a_module_of_another_source_is_not_used(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    built("x = 1\n", "0" * 64)
    assert extension(NAME) is None
    assert extension(NAME) is None
    assert len(caplog.records) == 1  # said once
    (found,) = status()
    assert found.state == "broken"
    assert "built of another read_queue_compiled.pyx" in found.reason
    assert check_compiled().status is Status.WARNING


def test_a_module_that_cannot_be_imported_is_not_used(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    built("x = 1\n", ImportError("undefined symbol: xxx"))
    assert extension(NAME) is None
    assert "undefined symbol" in caplog.text
    assert check_compiled().status is Status.WARNING


def test_where_there_was_no_compiler_health_says_degraded(
    built: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert extension(NAME) is None
    assert status() == [ExtensionStatus(NAME, "not built", "installed where there was no C compiler")]
    found = check_compiled()
    assert found.status is Status.WARNING
    assert "degraded: 0 of 1 extension modules" in found.found
    assert not caplog.records


def test_off_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    assert extension(NAME) is None
    assert {each.state for each in status()} == {"off"}
    assert check_compiled().status is Status.OK

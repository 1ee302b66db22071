"""kvtier as a child of vLLM's MultiConnector, as prefill/decode set-ups have it, and its name in vLLM's factory."""

import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from failing_connector import SWITCH
from test_vllm_processes import CACHED, PROMPTS, run
from vllm.config import VllmConfig
from vllm_rig import Engine, engine, multi, said, tiers

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.vllm import plugin as vllm_plugin
from kvtier.tiers.copies.transfer import PartCopier

pytestmark = pytest.mark.timeout(300)

WARNING: Final = 'kv_load_failure_policy "fail": a request whose KV cannot be loaded'
FAILING: Final = {
    "kv_connector": "FailingConnector",
    "kv_connector_module_path": "failing_connector",
    "kv_role": "kv_both",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("named", brief(["by name"], ["by name", "by path, where vLLM loads no plugins"]))
def test_at_info_metrics_find_the_connector(named: str, model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as vllm:
        assert vllm.text(PROMPTS) == expected
    by_path = named != "by name"
    child = {"kv_connector_module_path": "kvtier.connector.vllm"} if by_path else {}
    env = {"VLLM_LOGGING_LEVEL": "INFO", **({"VLLM_PLUGINS": ""} if by_path else {})}
    told = run(model, None, env=env, transfer=multi(tiers(tmp_path), **child))
    assert (told.text, told.cached) == (expected, CACHED), told.told
    assert "Creating v1 connector with name: MultiConnector" in told.log  # it is INFO that is logged
    assert "is not registered" not in told.log
    assert WARNING not in told.log  # the child's policy is "fail", as vLLM's default is; the outer one counts


@pytest.mark.parametrize(
    ("outer", "inner"), brief([("fail", "recompute")], [("recompute", "fail"), ("fail", "recompute")])
)
def test_the_outer_policy_counts(
    outer: str, inner: str, model: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, transfer=multi(tiers(), policy=outer, kv_load_failure_policy=inner)) as vllm:
        assert (WARNING in caplog.text) == (outer == "fail")
        assert vllm.text(PROMPTS) == expected
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)


def test_what_was_computed_on_blocks_another_connector_could_not_load_is_not_kept(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, transfer=multi(tiers(), FAILING)) as vllm:
        # Two blocks of each prompt never come; vLLM learns it behind the step that computed on them, and begins anew.
        monkeypatch.setitem(SWITCH, "on", True)
        assert vllm.text(PROMPTS) == expected
        assert SWITCH["failed"] >= 2 * len(PROMPTS)
        monkeypatch.setitem(SWITCH, "on", False)
        vllm.forget_l1()
        # Nothing of that is found: the prompts are computed, and from then on kept.
        assert vllm.text(PROMPTS) == expected
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)


@pytest.mark.parametrize("policy", brief(["recompute"], ["recompute", "fail"]))
def test_with_several_batches_in_flight_no_load_is_waited_for(
    policy: str, model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM could not take back the step that was planned behind one whose load failed."""
    loads: list[bool] = []
    allocated = SchedulerSide.allocated

    def seen(self: SchedulerSide, *arguments: Any, layerwise: bool = False) -> int:
        tokens = allocated(self, *arguments, layerwise=layerwise)
        loads.extend([layerwise] if tokens else [])
        return tokens

    monkeypatch.setattr(SchedulerSide, "allocated", seen)
    for batches, waits in ((1, True), (2, False)):
        monkeypatch.setattr(VllmConfig, "max_concurrent_batches", batches)
        loads.clear()
        with engine(model, tiers(), policy=policy) as vllm:
            assert vllm.text(PROMPTS) == expected
            vllm.forget_l1()
            assert vllm.text(PROMPTS) == expected
        assert loads == [waits] * len(PROMPTS)


def test_two_kvtiers_of_one_engine_keep_their_last_reports_apart(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count their copies alike: what one ended must not make the other's slots visible."""
    first, second = tmp_path / "first", tmp_path / "second"
    sibling = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers(first)}
    vllm = Engine(model, transfer=multi(tiers(second), sibling))
    halves = [child._scheduler for child in vllm.scheduler.connector.sub_connectors]
    fails, copy, ends = halves[0].side.tiers.region.region_id, PartCopier.copy, threading.Event()

    def slow(self: PartCopier, direction: Any, copies: Any, cancelled: Any = bool) -> str | None:
        ends.wait(20)  # each copy outlives the requests, however slow their steps are
        failed = self._region.region_id == fails
        return "the test failed this copy" if failed else copy(self, direction, copies, cancelled)

    # The engine ends with stores in flight: the workers report them at the end, the first one's as failed.
    monkeypatch.setattr(PartCopier, "copy", slow)
    assert vllm.text(PROMPTS) == expected
    assert all(half.pending for half in halves)
    threading.Timer(0.3, ends.set).start()
    vllm.core.shutdown()
    monkeypatch.setattr(PartCopier, "copy", copy)
    for folder, cached in ((first, [0, 0, 0]), (second, CACHED)):
        with engine(model, tiers(folder)) as alone:
            assert said(alone.run(PROMPTS)) == (expected, cached)


def test_the_installed_package_names_its_entry_point() -> None:
    [point] = entry_points(group="vllm.general_plugins", name="kvtier")
    assert point.load() is vllm_plugin.register


def test_registering_imports_nothing_that_vllm_had_not() -> None:
    """Where an engine core's process calls it: the name is known, and kvtier's connector not imported yet."""
    program = (
        "import sys, vllm.v1.engine.core; before = set(sys.modules)\n"
        "from kvtier.connector.vllm.plugin import register; register()\n"
        "new = (name for name in set(sys.modules) - before if name.split('.')[0] in ('kvtier', 'torch', 'vllm'))\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "print(*new, 'KVTierConnector' in KVConnectorFactory._registry)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split()[-1] == "True"
    assert set(done.stdout.split()[:-1]) == {
        "kvtier",
        "kvtier.connector",
        "kvtier.connector.vllm",
        "kvtier.connector.vllm.plugin",
    }

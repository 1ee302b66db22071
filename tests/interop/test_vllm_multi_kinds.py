"""kvtier under MultiConnector beside each kind of connector: vLLM's own that keep KV, and one that hands it over."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from failing_connector import SWITCH
from pulling_connector import LOST, SENT
from test_vllm_multi import FAILING
from test_vllm_prefill_decode import PREFILL, ask, cached, texts
from test_vllm_states import OPTIONS as STATE_OPTIONS
from vllm_rig import BLOCK, Engine, engine, make_checkpoint, multi, prompt, tiers

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt(1, 200), prompt(2, 110), prompt(3, 170)]
CACHED = [192, 96, 160]
PULLING: Final = {
    "kv_connector": "PullingConnector",
    "kv_connector_module_path": "pulling_connector",
    "kv_role": "kv_both",
}
OFFLOADING: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 32 << 20,
    },
}


def order(transfer: dict[str, Any], kvtier_first: bool) -> dict[str, Any]:
    """The same children, kvtier before or behind its sibling: the first one that has something loads."""
    children = transfer["kv_connector_extra_config"]["connectors"]
    if kvtier_first:
        children.reverse()
    return transfer


def half(vllm: Engine) -> Any:
    """kvtier's half in the scheduler, wherever it stands among the children."""
    [ours] = [each for each in vllm.scheduler.connector.sub_connectors if hasattr(each, "_scheduler_half")]
    return ours._scheduler


def forget(vllm: Engine) -> None:
    """Copies have ended, and vLLM's own prefix cache is empty."""
    for _ in range(1000):
        if not half(vllm).pending:
            break
        vllm.core.engine_core.step()
    assert half(vllm).side.tiers.drain(60)
    assert vllm.llm.llm_engine.reset_prefix_cache()


@contextmanager
def beside(model: Path, transfer: dict[str, Any]) -> Iterator[Engine]:
    """An engine for a `with` block, wherever kvtier stands among the children; checked and shut down behind it."""
    vllm = Engine(model, transfer=transfer)
    try:
        yield vllm
        forget(vllm)
        half(vllm).side.tiers.check()
        assert not half(vllm)._rows
    finally:
        vllm.core.shutdown()


@pytest.mark.parametrize("kvtier_first", brief([True], [False, True]))
def test_beside_vllms_shared_storage(
    kvtier_first: bool, model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """vLLM's example keeps whole prompts in files. Either child answers for the other, once that has lost them."""
    files = tmp_path / "files"
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    with beside(model, order(multi(tiers(), example), kvtier_first)) as vllm:
        for lost in ("nothing", "files", "tiers"):
            if lost == "files":
                shutil.rmtree(files)
                files.mkdir()
            if lost == "tiers":
                half(vllm).side.tiers.reset()
            for wanted in ([0, 0, 0], CACHED) if lost == "nothing" else (CACHED,):
                outputs = vllm.run(PROMPTS)
                assert (texts(outputs), cached(outputs)) == (expected, wanted), lost
                forget(vllm)


@pytest.mark.parametrize("kvtier_first", brief([False], [False, True]))
def test_beside_vllms_own_offloading(kvtier_first: bool, model: Path, expected: list[list[int]]) -> None:
    with beside(model, order(multi(tiers(), OFFLOADING), kvtier_first)) as vllm:
        for wanted in ([0, 0, 0], CACHED, CACHED):
            outputs = vllm.run(PROMPTS)
            assert (texts(outputs), cached(outputs)) == (expected, wanted)
            forget(vllm)
        loaded = half(vllm).side.tiers.stats().get('kvtier_bytes_total{tier="l2",direction="load"}', 0)
        assert (loaded > 0) == kvtier_first  # the other child had all of it


@pytest.mark.parametrize("role", brief(["kv_consumer"], ["kv_both", "kv_consumer"]))
def test_beside_a_connector_that_hands_kv_over(
    role: str, model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NIXL does. The answer has the parameters of both; the decode node pulls, and does not wait for kvtier."""
    SENT.clear()
    monkeypatch.setitem(LOST, "pulled", 0)
    with beside(model, multi(tiers(tmp_path / "prefill"), PULLING)) as prefill:
        handed = [output.kv_transfer_params for output in ask(prefill, PROMPTS, [PREFILL] * 3, 1)]
    told = {"do_remote_prefill", "do_remote_decode", "remote_request_id", "kvtier"}
    assert all(told <= set(each) for each in handed)  # vLLM adds how many tokens the prefill node had cached
    with beside(model, multi(tiers(tmp_path / "decode"), PULLING, kv_role=role)) as decode:
        assert texts(ask(decode, PROMPTS, [dict(each) for each in handed])) == expected
        assert LOST["pulled"] == 3
        forget(decode)
        # the prefill node has died: pulls fail, and the decode node computes
        monkeypatch.setitem(LOST, "on", True)
        monkeypatch.setitem(LOST, "failed", 0)
        half(decode).side.tiers.reset()
        assert texts(ask(decode, PROMPTS, handed)) == expected
        assert LOST["failed"] == 3
        forget(decode)
        # what it stored meanwhile is right, and without a hand-over kvtier loads it
        outputs = ask(decode, PROMPTS, [None] * 3)
        assert (texts(outputs), cached(outputs)) == (expected, CACHED if role == "kv_both" else [0, 0, 0])


@pytest.mark.parametrize("kind", [*brief([], ["layerwise"]), "states"])
def test_kinds_of_loads_beside_a_child_that_fails(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads by layers, and recurrent states: as without a sibling, and behind one that promised and did not load."""
    has_states = kind == "states"
    family, dtype = ("qwen3-next", torch.bfloat16) if has_states else ("llama", torch.float32)
    model = make_checkpoint(family, tmp_path / "model", dtype=dtype)
    options: dict[str, Any] = STATE_OPTIONS if has_states else {}
    tokens, size = (prompt(1, 700), 160) if has_states else (PROMPTS[0], BLOCK)
    with engine(model, **options) as plain:
        right = plain.text([tokens])
    with engine(model, transfer=multi(tiers(layerwise=kind == "layerwise"), FAILING), **options) as vllm:
        for wanted in (0, len(tokens) // size * size):
            [output] = vllm.run([tokens])
            assert ([list(output.outputs[0].token_ids)], output.num_cached_tokens) == (right, wanted)
            vllm.forget_l1()
        if has_states:
            return
        monkeypatch.setitem(SWITCH, "on", True)
        assert vllm.text([tokens]) == right
        monkeypatch.setitem(SWITCH, "on", False)
        vllm.forget_l1()
        [output] = vllm.run([tokens])
        assert ([list(output.outputs[0].token_ids)], output.num_cached_tokens) == (right, 192)


def test_two_kvtiers_answer_a_prefill_request_once(model: Path) -> None:
    """vLLM ends if two children answer under one key."""
    sibling = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers()}
    with engine(model, transfer=multi(tiers(), sibling)) as vllm:
        handed = [output.kv_transfer_params for output in ask(vllm, PROMPTS, [PREFILL] * 3, 1)]
        assert [each["kvtier"]["blocks"] for each in handed] == [len(tokens) // BLOCK for tokens in PROMPTS]
